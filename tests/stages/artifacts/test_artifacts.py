import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cosmos_rl_core.canonical import canonical_json, sha256
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.generations import invalidate
from stages.artifacts.records import Layout
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, input_of, why_stale
from stages.contracts import ModelRef
from tests.hand_made import NUMERICS, adopt_or_make, begin, commit, make, remove, report

MODEL = ModelRef(path="/base", adapter="sd3", digest="d")


@pytest.fixture
def slot(store_url):
    return store.join(store_url, "slot")


def policy(slot, path="/base", from_scratch=False):
    config = contracts.Policy(model=MODEL.model_copy(update={"path": path}), from_scratch=from_scratch, lora=None)
    return Request(stage="policy", slot=slot, seed=0, config=config)


def already(request):
    """The manifest that an attempt finds current, or None."""
    generation, manifest = current_of(request.slot)
    if manifest is None or why_stale(manifest, request) is not None:
        return None
    assert Attempt.begin(request, lambda note: pytest.fail(note)) == (generation, manifest.attempt, manifest)
    return manifest


def path_of(slot, name):
    """URL of a file of the current artifact."""
    _, manifest = current_of(slot)
    assert manifest is not None
    return store.join(slot, manifest.files[name].path)


def test_an_empty_slot_is_at_its_first_generation(slot):
    assert current_of(slot) == (1, None)
    with pytest.raises(ArtifactError, match="has no artifact yet"):
        input_of(slot)


def test_a_committed_artifact_is_current_and_its_bytes_read_back(slot):
    request = report(slot)
    manifest = make(request, {"a": b"1", "dir/b": b"22"})
    generation, found = current_of(slot)
    assert (generation, found) == (1, manifest)
    artifact = Artifact(input_of(slot))
    assert artifact.names() == ["a", "dir/b"]
    assert artifact.names("dir/") == ["dir/b"]
    assert (artifact.read("a"), artifact.read("dir/b")) == (b"1", b"22")
    assert manifest.files["dir/b"].sha256 == sha256(b"22")
    assert manifest.fingerprint == request.fingerprint
    assert already(request) == manifest


def test_reading_an_unknown_file_names_the_known_files(slot):
    make(report(slot), {"a": b"1", "b": b"2"})
    with pytest.raises(ArtifactError, match="no file 'c'; it has a, b"):
        Artifact(input_of(slot)).read("c")


def make_content(data):
    return sha256(canonical_json({"a": sha256(data)}))


def test_files_without_a_manifest_are_no_artifact(slot):
    crashed = begin(report(slot))
    crashed.put("a", b"half")
    assert current_of(slot) == (1, None)
    finished = make(report(slot), {"b": b"whole"})
    assert list(finished.files) == ["b"]
    assert finished.attempt != crashed.id


def test_the_first_of_two_attempts_wins_and_the_other_returns_its_manifest(slot):
    first, second = begin(report(slot)), begin(report(slot))
    first.put("a", b"first")
    second.put("a", b"second")
    notes = []
    winner = commit(first)
    assert commit(second, notes) == winner
    assert notes == [f"another attempt ({first.id}) committed first; this one is dropped"]
    assert Artifact(input_of(slot)).read("a") == b"first"


def test_one_of_many_concurrent_attempts_commits_and_all_return_its_manifest(slot):
    attempts = [begin(report(slot)) for _ in range(6)]
    for attempt in attempts:
        attempt.put("a", attempt.id.encode())
    start = threading.Barrier(len(attempts))

    def race(attempt):
        start.wait()
        return commit(attempt).attempt

    with ThreadPoolExecutor(len(attempts)) as pool:
        (winner,) = set(pool.map(race, attempts))
    assert Artifact(input_of(slot)).read("a") == winner.encode()


def test_repeating_a_commit_changes_nothing(slot):
    attempt = begin(report(slot))
    attempt.put("a", b"1")
    assert commit(attempt) == commit(attempt)


