"""Captions of one part of a dataset, for the items that have none in their files.

A medium gets one caption, even if several items show it, and keeps it in later parts. An item whose medium the
captioner refuses gets no caption and is left out.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, cast

import pandas as pd

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.captioners._base import Captioner, Medium, digest_of
from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.datasets import _sources
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.errors import DatasetError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import Check, cut
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.formats.parts import CAPTIONS, REFERENCES, REFUSED, Parts, references_in, table_of
from stages.formats.tables import to_parquet

Rows = list[dict[str, Any]]
_ANSWER = ["medium", "name", "caption", "reason", "final", "seconds"]


def run(request: Request, context: Context[Ranks]) -> dict[str, int]:
    """Write ``captions.parquet``, and the records ``refused.parquet`` and ``asked.parquet``. Return the counts.

    Raises :class:`DatasetError` if a file has changed since it was indexed, and if too many items have no caption.
    """
    config = request.settings(contracts.Caption)
    items = Parts([Artifact(source) for source in request.inputs["parts"]]).items
    earlier = Parts([], [Artifact(source) for source in request.inputs.get("captions", ())])
    captioner = digest_of(config.captioner, request.plugins)
    known = earlier.written[earlier.written["captioner"] == captioner]
    found = dict(zip(known["medium"], known["caption"], strict=True))
    bare = items[items["caption"].isna()]
    ours = bare[bare["part"] == config.part]
    asked = ours[~ours["medium"].isin([*found])].drop_duplicates("medium")
    before = int((bare["item"].isin(earlier.refused["item"]) & (bare["part"] != config.part)).sum())
    refuse = partial(_refuse_too_many, before=before, total=len(items), limit=config.max_left_out)
    answers = _answers(context, config, _media(config, asked), refuse)
    found |= {row["medium"]: row["caption"] for row in answers if row["caption"] is not None}
    reasons = {row["medium"]: row["reason"] for row in answers}
    by = {"captioner": captioner, "instruction": config.captioner.asked}
    captions: Rows = []
    refused: Rows = []
    for item in ours.to_dict("records"):
        if (text := found.get(item["medium"])) is not None:
            digests = [one.digest for one in references_in(item[REFERENCES])]
            captions.append(item | by | {"caption": text, "prompt_id": prompt_id(text, digests)})
        else:
            refused.append(item | {"reason": reasons[item["medium"]]})
    refuse(refused)
    if context.ranks.rank == 0:
        context.attempt.put(config.CAPTIONS, to_parquet(table_of(captions, CAPTIONS)))
        context.attempt.put(config.REFUSED, to_parquet(table_of(refused, REFUSED)))
        context.attempt.put(config.ASKED, to_parquet(pd.DataFrame(answers, columns=_ANSWER)))
    return {"captioned": len(captions), "left_out": len(refused) + before, "asked": len(asked)}


def _media(config: contracts.Caption, asked: pd.DataFrame) -> dict[str, Medium]:
    """Return the media that need a caption, by their digests."""
    sources = {label: _sources.source_of(options) for label, options in config.sources.items()}
    if len(asked):
        # A source opens only files that it has listed.
        _sources.stamps(sources)
    found: dict[str, Medium] = {}
    for row in cast("Any", asked).to_dict("records"):
        opened = partial(_sources.opened, sources, row["unit"], row["name"], row["medium"])
        found[row["medium"]] = Medium(row["name"], row["kind"], row["frames"], opened)
    return found


def _answers(
    context: Context[Ranks], config: contracts.Caption, media: dict[str, Medium], refuse: Callable[[Rows], None]
) -> Rows:
    """Return one row per medium: the captioner's answer, or the one that an earlier attempt stored. Collective.

    Each rank makes its own shards. ``refuse`` gets the refused rows after each shard, and raises if there are too many.
    """
    captioner: Captioner = plugins.load("captioners", config.captioner.by).Captioner(config.captioner)
    layout: list[list[str]] = context.layout({"media": cut([*media], config.media_per_shard)})["media"]
    names = [f"{contracts.RECORDS}answers/{number:05d}.json" for number in range(len(layout))]
    mine = context.own(len(layout))
    total = sum(len(layout[number]) for number in mine)
    rows = Rows()
    for number in context.units(len(layout)):
        shard = layout[number]
        name, check = names[number], _has(shard)
        if not context.attempt.adopt(number, check):
            made = _ask(context, captioner, [media[digest] for digest in shard], shard, (len(rows), total))
            final = all(row["final"] for row in made)
            context.attempt.finish(number, {name: canonical_json(made)}, check, offered=final)
        rows += json.loads(context.attempt.read(name))
        context.progress("captioning", len(rows), total)
        refuse([row for row in rows if row["caption"] is None])
    gathered = context.ranks.gather([json.loads(context.attempt.read(names[number])) for number in mine])
    # Rank 1 has shard 1, and so on in turn.
    in_order = chain.from_iterable(zip_longest(*gathered, fillvalue=Rows()))
    return [row for some in in_order for row in some]


def _ask(
    context: Context[Ranks],
    captioner: Captioner,
    media: Sequence[Medium],
    digests: Sequence[str],
    done: tuple[int, int],
) -> Rows:
    rows: Rows = []
    before_s = time.monotonic()
    for digest, medium, answer in zip(digests, media, captioner.captions(media), strict=True):
        now_s = time.monotonic()
        caption, reason, final = (
            (None, str(answer), answer.final) if isinstance(answer, RefusedError) else (answer, "", True)
        )
        rows.append(dict(zip(_ANSWER, (digest, medium.name, caption, reason, final, now_s - before_s), strict=True)))
        before_s = now_s
        context.progress("captioning", done[0] + len(rows), done[1])
    return rows


def _has(media: list[str]) -> Check:
    """Check that a shard has answers for exactly these media."""

    def check(files: dict[str, bytes]) -> str | None:
        found = {row["medium"] for data in files.values() for row in json.loads(data)}
        return None if found == {*media} else "it has answers for other media"

    return check


def _refuse_too_many(refused: Rows, before: int, total: int, limit: float) -> None:
    """Raise :class:`DatasetError` if more than ``limit`` of ``total`` items have no caption.

    ``refused`` are rows with ``name`` and ``reason``; ``before`` counts the items refused in other parts.
    """
    count = len(refused) + before
    if count > limit * total:
        shown = "".join(f"\n  {row['name']}: {row['reason']}" for row in refused[:10])
        more = f"\n  and {count - 10} more" if count > 10 else ""
        raise DatasetError(
            f"{count} of {total} items have no caption, more than max_left_out = {limit:g} allows; caption them by "
            f"hand, remove them, or raise the limit:{shown}{more}"
        )
