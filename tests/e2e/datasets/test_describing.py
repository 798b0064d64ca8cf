"""A dataset captioned by a model on two ranks of torchrun, in real processes that are all killed."""

import json
from functools import partial
from pathlib import Path

import pytest

from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.e2e.datasets.test_preparations import prepare, write_images
from tests.e2e.flow_process import Flows, eventually

MEDIA, SHARDS = 100, 13
TIMEOUT_S = 120.0


def dataset_of(folder: Path, model: str, processes: int) -> str:
    file = folder / f"on-{processes}.toml"
    lines = [
        *('name = "clips"', "max_left_out = 1.0", "[launch]", f"processes = {processes}"),
        *("[sources.mine]", 'name = "local"', f"local_dir = {json.dumps(str(folder / 'clips'))}"),
        *("[caption]", 'by = "vlm"', f"model = {json.dumps(model)}", 'instruction = "?"', "max_new_tokens = 40"),
        'param_dtype = "float32"',
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def captions_of(store: str) -> Manifest:
    head = snapshots.newest(store, "clips")
    assert head is not None
    return Artifact(head.captions[0]).manifest


@pytest.mark.slow
def test_captions_on_two_ranks_that_are_killed_equal_one_rank(tmp_path: Path):
    write_images(tmp_path / "clips", MEDIA)
    model = tiny.save_talker(tmp_path / "model", QWEN3)
    flows = Flows(tmp_path / "flows", {})
    try:
        one = tmp_path / "one"
        said = prepare(flows, dataset_of(tmp_path, model, 1), str(one)).finish()
        assert f"clips: snapshot 1: {MEDIA} new, 0 removed" in said
        two = dataset_of(tmp_path, model, 2)
        killed = prepare(flows, two)
        answered = partial(Path(flows.store).rglob, "records/answers/*.json")
        # Where it has ended before it is killed, the rest must hold too.
        assert eventually(lambda: any(answered()) or killed.process.poll() is not None, TIMEOUT_S)
        flows.kill_all()
        killed.process.wait()
        assert flows.nothing_is_left()
        assert "clips: snapshot 1" in prepare(flows, two).finish()
    finally:
        flows.kill_all()
    expected, found = captions_of(str(one)), captions_of(flows.store)
    assert (found.stage, found.content) == ("describe", expected.content)
    assert (expected.numerics["world_size"], found.numerics["world_size"]) == (1, 2)
    assert sum("answers" in name for name in found.files) == SHARDS