def test_an_attempt_with_other_settings_does_not_take_the_winners_manifest(slot):
    first, second = begin(report(slot, "one")), begin(report(slot, "two"))
    commit(first)
    with pytest.raises(CosmosRLError, match="another attempt with other settings") as caught:
        commit(second)
    assert caught.value.retryable
    assert already(report(slot, "one")) is not None
    notes = []
    assert make(report(slot, "two"), notes=notes).generation == 2
    assert notes == ["generation 1 is made again: the settings of report changed (title)"]


def test_only_the_generation_that_was_judged_is_ended(slot):
    request = report(slot, "new")
    make(report(slot, "old"))
    meanwhile = []

    def another_is_faster(note):
        if not meanwhile:
            meanwhile.append(note)
            make(request, {"a": b"from the other"})

    generation, _, _ = Attempt.begin(request, another_is_faster)
    assert generation == 2
    assert current_of(slot)[0] == 2
    slow = Attempt(request, NUMERICS, generation, secrets.token_hex(8))
    slow.put("a", b"late")
    assert commit(slow).attempt != slow.id
    assert Artifact(input_of(slot)).read("a") == b"from the other"


def test_an_artifact_of_other_settings_or_inputs_is_stale_and_says_why(slot, store_url):
    manifest = make(report(slot))
    assert why_stale(manifest, report(slot)) is None
    assert why_stale(manifest, report(slot, title="u")) == "the settings of report changed (title)"
    other_seed = why_stale(manifest, report(slot, seed=1))
    assert other_seed == "the settings of report changed (iteration or seed)"
    source = store.join(store_url, "source")
    make(report(source))
    changed = why_stale(manifest, report(slot, fragments=(input_of(source),)))
    assert changed == "fragments changed since report was made"


def test_a_lost_file_is_made_again_as_a_new_generation(slot):
    request = report(slot)
    manifest = make(request, {"a": b"1", "b": b"2"})
    lost = path_of(slot, "b")
    remove(lost)
    assert why_stale(manifest, request) == f"b is missing ({lost})"
    notes = []
    again = make(request, {"a": b"1", "b": b"2"}, notes)
    assert notes == [f"generation 1 is made again: b is missing ({lost})"]
    assert (again.generation, again.content) == (2, manifest.content)
    assert Artifact(input_of(slot)).read("b") == b"2"


def test_a_file_of_another_size_is_an_error_and_never_rebuilt(slot):
    request = report(slot)
    make(request, {"a": b"123"})
    store.write(path_of(slot, "a"), b"12")
    with pytest.raises(ArtifactError, match="has 2 bytes, its manifest says 3; restore it, or invalidate"):
        Attempt.begin(request, lambda note: pytest.fail(note))
    assert current_of(slot)[0] == 1


def test_a_flipped_byte_is_found_when_the_file_is_read(slot):
    request = report(slot)
    make(request, {"a": b"123", "b": b"4"})
    store.write(path_of(slot, "a"), b"1#3")
    artifact = Artifact(input_of(slot))
    assert artifact.read("b") == b"4"
    with pytest.raises(ArtifactError, match="is not what was committed: sha256"):
        artifact.read("a")


def test_a_manifest_that_was_tampered_with_is_refused(slot):
    make(report(slot), {"a": b"1"})
    source = input_of(slot)
    url = store.join(slot, "manifest.1.json")
    store.write(url, store.read(url).replace(sha256(b"1").encode(), sha256(b"2").encode()))
    with pytest.raises(ArtifactError, match=r"manifest\.1\.json is not the manifest that is named"):
        Artifact(source)
    remove(url)
    with pytest.raises(ArtifactError, match=r"manifest\.1\.json is missing"):
        Artifact(source)


def test_a_request_that_names_other_contents_is_refused(slot):
    make(report(slot))
    source = input_of(slot).model_copy(update={"content": sha256(b"else")})
    with pytest.raises(ArtifactError, match="has other contents than the Request names"):
        Artifact(source)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'{"format": 2}', seal("manifest", {}), seal("manifest", {"reference": 1}), seal("layout", {})],
)
def test_a_file_that_is_no_manifest_in_a_manifests_place_is_an_error(tmp_path, data):
    url = store.join(str(tmp_path), "manifest.1.json")
    store.write(url, data)
    with pytest.raises(ArtifactError, match=re.escape(url)):
        current_of(str(tmp_path))


