"""A committed layout cuts the planned work, and a finished shard has its samples; else they are damaged."""

import json

import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import shards, store
from cosmos_rl_core.storage.sealed import seal, unseal
from stages.artifacts.generations import current_generation
from stages.artifacts.layouts import difference, holds
from stages.artifacts.records import Layout
from stages.artifacts.slots import current_of
from tests.hand_made import begin, report

SHARDS = {"shards": [["a", "b"], ["c"]], "tile": 2}
STEPS = {"steps": [[["a", "b"], ["c"]], [["d"], ["e"]]]}


@pytest.fixture
def slot(tmp_path):
    return str(tmp_path / "slot")


@pytest.mark.parametrize(
    ("found", "computed"),
    [
        (SHARDS, SHARDS),
        ({"shards": [["a"], ["b", "c"]], "tile": 1}, SHARDS),
        ({"steps": [[["a"], ["b"], ["c"]], [["d", "e"]]]}, STEPS),
        ({"mini_batch": 1}, {"mini_batch": 8}),
        ({"shards": ["x.tar"]}, {"shards": ["x.tar"]}),
        ({"shards": []}, {"shards": []}),
    ],
)
def test_layouts_that_differ_only_in_sizes_divide_the_same_work(found, computed):
    assert difference(found, computed) is None


@pytest.mark.parametrize(
    ("found", "computed", "why"),
    [
        ({"shards": [["a", "b"], ["b"]], "tile": 2}, SHARDS, "shards are not the planned ones, each once and in order"),
        ({"shards": [["a", "b"]], "tile": 2}, SHARDS, "shards are not the planned ones, each once and in order"),
        ({"shards": [["b", "a"], ["c"]], "tile": 2}, SHARDS, "shards are not the planned ones, each once and in order"),
        ({"shards": [["a", "b"], [], ["c"]], "tile": 2}, SHARDS, "shards are not the planned ones"),
        ({"shards": [["a", "b"], "c"], "tile": 2}, SHARDS, "shards are not the planned ones"),
        ({"shards": None, "tile": 2}, SHARDS, "shards are not the planned ones"),
        ({**SHARDS, "tile": 0}, SHARDS, "tile is 0, expected a number of samples"),
        ({**SHARDS, "tile": True}, SHARDS, "tile is True, expected a number of samples"),
        ({"shards": SHARDS["shards"]}, SHARDS, "it has shards, expected shards, tile"),
        ({"steps": [[["a", "b"]], [["c"], ["d"], ["e"]]]}, STEPS, "steps are not the planned ones"),
        ({"steps": [[["a", "b", "c", "d", "e"]]]}, STEPS, "steps are not the planned ones"),
    ],
)
def test_the_difference_of_layouts_of_other_work_is_said(found, computed, why):
    assert (difference(found, computed) or "").startswith(why)


def damaged_layout(slot, change):
    """Commit a layout, and put a changed one in its place."""
    begin(report(slot), layout=SHARDS)
    url = Layout.url(slot, 1)
    store.write(url, change(store.read(url), url))
    return url


def test_one_changed_letter_of_a_sample_id_is_damage_and_ends_nothing(slot):
    url = damaged_layout(slot, lambda data, url: data.replace(b'"b"', b'"d"'))
    with pytest.raises(ArtifactError, match=f"^{url} is damaged: its digest does not match its contents"):
        begin(report(slot), layout=SHARDS)
    assert current_generation(slot) == 1


def test_a_changed_layout_with_a_valid_seal_is_compared_with_the_planned_work(slot):
    def twice(data, url):
        return seal("layout", unseal(data, "layout", url) | {"layout": {"shards": [["a", "a"], ["c"]], "tile": 2}})

    url = damaged_layout(slot, twice)
    expected = f"^{url} divides other work than this attempt has: shards are not the planned ones"
    with pytest.raises(ArtifactError, match=expected):
        begin(report(slot), layout=SHARDS)
    assert current_generation(slot) == 1


def test_a_committed_layout_of_other_sizes_is_used(slot):
    begin(report(slot), layout={"shards": [["a"], ["b"], ["c"]], "tile": 1})
    again = begin(report(slot))
    assert again.layout(SHARDS, pytest.fail) == {"shards": [["a"], ["b"], ["c"]], "tile": 1}


def test_a_tar_is_checked_for_its_name_and_its_samples():
    data = shards.pack({"a.json": b"", "a.png": b"", "b.v1.json": b""})
    assert holds(["0.tar"], ["a", "b.v1"])({"0.tar": data}) is None
    assert holds(["1.tar"], ["a", "b.v1"])({"0.tar": data}) == "it marks 0.tar, expected 1.tar"
    besides = "0.tar lacks c of the layout's samples, and has b.v1 in addition"
    assert holds(["0.tar"], ["a", "c"])({"0.tar": data}) == besides
    assert "not a tar shard" in (holds(["0.tar"], ["a"])({"0.tar": b"x" * 600}) or "")


@pytest.mark.parametrize("data", [b"[]", b'[{"sample_id": "b"}]', b'[{"id": "a"}]', b"[1]", b"1", b"{"])
def test_a_table_is_checked_for_its_samples(data):
    check = holds(["0.json", "0.tar"], ["a"])
    files = {"0.tar": shards.pack({"a.png": b""}), "0.json": b'[{"sample_id": "a"}]'}
    assert check(files) is None
    assert (check(files | {"0.json": data}) or "").startswith("0.json")


def finished(slot):
    """Two finished shards; the URLs of their markers."""
    crashed = begin(report(slot), layout=SHARDS)
    for index, ids in enumerate(SHARDS["shards"]):
        name = f"{index}.tar"
        crashed.finish(index, {name: shards.pack({f"{one}.json": b"{}" for one in ids})})
    return [next(store.join(slot, n) for n in store.listed(slot) if n.endswith(f"0000{i}.json")) for i in (0, 1)]


def adopt_all(slot):
    retry = begin(report(slot), layout=SHARDS)
    return [retry.adopt(index, holds([f"{index}.tar"], ids)) for index, ids in enumerate(SHARDS["shards"])]


def test_a_marker_that_was_moved_is_refused(slot):
    first, second = finished(slot)
    assert adopt_all(slot) == [True, True]
    store.write(first, store.read(second))
    with pytest.raises(ArtifactError, match=f"^{first} was written for shard 1 of shards/"):
        adopt_all(slot)
    assert current_of(slot) == (1, None)


def test_a_marker_with_the_files_of_another_shard_is_refused(slot):
    first, second = finished(slot)
    body = unseal(store.read(first), "marker", first)
    store.write(first, seal("marker", body | {"files": unseal(store.read(second), "marker", second)["files"]}))
    with pytest.raises(ArtifactError, match=rf"^{first} does not mark the files of shard 0: it marks 1\.tar"):
        adopt_all(slot)
    renamed = {"0.tar": json.loads(store.read(second))["body"]["files"]["1.tar"]}
    store.write(first, seal("marker", body | {"files": renamed}))
    with pytest.raises(ArtifactError, match="lacks a, b of the layout's samples, and has c in addition"):
        adopt_all(slot)
