"""Tokens and labels of conversations. Conversations in an earlier artifact are copied from it."""

import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, cast

import pandas as pd

from cosmos_rl_core.chat_datasets._base import MEDIA, media_of
from cosmos_rl_core.conversations.encoding import Encoder
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.vlms._prompts import Prompts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import Check, cut
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.formats.tables import from_parquet, read_table, to_parquet
from stages.vlm.contracts import VlmIndex, VlmTokenize
from stages.vlm.media import opened
from stages.vlm.tokens import Row, Tokens, row_of, rows_in, to_shard

COLUMNS = {"id": "string", "source": "string", "name": "string", "shard": "string", "row": "int64"} | dict.fromkeys(
    ("tokens", "labels", "images", "videos", "cut_tokens", "cut_labels", "cut_media"), "int64"
)
"""Columns of the index and their types."""
_ABOUT = ["id", "cut_tokens", "cut_labels", "cut_media", "reason"]


def run(request: Request, context: Context[Ranks]) -> dict[str, int]:
    """Write shards of tokens, their index, and the conversations that are left out. Every rank makes its own shards.

    Raises :class:`DatasetError` if too many conversations cannot be used, or a medium has changed.
    """
    config, ranks = request.settings(VlmTokenize), context.ranks
    listed: Any = read_table(Artifact(request.one("index")), VlmIndex.CONVERSATIONS)
    # Equal conversations have equal tokens.
    distinct = {row["id"]: row for row in listed.to_dict("records")}
    layout = context.layout({"conversations": cut([*distinct], config.conversations_per_shard)})["conversations"]
    maker = _Maker(config, request)
    for number in range(ranks.rank, len(layout), ranks.world_size):
        context.progress("tokenizing", number, len(layout))
        name, about, check = _shard(config, number), _about(number), _has(number, layout[number])
        if not context.attempt.adopt(number, check):
            rows, notes = maker.make([distinct[one] for one in layout[number]])
            files = {name: to_shard(rows), about: to_parquet(pd.DataFrame(notes, columns=_ABOUT))}
            context.attempt.finish(number, files, check)
    reused = sum(ranks.gather(maker.reused))
    mine = [_facts(context, config, number) for number in range(ranks.rank, len(layout), ranks.world_size)]
    facts = {row["id"]: row for some in ranks.gather(mine) for rows in some for row in rows}
    every = [row | facts[row["id"]] for row in listed[["id", "source", "name"]].to_dict("records")]
    used, left_out = ([row for row in every if bool(row["reason"]) == wrong] for wrong in (False, True))
    config.refuse_too_many(left_out, len(every), "conversations")
    index: Any = pd.DataFrame([[row[column] for column in COLUMNS] for row in used], columns=[*COLUMNS])
    if ranks.rank == 0:
        context.attempt.put(config.INDEX, to_parquet(index.astype(COLUMNS)))
        columns = ["source", "name", "reason"]
        lost = pd.DataFrame([[row[column] for column in columns] for row in left_out], columns=columns)
        context.attempt.put(config.LEFT_OUT, to_parquet(lost.astype("string")))
    counts = {name: int(index[name].sum()) for name in ("tokens", "labels", "cut_tokens", "cut_labels", "cut_media")}
    return {"conversations": len(used), "left_out": len(left_out), "reused": reused} | counts


