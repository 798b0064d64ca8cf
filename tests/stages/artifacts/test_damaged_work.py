"""A stage was killed in the middle and something changed before it goes on: that is found, named, and nothing ended."""

import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError
from flows.planning import requests
from stages.artifacts.generations import current_generation, invalidate
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from tests.damage import files_read, flipped, resealed
from tests.hand_made import rewards
from tests.stages.conftest import FEW_PROMPTS, make_run
from tests.stages.every_stage import recipe

NFT = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": FEW_PROMPTS}
STAGES = [
    pytest.param("rollout", marks=pytest.mark.slow),
    "reward",
    "update",
]
HALF_WAY = {
    "rollout": ("sampling", 4),
    "reward": ("scoring", 1),
    "update": ("training", 0),
}
"""Phase and step at which each is killed."""
KINDS = {
    "rollout": {"invalidated", "layout", "manifest", "marker", "numerics"},
    "reward": {"invalidated", "layout", "manifest", "marker", "numerics"},
    "update": {"invalidated", "layout", "manifest", "numerics"},
}
PLACE = ("place", "generation", "layout", "index", "files", "stage", "kind", "format")


class Killed(BaseException):
    """SIGKILL, as far as a test can be killed."""


class Dying(Outcome):
    """What a stage says before it is killed at a moment."""

    def __init__(self, directory: Path, moment: tuple[str, int]) -> None:
        super().__init__(directory, 0)
        self.moment = moment

    def progress(self, phase: str, step: int, total: int) -> None:
        """Die instead of saying it, at the moment."""
        if (phase, step) == self.moment:
            raise Killed
        super().progress(phase, step, total)


class HalfMade:
    """An iteration whose stages were made once, invalidated, and killed in the middle of their second generation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = make_run(folder / "store", recipe(NFT, lora={"r": 2, "target_modules": ["to_q"]}), "nft")
        self.requests: dict[str, Callable[[], Request]] = {
            "policy": partial(requests.policy, self.run),
            "embed": lambda: self.run.prepared.embed,
            "rollout": lambda: requests.rollout(self.run, 0),
            "reward": lambda: rewards(self.run, self.run.slots.iteration(0, "rollout"), 0)[0],
            "update": lambda: requests.update(self.run, 0),
        }
        self.contents = {stage: self.make(stage, request()) for stage, request in self.requests.items()}

    def make(self, stage: str, request: Request, outcome: Outcome | None = None) -> str:
        """Run a stage; the content of its artifact."""
        folder = self.folder / "outcome"
        record = f"{self.run.url}/numerics/{stage}.json"
        return execute(request, Execution(numerics_record=record), outcome or Outcome(folder, 0)).content

    def half_made(self, stage: str) -> Request:
        """The stage's Request, with a second generation that was killed half-way."""
        request = self.requests[stage]()
        invalidate(request.slot, 1, "asked for")
        with pytest.raises(Killed):
            self.make(stage, request, Dying(self.folder / "outcome", HALF_WAY[stage]))
        return request

    def records(self) -> set[str]:
        """Return every file except the files of attempts."""
        names = {str(path.relative_to(self.folder)) for path in (self.folder / "store").rglob("*") if path.is_file()}
        return {name for name in names if "/attempts/" not in name}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> HalfMade:
    return HalfMade(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module", params=STAGES)
def half(request, made, tmp_path_factory):
    """A half-made stage: its store, its Request, and the sealed files that going on with it reads."""
    stage = request.param
    asked = made.half_made(stage)
    store, kept = made.folder / "store", tmp_path_factory.mktemp("kept") / "store"
    shutil.copytree(store, kept)
    with files_read(store) as read:
        assert made.make(stage, asked) == made.contents[stage]
    shutil.rmtree(store)
    shutil.copytree(kept, store)
    there = {f"store/{path.relative_to(kept)}" for path in kept.rglob("*.json")}
    sealed = sorted(f"store/{name}" for name in read if f"store/{name}" in there and "/attempts/" not in name)
    yield stage, asked, sealed
    shutil.rmtree(store)
    shutil.copytree(kept, store)
    assert made.make(stage, asked) == made.contents[stage]


def refuses(made: HalfMade, half, name: str, data: bytes | None, what: str) -> None:
    """Going on ends with a data error that names the file, and writes no record."""
    stage, asked, _ = half
    path = made.folder / name
    kept = path.read_bytes()
    path.unlink() if data is None else path.write_bytes(data)
    before = made.records()
    try:
        with pytest.raises(ArtifactError) as caught:
            made.make(stage, asked)
        assert path.name in str(caught.value), f"{name}, {what}: the message names another file: {caught.value}"
        assert made.records() == before, f"{name}, {what}"
    finally:
        path.write_bytes(kept)


def damages(data: bytes) -> list[tuple[str, bytes]]:
    body = json.loads(data)["body"]
    fields = ("kind", "format") if body["kind"] == "manifest" else tuple(field for field in PLACE if field in body)
    return [*flipped(data), *resealed(data, fields)]


def test_continuing_a_run_reads_every_kind_of_record(made, half):
    stage, asked, sealed = half
    found = {json.loads((made.folder / name).read_bytes())["body"]["kind"] for name in sealed}
    assert found == KINDS[stage]
    assert current_generation(asked.slot) == 2


def test_no_changed_value_of_a_record_is_accepted(made, half):
    """A few of each; all of them in the slow test."""
    for offset, name in enumerate(half[2]):
        for what, data in itertools.islice(damages((made.folder / name).read_bytes()), offset, None, 199):
            refuses(made, half, name, data, what)


@pytest.mark.slow
def test_no_changed_value_at_all_of_a_record_is_accepted(made, half):
    for name in half[2]:
        for what, data in damages((made.folder / name).read_bytes()):
            refuses(made, half, name, data, what)


def test_one_digit_of_a_sample_id_is_found(made, half):
    (layout,) = [name for name in half[2] if Path(name).name == "layout.2.json"]
    data = (made.folder / layout).read_bytes()
    digits = [place for place, byte in enumerate(data) if chr(byte) in "0123456789"]
    for place in digits[:: max(1, len(digits) // 5)]:
        other = b"1" if data[place : place + 1] == b"0" else b"0"
        refuses(made, half, layout, data[:place] + other + data[place + 1 :], f"digit at {place}")


def test_a_lost_end_of_a_generation_is_found(made, half):
    (end,) = [name for name in half[2] if Path(name).name == "invalidated.1.json"]
    refuses(made, half, end, None, "lost")


@pytest.mark.slow
def test_moved_records_are_refused(made, half):
    of_kind: dict[str, list[str]] = {}
    for name in half[2]:
        of_kind.setdefault(json.loads((made.folder / name).read_bytes())["body"]["kind"], []).append(name)
    numerics = [str(path.relative_to(made.folder)) for path in (made.folder / "store/runs/nft/numerics").iterdir()]
    for names in (*of_kind.values(), half[2], numerics):
        for name, other in itertools.permutations(names, 2):
            if name in half[2] and (made.folder / name).read_bytes() != (made.folder / other).read_bytes():
                refuses(made, half, name, (made.folder / other).read_bytes(), f"with the bytes of {other}")
