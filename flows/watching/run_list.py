"""The runs of a store as a table, and the settings in which runs differ."""

from collections.abc import Iterator, Sequence

from rich.table import Column, Table

from cosmos_rl_core.canonical import differences
from cosmos_rl_core.storage import store
from flows.ledger.costs import device_time, duration
from flows.library.lines import RunLine
from flows.planning.plan import read_plan

SHOWN = 30
"""Largest number of differing settings that are shown, a line each."""


def rendered(lines: Sequence[RunLine], store_url: str) -> Iterator[str | Table]:
    """Yield the table of runs, then a line for each error."""
    if not lines:
        yield f"the store {store.absolute(store_url)} has no runs; start one with `cosmos-flows run`"
        return
    titles = ("run", "algorithm", "state", "iterations", "reward", "left", "devices")
    table = Table(*(Column(title, overflow="fold") for title in titles), box=None, pad_edge=False, header_style="bold")
    for line in lines:
        of_all = f"{line.iterations}/{line.num_iterations}" if line.num_iterations else ""
        reward = ", ".join(changes(line))
        left = "" if line.left_s is None else duration(line.left_s)
        spent = "" if line.device_s is None else device_time(line.device_s)
        table.add_row(line.run, line.algorithm, line.state, of_all, reward, left, spent)
    yield table
    yield from (f"{line.run} is {line.state}: {line.error}" for line in lines if line.error)


def changes(line: RunLine) -> Iterator[str]:
    """Yield in words the change of the number that ranks policies, with its errors, then of every other reward."""
    if line.reward is None:
        return
    ends = [(line.first_reward, line.first_reward_error), (line.reward, line.reward_error)]
    yield f"{line.reward_name} {' -> '.join(_shown(mean, error) for mean, error in ends if mean is not None)}"
    ranking = line.reward_name.removeprefix("held-out ")
    yield from (_change(name, means) for name, means in line.rewards.items() if name != ranking)


def _shown(mean: float, error: float | None) -> str:
    return f"{mean:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _change(name: str, means: Sequence[float]) -> str:
    return f"{name} {' -> '.join(f'{mean:.3f}' for mean in means)}"


def settings_that_differ(store_url: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each setting in which a run differs from the first that is named: ``train.seed: 0 -> 1``."""
    first, *others = names
    for other in others:
        old, new = (read_plan(store_url, name).identity() for name in (first, other))
        found = [change for change in differences(old, new) if not change.startswith("run_id")]
        yield f"\n{first} -> {other}:" if found else f"\n{first} and {other} have equal settings"
        yield from (f"  {change}" for change in found[:SHOWN])
        if (more := len(found) - SHOWN) > 0:
            yield f"  and {more} more"
