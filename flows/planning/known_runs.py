"""The runs of a store, for people who ask for one that it does not have."""

import difflib

from cosmos_rl_core.storage import store

SHOWN = 10
"""Runs that are named."""


def absent(runs_url: str, run_id: str) -> str:
    """That there is no such run, which there are, and what to do; ``runs_url`` is the place that all lie below."""
    found = sorted(store.names(runs_url))
    close = difflib.get_close_matches(run_id, found, n=1)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    known = f"it has {', '.join(found[:SHOWN])}{more}" if found else "it has no run at all"
    hint = f"; did you mean {close[0]!r}?" if close else "; name another --store, or start it with `cosmos-flows run`"
    return f"there is no run {run_id!r} in the store {runs_url.rpartition('/')[0]}; {known}{hint}"
