import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from stages.artifacts.artifact import Artifact
from stages.artifacts.generations import invalidate
from stages.artifacts.slots import current_of, input_of
from tests.hand_made import NUMERICS, adopt_or_make, begin, commit, make, remove, report


@pytest.fixture
def slot(store_url):
    return store.join(store_url, "slot")


def shards_of(attempt, contents):
    """Make or adopt one shard per item; returns the indices that were made."""
    made = []
    for index, data in enumerate(contents):

        def work(index=index, data=data):
            made.append(index)
            return {f"samples/{index}": data}

        adopt_or_make(attempt, index, work)
    return made


def test_finished_shards_of_a_crashed_attempt_are_adopted(slot):
    crashed = begin(report(slot), layout={"shards": 3})
    assert shards_of(crashed, [b"0", b"1"]) == [0, 1]
    retry = begin(report(slot), layout={"shards": 3})
    assert shards_of(retry, [b"0", b"1", b"2"]) == [2]
    assert retry.adopted == 2
    manifest = commit(retry)
    assert [entry.path for entry in manifest.files.values()] == [
        f"attempts/{crashed.id}/samples/0",
        f"attempts/{crashed.id}/samples/1",
        f"attempts/{retry.id}/samples/2",
    ]
    assert [Artifact(input_of(slot)).read(name) for name in manifest.files] == [b"0", b"1", b"2"]


def test_adopted_shards_give_the_content_of_an_undisturbed_run(slot, store_url):
    shards_of(begin(report(slot), layout={}), [b"0"])
    retry = begin(report(slot), layout={})
    shards_of(retry, [b"0", b"1"])
    undisturbed = begin(report(store.join(store_url, "undisturbed")), layout={})
    shards_of(undisturbed, [b"0", b"1"])
    assert commit(retry).content == commit(undisturbed).content


def test_shards_made_with_other_threads_are_not_adopted_and_a_note_says_so(slot):
    shards_of(begin(report(slot), layout={}), [b"0", b"1"])
    notes = []
    retry = begin(report(slot), notes, numerics=NUMERICS | {"threads": 2}, layout={})
    assert notes == ["unfinished shards are not adopted: made under other numerics (threads: 1 -> 2)"]
    assert shards_of(retry, [b"0", b"1"]) == [0, 1]
    assert retry.adopted == 0
    assert retry.generation == 1


def test_a_retry_uses_the_committed_layout(slot):
    first = begin(report(slot))
    assert first.layout({"shards": [["x", "y"]]}, pytest.fail) == {"shards": [["x", "y"]]}
    retry = begin(report(slot))
    assert retry.layout({"shards": [["x"], ["y"]]}, pytest.fail) == {"shards": [["x", "y"]]}


def test_a_layout_of_an_edited_recipe_ends_the_generation(slot):
    shards_of(begin(report(slot, "before"), layout={}), [b"0"])
    notes = []
    edited = begin(report(slot, "after"), notes, layout={})
    assert notes == ["an unfinished attempt at generation 1 had other settings or inputs; nothing of it is kept"]
    assert edited.generation == 2
    assert shards_of(edited, [b"0"]) == [0]
    assert commit(edited).generation == 2
    assert current_of(slot)[0] == 2


def test_a_layout_of_other_inputs_ends_the_generation(slot, store_url):
    source = store.join(store_url, "source")
    make(report(source), {"a": b"1"})
    begin(report(slot, fragments=(input_of(source),)), layout={})
    invalidate(source, 1, "other bytes")
    make(report(source), {"a": b"2"})
    assert begin(report(slot, fragments=(input_of(source),)), layout={}).generation == 2


@pytest.mark.parametrize("damage", [b"01234", b"012345678#"])
def test_a_damaged_shard_behind_a_marker_is_an_error_and_not_adopted(slot, damage):
    crashed = begin(report(slot), layout={})
    shards_of(crashed, [b"0123456789"])
    store.write(crashed.url(crashed.files["samples/0"].path), damage)
    retry = begin(report(slot), layout={})
    with pytest.raises(ArtifactError, match="is not what was committed"):
        shards_of(retry, [b"0123456789"])
    assert retry.files == {}


def test_a_shard_lost_behind_its_marker_is_made_again(slot):
    crashed = begin(report(slot), layout={})
    shards_of(crashed, [b"0", b"1"])
    remove(crashed.url(crashed.files["samples/0"].path))
    for _ in range(2):
        retry = begin(report(slot), layout={})
        assert shards_of(retry, [b"0", b"1"]) == [0]
        assert retry.adopted == 1
    final = begin(report(slot), layout={})
    shards_of(final, [b"0", b"1"])
    commit(final)
    assert Artifact(input_of(slot)).read("samples/0") == b"0"


def test_a_file_that_is_no_marker_in_a_markers_place_is_an_error(slot):
    attempt = begin(report(slot), layout={})
    store.write(attempt.url(attempt.shards, "00000.json"), b'{"attempt": "x"}')
    with pytest.raises(ArtifactError, match=r"00000\.json is damaged: not a sealed marker"):
        shards_of(attempt, [b"0"])


def test_the_slower_of_two_attempts_at_a_shard_adopts_the_faster_ones_shard(slot):
    first, second = begin(report(slot), layout={}), begin(report(slot), layout={})

    def slow():
        adopt_or_make(first, 0, lambda: {"samples/0": b"equal"})
        return {"samples/0": b"equal"}

    adopt_or_make(second, 0, slow)
    assert second.files == first.files
    assert second.adopted == 1


def test_a_shard_that_is_not_offered_is_made_again_by_the_next_attempt(slot):
    attempt = begin(report(slot), layout={})
    adopt_or_make(attempt, 0, lambda: {"samples/0": b"partial"}, offered=False)
    assert attempt.read("samples/0") == b"partial"
    assert shards_of(begin(report(slot), layout={}), [b"whole"]) == [0]
