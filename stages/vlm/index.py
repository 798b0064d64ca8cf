"""The conversations of datasets, with the digests of their media. Every row that cannot be used is listed."""

import errno
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from operator import itemgetter
from typing import Any

import pandas as pd

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import canonical_json, digest
from cosmos_rl_core.chat_datasets._base import Row, media_of
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.datasets._probe import probe
from cosmos_rl_core.rewards._base.answers import brief
from stages import contracts
from stages.artifacts.layouts import Check, cut
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.formats.tables import to_parquet
from stages.vlm.contracts import VlmIndex
from stages.vlm.media import stream_of

Rows = list[dict[str, Any]]
NO_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
"""Error numbers of opening a file that are its name's fault, and not of the disk or the network."""
THREADS = 8
"""Rows whose media are read at once: most of the time is spent in reading and hashing."""


def run(request: Request, context: Context[Ranks]) -> dict[str, int]:
    """Write ``conversations.parquet`` and ``unusable.parquet``.

    Raises :class:`DatasetError` if too many rows cannot be used.
    """
    config = request.settings(VlmIndex)
    rows = {
        f"{source} {row.name}": (source, row)
        # Sorted, because recipes with equal settings may list sources in another order.
        for source, options in sorted(config.sources.items())
        for row in plugins.load("chat_datasets", options.name).rows(options)
    }
    layout: list[list[str]] = context.layout({"rows": cut([*rows], config.rows_per_shard)})["rows"]
    found: Rows = []
    for number, names in enumerate(layout):
        context.progress("indexing", len(found), len(rows))
        name, check = f"{contracts.RECORDS}rows/{number:05d}.json", _has(names)
        if not context.attempt.adopt(number, check):
            with ThreadPoolExecutor(THREADS) as pool:
                made = [*pool.map(lambda one: _row(config, *rows[one]), names)]
            context.attempt.finish(number, {name: canonical_json(made)}, check)
        found += json.loads(context.attempt.read(name))
    used, left_out = ([row for row in found if bool(row["reason"]) == wrong] for wrong in (False, True))
    config.refuse_too_many(left_out, len(found), "rows")
    context.attempt.put(config.CONVERSATIONS, to_parquet(_table(used, ["id", "source", "name", "messages", "media"])))
    context.attempt.put(config.LEFT_OUT, to_parquet(_table(left_out, ["source", "name", "reason"])))
    context.progress("indexing", len(rows), len(rows))
    return {"conversations": len(used), "left_out": len(left_out)}


def _row(config: VlmIndex, source: str, row: Row) -> dict[str, Any]:
    """Return the columns of a row for the tables. Its media are read to their ends, and hashed."""
    reasons, media = [row.reason] if row.reason else [], list[str]()
    # A medium without a name is among the reasons already.
    for kind, name in filter(itemgetter(1), media_of(row.messages)):
        try:
            with closing(stream_of(config.sources[source], name)) as file:
                media.append(probe(file, kind).medium)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            reasons.append(f"no file {brief(name)}")
        except ItemError as error:
            reasons.append(f"{brief(name)}: {error}")
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in NO_NAMES:
                raise
            reasons.append(f"no file has the name {brief(name)}: {getattr(error, 'strerror', None) or error}")
    about = {"source": source, "name": row.name, "reason": "; ".join(reasons)}
    if reasons:
        return about
    texts = canonical_json(row.messages).decode()
    return about | {"id": digest([_unnamed(row), media])[:32], "messages": texts, "media": media}


def _unnamed(row: Row) -> list[Any]:
    """Return the messages without the names of media, which their digests identify."""
    return [
        [message["role"], [part["text"] if part["type"] == "text" else [part["type"]] for part in message["content"]]]
        for message in row.messages
    ]


def _has(names: Sequence[str]) -> Check:
    """Check that a shard has exactly these rows."""

    def check(files: dict[str, bytes]) -> str | None:
        found = [f"{row['source']} {row['name']}" for data in files.values() for row in json.loads(data)]
        return None if found == [*names] else "it has other rows"

    return check


def _table(rows: Rows, columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame([[row[column] for column in columns] for row in rows], columns=columns)
