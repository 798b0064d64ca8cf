"""Text embeddings that no artifact names go, also while others are made."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError, UnavailableError
from cosmos_rl_core.storage import store
from flows.garbage.datasets import gc_datasets
from flows.planning.run import Run
from stages.artifacts.pool import POOL, TEXTS
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from tests.flows.garbage.test_gc_meanwhile import During
from tests.flows.prepared import age, collect, embed, files_of, plan_on, prepare, run_on
from tests.hand_made import begin
from tests.stages.conftest import make


def embed_of(run: Run) -> Request:
    (found,) = (request for request in run.prepared.steps().values() if request.stage == "embed")
    return found


def pool_of(url: str) -> set[str]:
    return {Path(name).stem for name in files_of(f"{url}/dataset/{POOL}")}


@pytest.fixture
def other(pictures: Path, store_url: str) -> Request:
    """The embeddings of a run that was never begun: of three texts, one shared with the run ``run``."""
    prepare(pictures, store_url)
    embed(embed_of(run_on(store_url, "run")), "ours", "shared")
    request = embed_of(Run(plan_on(store_url, "other", length=13), store_url))
    embed(request, "theirs", "shared", "negative-1")
    age(store_url)
    return request


def test_files_that_no_index_names_go_and_shared_ones_stay(other: Request, store_url: str):
    expected = {
        "unused embed": (1, 2),
        "unused files of texts and references": (0, 2),
        "used embed": (1, 2),
        "used files of texts and references": (0, 2),
        "used index": (1, 8),
    }
    assert collect(store_url, dry_run=True) == expected
    assert pool_of(store_url) == {"ours", "shared", "theirs", "negative-1"}
    assert collect(store_url) == expected
    assert pool_of(store_url) == {"ours", "shared"}


def test_a_file_that_was_written_lately_stays(other: Request, store_url: str):
    store.write(f"{store_url}/dataset/{POOL}/key/new.safetensors", b"1")
    assert collect(store_url)["young files of texts and references"] == (0, 1)
    assert pool_of(store_url) == {"ours", "shared", "new"}


def test_the_index_of_an_artifact_that_was_made_lately_counts_though_no_run_reads_it(other: Request, store_url: str):
    store.write(f"{other.slot}/renewed", b"")
    assert "unused files of texts and references" not in collect(store_url)
    assert pool_of(store_url) == {"ours", "shared", "theirs", "negative-1"}


def test_files_that_an_unfinished_embedding_names_stay(other: Request, store_url: str):
    begin(embed_of(run_on(store_url, "begun", length=14)), layout={TEXTS: ["theirs", "missing"]})
    assert collect(store_url)["unused files of texts and references"] == (0, 1)
    assert pool_of(store_url) == {"ours", "shared", "theirs"}


def test_files_that_an_embedding_names_just_before_the_sweep_stay(other: Request, store_url: str, monkeypatch):
    late = embed_of(Run(plan_on(store_url, "late", length=14), store_url))
    middle = During(monkeypatch, "write", f"{POOL}/sweep", lambda: begin(late, layout={TEXTS: ["negative-1"]}))
    assert collect(store_url)["unused files of texts and references"] == (0, 1)
    assert middle.done
    assert pool_of(store_url) == {"ours", "shared", "negative-1"}


def test_an_embedding_during_the_sweep_must_be_tried_again(pictures: Path, store_url: str, tmp_path: Path, monkeypatch):
    prepare(pictures, store_url)
    first, second = (
        embed_of(Run(plan_on(store_url, name, width=width), store_url)) for name, width in (("a", 64), ("b", 32))
    )
    assert first.slot == second.slot
    make(first, tmp_path / "outcome")
    names = pool_of(store_url)
    assert len(names) == 4
    age(store_url)
    said: list[str] = []

    def begins() -> None:
        with pytest.raises(
            UnavailableError,
            match="try again when that has ended; if it was killed, run it again: `cosmos-flows data gc --store ",
        ) as error:
            make(second, tmp_path / "outcome")
        said.append(error.value.kind)

    During(monkeypatch, "remove", f"{POOL}/[0-9a-f]", begins)
    assert collect(store_url)["unused files of texts and references"] == (0, 4)
    assert (said, pool_of(store_url)) == (["unavailable"], set())
    make(second, tmp_path / "outcome")
    assert pool_of(store_url) == names
    assert Embeddings([input_of(second.slot)], names - {name for name in names if name.startswith("negative")})


def test_a_killed_sweep_is_finished_by_the_next_one(other: Request, store_url: str):
    collect(store_url)
    store.write(f"{store_url}/dataset/{POOL}/sweep", b"")
    collect(store_url, dry_run=True)
    assert store.size(f"{store_url}/dataset/{POOL}/sweep") == 0
    collect(store_url)
    assert store.size(f"{store_url}/dataset/{POOL}/sweep") is None


def test_nothing_goes_while_the_index_of_a_kept_artifact_is_damaged(other: Request, store_url: str):
    ours = embed_of(run_on(store_url, "run")).slot
    (index,) = (name for name in store.listed(ours) if name.endswith("index.json"))
    store.write(f"{ours}/{index}", b"{}")
    age(store_url)
    before = files_of(store_url)
    with pytest.raises(ArtifactError, match="index"):
        gc_datasets(store_url)
    assert files_of(store_url) == before
