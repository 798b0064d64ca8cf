"""Tables of the speed benchmarks, as rows of cells, from their stored results."""

from collections.abc import Iterator, Mapping
from typing import Any

Rows = list[list[str]]
HOW = {
    "three": "loop, three forward passes",
    "two": "loop, two",
    "merged": "loop, two, old copy merged",
    "warm": "warm",
    "cold": "cold",
}
"""Titles of the ways to run an iteration, which were measured in turns."""
MODES = ("warm", "cold")
MIB = 2**20


def iterations(found: Mapping[str, Any]) -> Rows:
    """Return the seconds of iterations, by number of samples and by the way they were run."""
    rows = [["samples", "", "iteration", "from - to", "rollout", "reward", "update", "other", "of the first loop"]]
    for row in found["measured"]:
        low, high = row["ranges_s"]["iteration_s"]
        parts = [row["rollout_s"], row["reward_s"], row["update_s"]]
        other = f"{row['iteration_s'] - sum(parts):.2f}" if row["how"] in MODES else "–"
        seconds = [f"{one:.2f}" for one in parts]
        ends = [f"{row['iteration_s']:.2f}", f"{low:.2f} - {high:.2f}"]
        rows.append([f"{row['samples']:,}", HOW[row["how"]], *ends, *seconds, other, f"{row['ratio']:.2f}"])
    return rows


def memory(found: Mapping[str, Any]) -> Rows:
    """Return the most memory of a process, and the bytes that an iteration leaves in the store."""
    rows = [["samples", "rollout", "reward", "update", "loop", "store"]]
    measured = {(row["samples"], row["how"]): row for row in found["measured"]}
    for samples in dict.fromkeys(samples for samples, _ in measured):
        ours, loop = measured[samples, "warm"], measured[samples, "three"]
        peaks = [ours["peak_bytes"][stage] for stage in ("rollout", "reward", "update")] + [loop["peak_bytes"]]
        store = f"{ours['store_bytes'] / 1e6:.1f} MB"
        rows.append([f"{samples:,}", *(f"{peak / MIB:.0f} MiB" for peak in peaks), store])
    return rows


def ranks(found: Mapping[str, Any]) -> Rows:
    """Return seconds of the stages that ranks share, on one rank and on several."""
    rows = [["ranks", "rollout, seconds", "update, seconds", "as fast as one rank"]]
    alone_s = found["measured"][0]["rollout_s"] + found["measured"][0]["update_s"]
    for row in found["measured"]:
        times = alone_s / (row["rollout_s"] + row["update_s"])
        rows.append([str(row["ranks"]), f"{row['rollout_s']:.1f}", f"{row['update_s']:.1f}", f"{times:.2f}"])
    return rows


def empty_stages(found: Mapping[str, Any]) -> Rows:
    """Return seconds of stages that do almost nothing, by cause."""
    rows = [["mode", "stage", "seconds", "interpreter", "imports", "inputs", "work", "outside of the process"]]
    for row in found["measured"]:
        if "busy_s" in row:
            work = row["first_step_s"] + row["busy_s"] + row["waiting_s"]
            causes = (row["interpreter_s"], row["imports_s"], row["load_s"], work, row["outside_s"])
            rows.append([row["mode"], f"`{row['what']}`", f"{row['seconds']:.2f}", *(f"{one:.2f}" for one in causes)])
    return rows


def around_waves(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a warm command between two waves, before the first and after the last one."""
    return {row["what"]: row["seconds"] for row in found["measured"] if row["mode"] == "warm" and "busy_s" not in row}


def packages(found: Mapping[str, Any], what: str, most: int = 4) -> str:
    """Return the packages whose import takes longest, with their seconds."""
    (row,) = (row for row in found["imports"] if row["what"] == what)
    named = [(name, taken) for name, taken in row["by_package"].items() if name != "others"]
    return ", ".join(f"{name} {taken:.2f}" for name, taken in sorted(named, key=lambda pair: -pair[1])[:most])


def long_runs(found: Mapping[str, Any]) -> Rows:
    """Return the seconds of commands on finished runs, and their requests to the store per artifact."""
    rows = [["store", "iterations", "artifacts", "`status`", "`plan`", "`run` again", "requests an artifact"]]
    for (store, iterations), commands in _by_run(found):
        artifacts = next(iter(commands.values()))["artifacts"]
        seconds = [f"{commands[name]['seconds']:.1f}" for name in ("status", "plan", "run")]
        asked = [commands[name].get("requests_per_artifact") for name in ("status", "run")]
        requests = ", ".join(f"{one:.1f}" for one in asked if one is not None) or "–"
        rows.append([store, f"{iterations:,}", f"{artifacts:,}", *seconds, requests])
    return rows


def _by_run(found: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    every: dict[tuple[str, int], dict[str, Any]] = {}
    for row in found["measured"]:
        every.setdefault((row["store"], row["iterations"]), {})[row["command"]] = row
    yield from sorted(every.items())
