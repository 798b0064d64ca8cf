"""What a stage is asked: which of it identifies an artifact, and its way through a file."""

import json
from pathlib import Path

from cosmos_rl_core.datasets import local
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.generations import invalidate
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of, why_stale
from tests.hand_made import make, report
from tests.stages.artifacts.test_artifacts import MODEL, already, policy, slot
from tests.stages.test_encode import asked, config_of, videos

__all__ = ["slot", "videos"]


def export(slot, source):
    config = contracts.Export(model=MODEL, lora=None)
    return Request(stage="export", slot=slot, seed=0, config=config, inputs={"policy": (source,)})


def test_inputs_are_told_apart_by_role_and_order(slot, store_url):
    one, two = (store.join(store_url, name) for name in ("one", "two"))
    make(report(one), {"a": b"1"})
    make(report(two), {"a": b"2"})
    sources = input_of(one), input_of(two)
    manifest = make(report(slot, fragments=sources))
    assert why_stale(manifest, report(slot, fragments=sources)) is None
    assert why_stale(manifest, report(slot, fragments=sources[::-1])) == "fragments changed since report was made"
    swapped = why_stale(manifest, report(slot, updates=sources))
    assert swapped == "fragments, updates changed since report was made"


def test_a_consumer_of_one_part_does_not_depend_on_the_others(slot, store_url):
    source = store.join(store_url, "policy")
    make(policy(source), {"current/w": b"c", "old/w": b"o", "optimizer/m": b"1"})
    manifest = make(export(slot, input_of(source, "old")))
    make(policy(source, from_scratch=True), {"current/w": b"c2", "old/w": b"o", "optimizer/m": b"2"})
    assert already(export(slot, input_of(source, "old"))) == manifest
    # Of all parts together it is another artifact.
    assert why_stale(manifest, export(slot, input_of(source))) == "policy changed since export was made"
    invalidate(source, 2, "old moves")
    make(policy(source), {"current/w": b"c2", "old/w": b"o2", "optimizer/m": b"2"})
    assert already(export(slot, input_of(source, "old"))) is None


def test_moving_the_base_model_makes_no_artifact_stale(slot):
    manifest = make(policy(slot, path="/here"))
    assert already(policy(slot, path="/there")) == manifest


def test_moving_a_folder_of_media_changes_no_fingerprint(wan_path: str, videos: local.Options, tmp_path: Path):
    before = asked(config_of(wan_path, videos, (16, 16), 5), tmp_path)
    moved = Path(videos.local_dir).rename(tmp_path / "moved")
    there = videos.model_copy(update={"local_dir": str(moved)})
    assert asked(config_of(wan_path, there, (16, 16), 5), tmp_path).fingerprint == before.fingerprint
    (moved / "metas" / "clip-0.txt").write_text("other", encoding="utf-8")
    assert asked(config_of(wan_path, there, (16, 16), 5), tmp_path).fingerprint != before.fingerprint


def test_a_request_read_from_its_file_equals_the_written_one(wan_path: str, videos: local.Options, tmp_path: Path):
    request = asked(config_of(wan_path, videos, (16, 16), 5), tmp_path)
    again = Request.model_validate_json(json.dumps(json.loads(request.model_dump_json())))
    assert again == request
    assert again.fingerprint == request.fingerprint
