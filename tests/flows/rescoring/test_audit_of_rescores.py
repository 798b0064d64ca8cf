"""What an audit of a run says of its re-scores, and what becomes of them with the run."""

import re
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import LeaseError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease
from flows.auditing import audit as auditing
from flows.auditing.audit import audit
from flows.garbage import delete
from flows.garbage.run import gc
from flows.planning.run import Run
from stages.artifacts.slots import drop
from stages.contracts import MEDIA
from tests.flows.rescoring.stored import FAILING, Store, rewards_file, stored_run, wanted

OTHER = f'[[rewards]]\nfn = {{ name = "jpeg", quality = 30 }}\n{FAILING}\n'
DERIVED = ("index.html", "agreement.json")


@pytest.fixture
def rescored(recipe: Any, tmp_path: Path) -> tuple[Run, Store, str]:
    """A run with a re-score of which one iteration was decoded first, and its folder."""
    run, hand = stored_run(recipe, tmp_path)
    drop(run.slots.iteration(0, "rollout"), MEDIA)
    plan = wanted(run, rewards_file(tmp_path, OTHER), evaluations=True)
    hand.rescore(plan)
    return run, hand, plan.rescore.url


def faults(run: Run, **options: Any) -> dict[str, str]:
    """Faults of re-scores by file."""
    found = audit(run.store_url, run.plan.run_id, **options)
    return {f"{one.file}: {one.field}": one.what for one in found.faults if "/rescore/" in one.file}


def unknown(run: Run) -> list[str]:
    return [name for name in audit(run.store_url, run.plan.run_id).unknown if "rescore" in name]


def test_a_whole_re_score_has_no_fault_and_nothing_unnamed(rescored: tuple[Run, Store, str]) -> None:
    run, _, url = rescored
    assert faults(run) == {}
    assert faults(run, iteration=1) == {}
    assert unknown(run) == []
    seen = audit(run.store_url, run.plan.run_id).artifacts
    store.write(store.join(url, "notes.txt"), b"whose?")
    assert [name.rpartition("/")[2] for name in unknown(run)] == ["notes.txt"]
    assert seen > 5


def test_a_flipped_byte_of_any_file_but_the_report_is_found(
    rescored: tuple[Run, Store, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, url = rescored
    # Nobody works on the store, so one look finds what the others would find again.
    monkeypatch.setattr(auditing, "LOOKS", 1)
    every = [name for name in store.listed(url) if name not in DERIVED and "/logs/" not in name]
    # Of each kind one.
    kinds = {(re.sub(r"[0-9]", "", name.rpartition("/")[2]), name.split("/")[0]): name for name in every}
    assert {"rescore.json", "manifest..json", "scores.parquet", "reward.json"} <= {kind for kind, _ in kinds}
    for name in kinds.values():
        place = store.join(url, name)
        whole = store.read(place)
        middle = len(whole) // 2
        if whole:
            store.write(place, whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
            assert faults(run), name
            store.write(place, whole)
    assert faults(run) == {}


def test_scores_under_another_record_are_found(rescored: tuple[Run, Store, str], tmp_path: Path) -> None:
    run, hand, url = rescored
    other = wanted(run, rewards_file(tmp_path, OTHER.replace("30", "20"), "other"), "1")
    hand.rescore(other)
    for name in ("layout.1.json", "manifest.1.json"):
        mine, theirs = (f"{one}/iterations/0001/reward-jpeg/{name}" for one in (url, other.rescore.url))
        store.write(mine, store.read(theirs))
    assert any("iterations/0001/reward-jpeg" in place for place in faults(run))


def test_a_re_score_without_its_record_is_reported(rescored: tuple[Run, Store, str]) -> None:
    run, _, url = rescored
    store.remove(store.join(url, "rescore.json"))
    assert [place.rpartition("/")[2] for place in faults(run)] == ["rescore.json: record"]


def test_a_folder_that_was_killed_before_its_record_is_no_fault(rescored: tuple[Run, Store, str]) -> None:
    run, _, _ = rescored
    store.write(store.join(run.url, "rescore", "killed-00000000", ".probe", "x"), b"")
    assert faults(run) == {}


def test_gc_leaves_a_re_score_as_it_is_and_a_deletion_takes_it_along(rescored: tuple[Run, Store, str]) -> None:
    run, _, url = rescored
    before = store.listed(url).keys()
    gc(run.store_url, run.plan.run_id, superseded=True, dry_run=False, older_than_h=0.0)
    assert store.listed(url).keys() == before
    assert faults(run) == {}
    with Lease(store.join(url, "lease")), pytest.raises(LeaseError):
        delete.delete(run.store_url, run.plan.run_id)
    delete.delete(run.store_url, run.plan.run_id)
    assert not store.listed(run.url)