class _Maker:
    """A maker of the rows of shards. It loads the tokenizer for the first conversation that is not reused."""

    def __init__(self, config: VlmTokenize, request: Request) -> None:
        self.config, self.reused = config, 0
        self._encoder: Encoder | None = None
        self._earlier: dict[str, tuple[Tokens, int]] = {}
        for source in request.inputs.get("earlier", ()):
            tokens = Tokens(Artifact(source))
            if tokens.artifact.manifest.config != config.identity():
                raise ConfigError(f"the earlier tokens at {source.url} were made with other settings; leave them out")
            self._earlier |= {one: (tokens, number) for number, one in enumerate(tokens.index["id"])}

    def make(self, conversations: Sequence[dict[str, Any]]) -> tuple[list[Row], list[list[Any]]]:
        """Return the rows of the conversations that can be used, and a note (:data:`_ABOUT`) on every conversation."""
        rows: list[Row] = []
        notes: list[list[Any]] = []
        for conversation in conversations:
            one = conversation["id"]
            if one in self._earlier:
                tokens, number = self._earlier[one]
                place: Any = tokens.index.iloc[number]
                rows.append(_renamed(tokens.row(number), conversation))
                notes.append([one, *(int(place[f"cut_{what}"]) for what in ("tokens", "labels", "media")), ""])
                self.reused += 1
                continue
            try:
                row, cut_off = self._made(conversation)
            except ItemError as error:
                notes.append([one, 0, 0, 0, str(error)])
                continue
            rows.append(row)
            notes.append([one, *cut_off, ""])
        return rows, notes

    def _made(self, conversation: dict[str, Any]) -> tuple[Row, Sequence[int]]:
        config = self.config
        if self._encoder is None:
            changes: Any = config.vlm.changes
            self._encoder = Encoder(Prompts(config.vlm.path, changes), config.turns)
        options, digests = config.sources[conversation["source"]], iter(conversation["media"])

        def open_media(part: dict[str, Any]) -> dict[str, Any]:
            kind = part["type"]
            if kind not in MEDIA:
                return part
            with opened(options, part[kind], next(digests)) as file:
                # The file is closed before the conversation is encoded.
                return {"type": kind, kind: BytesIO(file.read())}

        messages = json.loads(conversation["messages"])
        given = [{**message, "content": [open_media(part) for part in message["content"]]} for message in messages]
        encoded, cut_off = self._encoder.encode(given, config.max_length)
        return row_of(conversation["id"], encoded, _names(conversation)), cut_off


def _names(conversation: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return kind, dataset, name and digest of each medium of a conversation."""
    named, source = media_of(json.loads(conversation["messages"])), conversation["source"]
    return [(kind, source, name, found) for (kind, name), found in zip(named, conversation["media"], strict=True)]


def _renamed(row: Row, conversation: dict[str, Any]) -> Row:
    """Return a row of an earlier artifact with the names that its media have now."""
    now = [{"source": source, "name": name} for _, source, name, _ in _names(conversation)]
    return row._replace(media=[medium | named for medium, named in zip(row.media, now, strict=False)])


def _facts(context: Context[Ranks], config: VlmTokenize, number: int) -> list[dict[str, Any]]:
    """Return the columns of the index, and the reason, for the conversations of a shard."""
    rows = {row.id: (place, row) for place, row in enumerate(rows_in(context.attempt.read(_shard(config, number))))}
    notes = from_parquet(context.attempt.read(_about(number)))
    return [*_joined(rows, cast("Any", notes).to_dict("records"), _shard(config, number))]


def _joined(rows: dict[str, tuple[int, Row]], notes: list[dict[str, Any]], shard: str) -> Iterator[dict[str, Any]]:
    for note in notes:
        if note["reason"]:
            yield note
            continue
        place, row = rows[note["id"]]
        kinds = [medium["kind"] for medium in row.media]
        labels = sum(row.labels[1::2]) - sum(row.labels[::2])
        counts = {"tokens": len(row.input_ids), "labels": labels, "images": kinds.count("image")}
        yield note | counts | {"videos": kinds.count("video"), "shard": shard, "row": place}


def _shard(config: VlmTokenize, number: int) -> str:
    return f"{config.TOKENS}{number:05d}.parquet"


def _about(number: int) -> str:
    return f"records/shards/{number:05d}.parquet"


def _has(number: int, conversations: Sequence[str]) -> Check:
    """Check that a shard has notes on exactly these conversations."""

    def check(files: dict[str, bytes]) -> str | None:
        found = [*from_parquet(files[_about(number)])["id"]] if _about(number) in files else []
        return None if found == [*conversations] else "it has other conversations"

    return check
