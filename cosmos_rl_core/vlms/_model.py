"""VLMs of transformers that write texts about images and videos."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel.kept import frozen
from cosmos_rl_core.vlms._base import Changes, architecture
from cosmos_rl_core.vlms._prompts import Message, Prompts


class Answer(NamedTuple):
    """Text that a VLM wrote."""

    text: str
    """The text, without special tokens."""
    whole: bool
    """Whether the model ended the text itself, within the limit of new tokens."""


class Vlm:
    """A VLM with its weights, frozen, in eval mode."""

    def __init__(self, model: Any, prompts: Prompts) -> None:
        """Take a model of transformers, and the prompts of the same folder."""
        self.model, self.prompts = model, prompts
        stops = model.generation_config.eos_token_id
        # This replaces the folder's settings: penalties and temperatures have no place in greedy generation.
        model.generation_config = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=prompts.tokenizer.eos_token_id if stops is None else stops,
            pad_token_id=prompts.tokenizer.pad_token_id,
        )

    def prepare(self, conversations: Sequence[Sequence[Message]]) -> dict[str, Tensor]:
        """Return the arguments of the model's forward for a batch, like :meth:`.Prompts.prepare`."""
        return self.prompts.prepare(conversations)

    def generate(self, batch: dict[str, Tensor], max_new_tokens: int) -> list[str]:
        """Return the texts of :meth:`answers`."""
        return [answer.text for answer in self.answers(batch, max_new_tokens)]

    @torch.no_grad()
    def answers(self, batch: dict[str, Tensor], max_new_tokens: int) -> list[Answer]:
        """Return the answer to each conversation of a batch, greedily decoded, of at most ``max_new_tokens`` tokens.

        The same batch gives the same answers. Another batch may have other padding, which changes the last bits and may
        change a token. Raises :class:`.ItemError` for more tokens than the model has positions.
        """
        length, room = batch["input_ids"].shape[1], self.model.config.get_text_config().max_position_embeddings
        if length + max_new_tokens > room:
            raise ItemError(
                f"{length} tokens and {max_new_tokens} new ones, but the model has positions for {room}; take fewer "
                "frames, or a smaller size"
            )
        there = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        tokens = self.model.generate(**there, max_new_tokens=max_new_tokens)[:, length:]
        texts = self.prompts.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        stops = self.model.generation_config.eos_token_id
        ends = {stops} if isinstance(stops, int) else {*(stops or ())}
        return [Answer(text, not ends.isdisjoint(row)) for text, row in zip(texts, tokens.tolist(), strict=True)]

    @torch.no_grad()
    def next_logits(self, batch: dict[str, Tensor], tokens: Sequence[int]) -> list[float]:
        """Return the logit of each of ``tokens`` as the next token of the one conversation in ``batch``."""
        there = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        (row,) = self.model(**there, use_cache=False, logits_to_keep=1).logits[:, -1]
        return row[list(tokens)].double().tolist()

    def first_token(self, word: str) -> int:
        """Return the id of the first token of a word. Raises :class:`ConfigError` if the tokenizer gives no token."""
        found: list[int] = self.prompts.tokenizer.encode(word, add_special_tokens=False)
        if not found:
            raise ConfigError(f"the tokenizer has no token for {word!r}")
        return found[0]

    def describe(self, media: Sequence[dict[str, Any]], instruction: str, max_new_tokens: int) -> list[str]:
        """Return a text about each medium, without surrounding white space.

        A medium is a part of a :data:`.Message`, such as ``{"type": "video", "video": "clip.mp4"}``; the instruction is
        the text after it.
        """
        asked = {"type": "text", "text": instruction}
        batch = self.prepare([[{"role": "user", "content": [medium, asked]}] for medium in media])
        return [text.strip() for text in self.generate(batch, max_new_tokens)]


def load(
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    changes: Changes | None = None,
    max_side: int | None = None,
) -> Vlm:
    """Return the VLM in the folder ``path``. ``changes`` and ``max_side`` go to :class:`.Prompts`.

    Raises :class:`ConfigError` if no plugin serves its class, or with every mistake in its files, and
    :class:`ArtifactError` if its weights are not all there.
    """
    prompts = Prompts(path, changes, max_side)
    cls = getattr(transformers, name := architecture(path), None)
    if cls is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {name}, which {path!r} needs; upgrade it")
    return Vlm(frozen(cls, path, f"the files of the VLM {path!r}", device, dtype=dtype), prompts)
