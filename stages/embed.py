"""Text embeddings of prompts. The only stage that loads text encoders."""

import json
from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from typing import Any

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models._loading import PREFIX
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.layouts import cut
from stages.artifacts.pool import INDEX, TEXTS, index_of
from stages.artifacts.records import FileEntry
from stages.artifacts.request import Request
from stages.contracts import RECORDS
from stages.execution.context import Context
from stages.formats.embeddings import EMPTY, NEGATIVE, Pool, Text, with_references
from stages.formats.parts import REFERENCES, Parts, references_in
from stages.formats.references import Pictures
from stages.training.loading import load_model

TEXTS_AT_ONCE = 8
"""Texts that a worker of an elastic stage encodes at once."""


def run(request: Request, context: Context[Group]) -> dict[str, int]:
    """Encode the texts that the store's pool lacks, and write ``index.json``: the pool's file of each prompt."""
    config, ranks = request.settings(contracts.Embed), context.ranks
    texts = _texts(request, config)
    distinct = sorted({*texts.values()})
    # Written before the stage looks into the pool: no sweep deletes the files that a layout names.
    context.layout({TEXTS: sorted({text.name for text in distinct})})
    spec = directories.spec(directories.resolve_path(config.model.path))
    pool = Pool(request, ranks.numerics, spec.unread_padding)
    encoder = _Encoder(request, config, context)
    if context.handed is None:
        found, _ = _entries(encoder, distinct[ranks.rank :: ranks.world_size], pool, context)
        mine = index_of(found)
    else:
        mine = _index_by_workers(encoder, cut(distinct, TEXTS_AT_ONCE), pool, context)
    entries = {name: entry for some in ranks.gather(mine) for name, entry in some.items()}
    if ranks.rank == 0:
        context.attempt.put_json(INDEX, {one: entries[text.name] for one, text in texts.items()})
    return {"prompts": sum(not text.is_negative for text in texts.values())}


def _index_by_workers(
    encoder: "_Encoder", units: list[list[Text]], pool: Pool, context: Context[Group]
) -> dict[str, Any]:
    """Return the index of this rank's share of all texts. Workers take one unit of texts at a time."""
    names = [f"{RECORDS}units/{number:05d}.json" for number in range(len(units))]
    for number in context.units(len(units)):
        # Every attempt looks into the pool: a file that an earlier one found may be gone.
        found, before = _entries(encoder, units[number], pool, context)
        told = {"before": before, "index": index_of(found)}
        context.attempt.finish(number, {names[number]: canonical_json(told)})
    made = [json.loads(context.attempt.read(names[number])) for number in context.own(len(units))]
    index = {name: entry for one in made for name, entry in one["index"].items()}
    _note_reused(sum(one["before"] for one in made), len(index), context)
    return index


def _note_reused(before: int, count: int, context: Context[Group]) -> None:
    if before:
        context.outcome.note(f"{before} of {count} texts were embedded before")


def _entries(
    encoder: "_Encoder", texts: list[Text], pool: Pool, context: Context[Group]
) -> tuple[dict[str, FileEntry], int]:
    """Return the pool's files of these texts, by the texts' names, and how many files were there before.

    Missing files are made: one is written while the next text is encoded.
    """
    found = dict(pool.find(texts))
    missing = [text for text, entry in found.items() if entry is None]
    done = len(texts) - len(missing)
    if context.handed is None:
        _note_reused(done, len(texts), context)
    context.progress("making embeddings", done, len(texts))
    with closing(store.ahead(encoder.encoded(missing), lambda encoded: pool.put(*encoded))) as stored:
        for number, ((text, _), entry) in enumerate(stored, 1):
            context.progress("making embeddings", done + number, len(texts))
            found[text] = entry
    return {text.name: entry for text, entry in found.items() if entry is not None}, done


class _Encoder:
    """The text encoders, loaded for the first text."""

    def __init__(self, request: Request, config: contracts.Embed, context: Context[Group]) -> None:
        self._config, self._device = config, context.ranks.device
        self._pictures = Pictures(request.home)

    def encoded(self, texts: list[Text]) -> Iterator[tuple[Text, Conditioning]]:
        """Yield each text with its embedding."""
        for text in texts:
            yield text, self._encoded(text)

    def _encoded(self, text: Text) -> Conditioning:
        model, length, media = self._model, self._config.max_prompt_length, self._config.media
        if not text.references or media is None:
            return _encode(model, text, length)
        pictures = self._pictures.of(text.references)
        if text.is_negative:
            return model.encode_negative_with(_words(model, text), pictures, length)
        return model.encode_with(_words(model, text), pictures, length, media.size, media.frames)

    @cached_property
    def _model(self) -> Model:
        config = self._config
        prefix, vae = (PREFIX,) if config.prefixed else (), ("vae",) if config.media else ()
        components = ("text", *vae, *config.model.guardrail, *prefix)
        return load_model(config.model, components, self._device)


def _words(model: Model, text: Text) -> str:
    return model.negative_prompt if text.text is None else text.text


def _encode(model: Model, text: Text, length: int) -> Conditioning:
    if text.is_negative:
        return model.encode_negative(_words(model, text), length)
    (embedding,) = model.encode_prompts([_words(model, text)], length)
    return embedding


def _texts(request: Request, config: contracts.Embed) -> dict[str, Text]:
    """Return the texts to encode, by id: prompts, captions that the last part adds, negative and empty prompt.

    If the model reads texts together with references, each prompt with references has its own negative and empty
    prompt.
    """
    texts = {prompt.id: prompt.text for prompt in config.prompts}
    references = {prompt.id: prompt.references for prompt in config.prompts}
    if request.inputs.get("parts"):
        new = Parts.of(request).added("prompt_id")
        texts |= dict(zip(new["prompt_id"], new["caption"], strict=True))
        if config.media is not None:
            references |= zip(new["prompt_id"], map(references_in, new[REFERENCES]), strict=True)
    unconditional = {NEGATIVE: config.negative_prompt, EMPTY: ""}
    pictures = {prompt: tuple(one.digest for one in some) for prompt, some in references.items()}
    found = {one: Text(one, text, references=pictures.get(one, ())) for one, text in texts.items()}
    found |= {one: Text.negative(text) for one, text in unconditional.items()}
    takes = directories.spec(directories.resolve_path(config.model.path)).references
    read_with_text = {one: some for one, some in pictures.items() if some and takes and takes.read_with_text}
    return found | {
        with_references(one, prompt): Text.negative(text, some)
        for prompt, some in read_with_text.items()
        for one, text in unconditional.items()
    }