def test_an_input_made_again_with_equal_bytes_leaves_its_consumer_current(slot, store_url):
    source = store.join(store_url, "source")
    make(report(source, "one"), {"a": b"1"})
    before = report(slot, fragments=(input_of(source),))
    manifest = make(before)
    assert make(report(source, "two"), {"a": b"1"}).generation == 2
    after = report(slot, fragments=(input_of(source),))
    assert after.fingerprint != before.fingerprint
    assert after.inputs["fragments"][0].generation == 2
    assert already(after) == manifest
    make(report(source, "three"), {"a": b"2"})
    assert already(report(slot, fragments=(input_of(source),))) is None


def test_content_ignores_records_and_attempts(slot, store_url):
    manifests = []
    for number in range(2):
        attempt = begin(report(store.join(store_url, str(number))))
        attempt.put("a", b"1")
        attempt.put("records/log", b"took %d s" % number)
        manifests.append(attempt.commit(attempt.files, {"seconds": number}, pytest.fail))
    assert manifests[0].attempt != manifests[1].attempt
    assert manifests[0].files["records/log"] != manifests[1].files["records/log"]
    assert manifests[0].content == manifests[1].content == make_content(b"1")
    assert make(report(slot), {"b": b"1"}).content != manifests[0].content


def test_a_copy_that_version_0_lacks_is_its_current_part(slot):
    manifest = make(policy(slot), {"current/w": b"c"})
    assert input_of(slot, "old").part == "current"
    assert input_of(slot, "old").content == input_of(slot, "current").content == manifest.part_content("current")


def test_metrics_of_a_policy_do_not_change_the_content_that_training_continues_from(slot, store_url):
    source = store.join(store_url, "policy")
    state = {"current/w": b"c", "optimizer/m": b"1"}
    make(policy(source), {**state, "metrics.parquet": b"0.1"})
    before = input_of(source, "current", "old", "optimizer")
    assert before.parts == ("current", "optimizer")
    invalidate(source, 1, "measured again")
    make(policy(source), {**state, "metrics.parquet": b"0.2"})
    assert input_of(source, "current", "old", "optimizer").content == before.content
    invalidate(source, 2, "trained again")
    make(policy(source), {**state, "optimizer/m": b"2"})
    assert input_of(source, "current", "old", "optimizer").content != before.content


def test_a_part_is_a_folder_not_a_prefix(slot):
    manifest = make(policy(slot), {"current/w": b"c", "currently/w": b"x", "older/w": b"o"})
    assert not manifest.has_part("old")
    assert input_of(slot, "old").part == "current"
    assert manifest.part_content("current") == sha256(canonical_json({"current/w": sha256(b"c")}))


def test_a_layout_that_did_not_fit_into_memory_gives_way_to_a_smaller_one_for_good(slot):
    request, notes = report(slot), []
    large = begin(request, layout={"tile": 8})
    large.finish(0, {"s/0": b"of 8"})
    generation, attempt_id, _ = Attempt.begin(request, notes.append)
    smaller = Attempt(request, NUMERICS, generation, attempt_id)
    assert smaller.layout({"tile": 4}, notes.append, 1) == {"tile": 4}
    assert smaller.generation == 2
    assert (found := Layout.read(slot, 2)) is not None
    assert found.halvings == 1
    assert notes == ["an unfinished attempt at generation 1 did not fit into memory; nothing of it is kept"]
    smaller.use_layout({"tile": 4}, 2)
    adopt_or_make(smaller, 0, lambda: {"s/0": b"of 4"})

    # A command that begins anew does not know that memory was short; it takes the cut that is there.
    again = begin(request, layout={"tile": 8})
    assert again.generation == 2
    assert again.adopt(0)
    assert again.read("s/0") == b"of 4"
