"""What a run asks for that goes on: waves that are current are found by few requests, and taken as one."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cosmos_rl_core import plugins
from cosmos_rl_core.storage import store
from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry
from flows.library.overview import Overview
from flows.library.states import states
from flows.planning.run import Run
from flows.session import loop
from flows.session.current_waves import CurrentWave, Ended
from stages.artifacts.generations import invalidate
from stages.artifacts.slots import current_of, one_look
from tests.flows.by_hand import ByHand, recipe_in
from tests.hand_made import planned

ITERATIONS = 6
asked: Counter[str] = Counter()
"""Requests by method."""


class Counted(MemoryFileSystem):
    """A store in memory that counts what an S3 server would be asked for."""

    protocol = ("counted",)
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        asked["get"] += 1
        return super().cat_file(path, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        asked["head"] += 1
        return super().info(path, **kwargs)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        asked["list"] += 1
        before = asked.copy()
        found = super().find(path, *args, **kwargs)
        asked.clear()
        asked.update(before)
        return found

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> None:
        asked["put"] += 1
        super().pipe_file(path, *args, **kwargs)

    def rm_file(self, path: str) -> None:
        asked["delete"] += 1
        super().rm_file(path)


class Takes:
    """A record of the waves that are current, block by block."""

    def __init__(self) -> None:
        self.blocks: list[list[str]] = []

    def __call__(self, current: Sequence[CurrentWave], ended: Ended) -> None:
        self.blocks.append([one.wave.name for one in current])
        for one in current:
            ended(one.wave, one.manifests)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A finished run in the store that counts."""
    fsspec.register_implementation("counted", Counted, clobber=True)
    folder = tmp_path_factory.mktemp("current")
    recipe = recipe_in(folder)()
    run = planned(recipe, folder, iterations=ITERATIONS)
    run = Run(run.plan, "counted://bucket/store")
    loop.make(run, ByHand().launch)
    yield run
    Counted.store.clear()


@pytest.fixture
def run(finished: Run) -> Iterator[Run]:
    before = dict(Counted.store)
    asked.clear()
    yield finished
    Counted.store.clear()
    Counted.store.update(before)


def gone_on(run: Run) -> tuple[list[list[str]], list[str]]:
    """Blocks of current waves, and waves that were launched."""
    takes, by_hand = Takes(), ByHand()
    loop.make(run, by_hand.launch, take=takes)
    return takes.blocks, by_hand.waves


def test_a_finished_run_is_one_block_and_nothing_is_written(run):
    before = dict(Counted.store)
    (block,), launched = gone_on(run)
    assert launched == []
    assert (block[0], block[-1]) == ("policy", "report")
    assert asked["put"] == asked["delete"] == 0
    assert Counted.store.keys() == before.keys()


def test_a_look_at_a_finished_run_makes_fewer_than_two_requests_an_artifact(run):
    found = states(run)
    assert {state.word for state in found} == {"stands"}
    assert asked["get"] <= len(found) + 3
    assert asked.total() < 2 * len(found), asked


def test_a_run_that_goes_on_makes_fewer_than_two_requests_an_artifact(run):
    gone_on(run)
    assert asked.total() < 2 * len(states(run)), asked


@pytest.mark.parametrize("stage", ["rollout", "reward-ocr", "update"])
def test_an_iteration_that_lacks_an_artifact_makes_exactly_that(run, stage):
    slot = run.slots.iteration(3, stage)
    invalidate(slot, 1, "test")
    with one_look():
        before = {state.step.slot: current_of(state.step.slot)[1] for state in states(run)}
    first, second = gone_on(run)[0]
    assert second[-1] == "report"
    waves = [*first, *second]
    assert current_of(slot)[0] == 2
    made = {place for place, manifest in before.items() if current_of(place)[1] != manifest}
    assert made == {slot}
    assert len(waves) == len(set(waves))


def test_a_missing_file_is_found_and_a_file_of_another_size_is_refused(run):
    _, manifest = current_of(run.slots.iteration(2, "rollout"))
    assert manifest is not None
    entry = manifest.files["index/00000.json"]
    url = store.join(manifest.slot, entry.path)
    store.remove(url)
    assert {state.step.name: state.why for state in states(run)}["iteration-0002/rollout"].startswith(
        "index/00000.json is missing"
    )
    store.write(url, b"x" * (entry.size + 1))
    assert {state.step.name: state.word for state in states(run)}["iteration-0002/rollout"] == "damaged"
    blocks, launched = [], []

    def launch(name: str, *requests: Any) -> Any:
        launched.append(name)
        raise InterruptedError

    def take(current: Sequence[CurrentWave], ended: Ended) -> None:
        blocks.append([one.wave.name for one in current])

    with pytest.raises(InterruptedError):
        loop.make(run, launch, take=take)
    # Its own wave is launched, and raises the error in its turn.
    assert launched == ["iteration-0002/rollout"]
    assert len(blocks) == 1


def test_writes_inside_a_look_are_seen(run):
    slot = run.slots.iteration(1, "rollout")
    with one_look():
        url = store.join(slot, "logs", "a.log")
        assert store.size(url) is None
        store.write(url, b"abc")
        assert store.size(url) == 3
        assert "a.log" in store.names(store.join(slot, "logs"))
        store.remove(url)
        assert store.read_if_exists(url) is None


def test_a_look_lists_no_folder_of_a_policy_version_that_has_none(run):
    longer = Run(run.going_to(40).plan, run.store_url)
    asked.clear()
    states(longer)
    assert asked["list"] <= ITERATIONS + 8, asked


def test_a_look_asks_for_the_version_of_each_scorer_once(run, monkeypatch):
    asked_for: list[str] = []
    reward = plugins.load("rewards", "ocr").Reward
    version = reward.version.func
    monkeypatch.setattr(reward, "version", property(lambda self: (asked_for.append("ocr"), version(self))[1]))
    assert {state.word for state in states(run)} == {"stands"}
    assert len(asked_for) == 1
    states(run)
    assert len(asked_for) == 2


def test_a_finished_run_asks_nothing_of_the_ledger_but_its_newest_page(run):
    ledger = Ledger(run.url, "", [].append)
    for number in range(5):
        page = ledger.page(f"iteration-{number:04d}/rollout", time.monotonic() - 7.0)
        page.turn(lambda: [Entry(stage="rollout", slot="runs/hand/rollout", devices=1, seconds=5.0)])
        page.close([Entry(stage="rollout", slot="runs/hand/rollout", devices=1, seconds=5.0, outcome="made")])
    asked.clear()
    later = Ledger(run.url, "", [].append)
    assert later.totals.attempts == 5
    assert asked["get"] == 1
    assert later.iterations == ledger.iterations == dict.fromkeys(range(5), 5.0)
    overview = Overview.of(run)
    asked.clear()
    assert overview.outlook.left_s is None
    assert asked["get"] == 1
