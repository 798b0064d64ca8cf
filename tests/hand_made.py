"""Artifacts and runs made by hand, from given bytes: what commits, plans and requests are tested on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cosmos_rl_core.storage import store
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from stages.artifacts.attempt import Attempt
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input, Request
from stages.reporting.contracts import Report

NUMERICS = {"python": "3.11", "threads": 1}


def report(slot: str, title: str = "t", seed: int = 0, **inputs: tuple[Input, ...]) -> Request:
    """A Request without required inputs."""
    config = Report(title=title, reward="ocr")
    return Request(stage="report", slot=slot, seed=seed, config=config, inputs=inputs)


def begin(
    request: Request,
    notes: list[str] | None = None,
    numerics: dict[str, Any] = NUMERICS,
    layout: dict[str, Any] | None = None,
) -> Attempt:
    """An attempt at an artifact that is not current."""
    notes = [] if notes is None else notes
    generation, attempt_id, already = Attempt.begin(request, notes.append)
    assert already is None
    attempt = Attempt(request, numerics, generation, attempt_id)
    cut = {} if layout is None else attempt.layout(layout, notes.append)
    attempt.use_layout(cut, attempt.generation)
    return attempt


def adopt_or_make(attempt: Attempt, index: int, made: Callable[[], dict[str, bytes]], *, offered: bool = True) -> None:
    """Adopt a shard, or make it, like a stage."""
    if not attempt.adopt(index):
        attempt.finish(index, made(), offered=offered)


def commit(attempt: Attempt, notes: list[str] | None = None, **summary: Any) -> Manifest:
    """Commit what the attempt has written."""
    return attempt.commit(attempt.files, summary, [].append if notes is None else notes.append)


def make(
    request: Request,
    files: dict[str, bytes] | None = None,
    notes: list[str] | None = None,
    numerics: dict[str, Any] = NUMERICS,
    **summary: Any,
) -> Manifest:
    """Make a Request's artifact from given result bytes."""
    attempt = begin(request, notes, numerics)
    for name, data in ({"a": b"1"} if files is None else files).items():
        attempt.put(name, data)
    return commit(attempt, notes, **summary)


def remove(url: str) -> None:
    """Lose an object."""
    assert store.size(url) is not None
    store.remove(url)


def planned(path: str, tmp_path: Path, **settings: Any) -> Run:
    """A frozen run in an own store."""
    url = str(tmp_path / "store")
    return Run(freeze(plan_of(Settings(path, url, **settings)), url), url)


def rollout_files(k: int) -> dict[str, bytes]:
    """A unit of a rollout, with bytes that only a manifest looks at."""
    names = ("media/00000.tar", "tensors/00000.tar", "index/00000.json")
    return {name: f"{name} of rollout {k}".encode() for name in names}


def rewards(run: Run, samples: str, k: int) -> list[Request]:
    """A scoring of the samples in a slot by each reward."""
    return [requests.reward(run, reward, samples, k) for reward in run.recipe.rewards]


def make_iteration(run: Run, k: int, scores: bytes = b"scores") -> None:
    """Rollout, reward and update of one iteration."""
    make(requests.rollout(run, k), rollout_files(k), seconds=10.0)
    (reward,) = rewards(run, run.slots.iteration(k, "rollout"), k)
    make(reward, {"scores": scores}, seconds=2.0, ocr=0.25 * (k + 1))
    make(requests.update(run, k), {"current/w": b"%d" % k, "old/w": b"old %d" % k}, seconds=30.0)


def make_run(path: str, tmp_path: Path, iterations: int = 2) -> Run:
    """A run called ``hand``: policy, embeddings and iterations."""
    run = planned(path, tmp_path, run_id="hand")
    make(requests.policy(run), {"current/w": b"start"})
    make(run.prepared.embed, {"embeddings": b"e"})
    for k in range(iterations):
        make_iteration(run, k)
    return run
