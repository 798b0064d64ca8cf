"""Runs and preparations that begin while garbage of datasets is collected lose nothing that they name."""

import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.garbage.datasets import gc_datasets
from flows.planning.plan import freeze
from flows.planning.run import Run
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, input_of
from tests.flows.prepared import (
    age,
    collect,
    four_snapshots,
    is_there,
    make_prepared,
    plan_on,
    prepare,
    read_items,
    run_on,
    slots_of,
)
from tests.stages.conftest import make


class During:
    """Does something once in the middle: before or after the first call of a function of the store with such a URL."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, url: str, do: Callable[[], Any], *, after: bool = False):
        real, self.done = getattr(store, name), False

        def called(*arguments: Any) -> Any:
            is_it = not self.done and re.search(url, arguments[0]) is not None
            self.done |= is_it
            if is_it and not after:
                do()
            found = real(*arguments)
            if is_it and after:
                do()
            return found

        patch.setattr(store, name, called)


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_pins_a_snapshot_while_it_is_being_removed_keeps_it(pictures, store_url, monkeypatch, after):
    four_snapshots(pictures, store_url)
    age(store_url)
    plan = plan_on(store_url, "run", number=2)
    middle = During(monkeypatch, "put_if_absent", "removed.2", lambda: freeze(plan, store_url), after=after)
    found = gc_datasets(store_url, keep=1)
    assert middle.done
    assert found.removed == {"clips": [1, 3]}
    assert read_items(store_url, 2) == ["0000", "0001", "0002", "0003"]
    assert len(Run(plan, store_url).prepared.steps()) == 4
    assert collect(store_url, keep=1)["used index"] == (4, 32)


def test_a_run_that_pins_a_removed_snapshot_is_refused_at_its_beginning(pictures, store_url, monkeypatch):
    four_snapshots(pictures, store_url)
    age(store_url)
    plan = plan_on(store_url, "late", number=2)
    middle = During(monkeypatch, "remove", r"manifest\.1", lambda: freeze(plan, store_url), after=True)
    found = gc_datasets(store_url, keep=1)
    assert middle.done
    assert found.cannot_run == ["late"]
    with pytest.raises(ConfigError, match="another --run-id for a run"):
        Run(plan, store_url).prepared.steps()
    assert any("run late was planned on a removed snapshot" in str(line) for line in gc_datasets(store_url).lines())


def test_a_removal_whose_process_was_killed_is_taken_back_for_a_run(pictures: Path, store_url: str):
    four_snapshots(pictures, store_url)
    run = run_on(store_url, "run", number=2)
    age(store_url)
    # Killed between its record and its next look at the plans.
    snapshots.remove(store_url, "clips", 2)
    assert gc_datasets(store_url, keep=1, dry_run=True).cannot_run == ["run"]
    assert gc_datasets(store_url, keep=1).removed == {"clips": [1, 3]}
    assert len(run.prepared.steps()) == 4


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_is_planned_meanwhile_keeps_the_files_of_its_latents(pictures, store_url, monkeypatch, after):
    prepare(pictures, store_url)
    plan = plan_on(store_url, "run")
    (_, encode) = make_prepared(Run(plan, store_url))
    age(store_url)
    source = input_of(encode)
    middle = During(
        monkeypatch, "put_if_absent", f"{encode}/invalidated.1", lambda: freeze(plan, store_url), after=after
    )
    assert collect(store_url)["used encode"] == (1, 3)
    assert middle.done
    # What it has found current can be read to its end; what looks later makes it again.
    assert Artifact(source).read("a") == b"12345"
    assert current_of(encode) == (2, None)


def test_a_run_that_is_planned_while_files_go_finds_their_artifacts_ended(pictures, store_url, monkeypatch):
    prepare(pictures, store_url)
    plan = plan_on(store_url, "run")
    (embed, encode) = make_prepared(Run(plan, store_url))
    age(store_url)
    seen = []

    def planned() -> None:
        run = Run(freeze(plan, store_url), store_url)
        seen.extend(current_of(request.slot)[1] for request in run.prepared.steps().values())

    first = sorted([embed, encode])[0]
    During(monkeypatch, "remove", f"{first}/manifest", planned)
    assert sum(count for count, _ in collect(store_url).values()) == 3
    assert [manifest is None for manifest in seen] == [slot == first for slot in (embed, encode)]
    assert [is_there(slot) for slot in (embed, encode)] == [slot != first for slot in (embed, encode)]


def test_an_old_part_that_a_preparation_uses_again_stays(pictures: Path, store_url: str):
    (first,) = slots_of(prepare(pictures, store_url))
    assert slots_of(prepare(pictures, store_url, min_size=[4, 4])) != [first]
    age(store_url)
    said: list[dict[str, tuple[int, int]]] = []

    def launch(_: str, request: Request) -> list[Manifest]:
        manifest = make(request, pictures.parent / "outcome" / secrets.token_hex(4))
        said.append(collect(store_url, keep=1))
        return [manifest]

    assert slots_of(prepare(pictures, store_url, launch)) == [first]
    assert said == [{"young index": (1, 9), "used index": (1, 8)}]
    assert read_items(store_url, 3) == ["0000", "0001", "0002"]
