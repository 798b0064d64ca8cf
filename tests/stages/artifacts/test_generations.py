"""How generations follow each other, and that no record of a slot is read in another's place."""

import re
import shutil

import pytest

from cosmos_rl_core.canonical import canonical_json, digest, sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.generations import current_generation, invalidate
from stages.artifacts.records import Invalidated, Layout
from stages.artifacts.slots import current_of, drop, input_of, one_look, read_manifest, why_stale
from tests.hand_made import begin, make, remove, report


@pytest.fixture
def slot(tmp_path):
    return str(tmp_path / "store" / "runs" / "a" / "iterations" / "0007" / "report")


def test_inside_one_look_a_slot_is_read_once(slot):
    make(report(slot))
    with one_look():
        before = current_of(slot)
        invalidate(slot, 1, "test")
        assert current_of(slot) is before
        assert input_of(slot).generation == 1
    assert current_of(slot) == (2, None)


def refused(slot, *words):
    """A reader of the slot names the file and says what is wrong; nobody ends a generation."""
    before = store.names(slot)
    for read in (current_of, lambda slot: Attempt.begin(report(slot), pytest.fail)):
        with pytest.raises(ArtifactError, match=".*".join(map(re.escape, words))):
            read(slot)
    assert store.names(slot) == before


def test_each_invalidation_begins_a_generation_and_deletes_nothing(slot):
    request = report(slot)
    for generation in (1, 2, 3):
        made = make(request, {"a": b"%d" % generation})
        assert made.generation == generation
        assert current_of(slot) == (generation, made)
        data = store.read(store.join(slot, f"manifest.{generation}.json"))
        assert invalidate(slot, generation, "because") == generation + 1
        ended = Invalidated.read(slot, generation)
        assert ended is not None
        assert (ended.manifest, ended.reason) == (sha256(data), "because")
    assert current_of(slot) == (4, None)
    for generation in (1, 2, 3):
        manifest = read_manifest(slot, generation)
        assert manifest is not None
        assert manifest.content == make_content(b"%d" % generation)


def make_content(data):
    return digest({"a": sha256(data)})


def test_a_crash_between_invalidation_and_the_next_manifest_leaves_nothing_current(slot):
    request = report(slot)
    make(request, {"a": b"old"})
    invalidate(slot, 1, "crash after this")
    assert current_of(slot) == (2, None)
    with pytest.raises(ArtifactError, match="has no artifact yet"):
        input_of(slot)
    assert make(request, {"a": b"new"}).generation == 2
    assert Artifact(input_of(slot)).read("a") == b"new"


def test_a_lost_end_of_a_generation_is_noticed_by_records_of_the_next_one(slot):
    make(report(slot))
    invalidate(slot, 1, "because")
    begin(report(slot), layout={"shards": []})
    invalidate(slot, 2, "because")
    make(report(slot))
    for generation, later in ((1, "layout.2.json"), (2, "manifest.3.json")):
        url = Invalidated.url(slot, generation)
        data = store.read(url)
        remove(url)
        refused(slot, f"invalidated.{generation}.json is missing, but there is ", later)
        store.write(url, data)
    assert current_of(slot)[0] == 3


def test_an_end_names_its_manifest(slot):
    make(report(slot), {"a": b"1"})
    invalidate(slot, 1, "because")
    make(report(slot), {"a": b"2"})
    first, second = (store.join(slot, f"manifest.{n}.json") for n in (1, 2))
    store.write(first, store.read(second))
    refused(slot, "manifest.1.json is not the manifest that ", "invalidated.1.json ended")
    remove(first)
    assert current_of(slot)[0] == 2


def test_a_generation_stays_ended_when_a_slow_attempt_commits_to_it_later(slot):
    slow = begin(report(slot))
    slow.put("a", b"late")
    assert invalidate(slot, 1, "unfinished") == 2
    slow.commit(slow.files, {}, pytest.fail)
    assert current_of(slot) == (2, None)


@pytest.mark.parametrize("kind", ["manifest", "invalidated"])
def test_a_record_of_another_generation_or_slot_is_refused(slot, kind):
    other = slot.replace("0007", "0008")
    for one in (slot, other):
        make(report(one), {"a": b"1"})
        invalidate(one, 1, "because")
        make(report(one), {"a": b"1"})
        invalidate(one, 2, "because")
        make(report(one), {"a": b"1"})
        invalidate(one, 3, "because")
    place = "runs/a/iterations/0007/report"
    urls = {(one, n): store.join(one, f"{kind}.{n}.json") for one in (slot, other) for n in (1, 2, 3)}
    contents = {key: store.read(url) for key, url in urls.items()}
    for source, found in (
        ((other, 3), f"generation 3 of {place.replace('7', '8')}"),
        ((slot, 2), f"generation 2 of {place}"),
    ):
        store.write(urls[slot, 3], contents[source])
        with pytest.raises(ArtifactError, match=re.escape(f"{kind}.3.json was written for {found}")):
            (read_manifest if kind == "manifest" else Invalidated.read)(slot, 3)


def test_a_moved_store_has_the_same_records(slot, tmp_path):
    make(report(slot))
    invalidate(slot, 1, "because")
    request = report(slot)
    make(request)
    shutil.move(tmp_path / "store", tmp_path / "elsewhere")
    moved = slot.replace("/store/", "/elsewhere/")
    generation, manifest = current_of(moved)
    assert manifest is not None
    assert (generation, why_stale(manifest, report(moved))) == (2, None)


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("summary", {"ocr": 0.925}, None),
        ("config", {"title": "other"}, "recipe"),
        ("seed", 1, "recipe"),
        ("recipe", "0" * 64, "recipe"),
        ("fingerprint", "0" * 64, "fingerprint"),
        ("content", "0" * 64, "content"),
        ("files", {}, "content"),
    ],
)
def test_a_manifest_whose_digests_do_not_follow_from_it_is_damaged_and_not_stale(slot, field, value, wrong):
    make(report(slot), ocr=0.625)
    url = store.join(slot, "manifest.1.json")
    intact = store.read(url)
    body = unseal(intact, "manifest", url) | {field: value}
    store.write(url, canonical_json({"body": body, "sha256": digest(body)}))
    refused(slot, url, "holds a None")
    store.write(url, intact.replace(b"0.625", b"0.925"))
    refused(slot, url, "its digest does not match its contents")
    if wrong is not None:
        store.write(url, seal("manifest", body))
        refused(slot, url, f"contradicts itself: its {wrong} ")


def test_a_record_of_a_dropped_part_must_name_the_manifest_in_its_slot(slot):
    make(report(slot), {"old/w": b"1", "new/w": b"2"})
    drop(slot, "old")
    assert Artifact(input_of(slot)).lacks("old")
    url = store.join(slot, "dropped.1.old.json")
    body = unseal(store.read(url), "dropped", url) | {"manifest": "0" * 64}
    store.write(url, seal("dropped", body))
    with pytest.raises(ArtifactError, match=r"dropped\.1\.old\.json is of another manifest than the one next to it"):
        Artifact(input_of(slot)).read("old/w")


def test_a_layout_of_another_generation_is_refused(slot):
    begin(report(slot), layout={"shards": [["a"]]})
    data = store.read(Layout.url(slot, 1))
    invalidate(slot, 1, "because")
    store.write(Layout.url(slot, 2), data)
    with pytest.raises(ArtifactError, match=r"layout\.2\.json was written for generation 1 of runs/a"):
        begin(report(slot), layout={"shards": [["a"]]})
    assert current_generation(slot) == 2
