"""Preparations of a dataset in real processes: all of them killed, two at once, and with a store that dies."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.storage import store
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.formats.parts import Parts
from tests.caption_server import Asked, CaptionServer, Reply, serving, size_of_pictures
from tests.e2e.flow_process import Flows, Started
from tests.seaweed import BUCKET, SeaweedFS

SHARD = 64
"""Media in a shard of captions."""


def write_images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")


@pytest.fixture
def flows(tmp_path: Path) -> Iterator[Flows]:
    flows = Flows(tmp_path / "flows", {})
    yield flows
    flows.kill_all()


def dataset_of(tmp_path: Path, local_dir: str, server: CaptionServer) -> str:
    """The file of a dataset that a service captions."""
    file = tmp_path / "clips.toml"
    caption = {"by": "endpoint", "url": server.url, "model": "vlm", "instruction": "?"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in caption.items()]
    source = f'name = "clips"\n[sources.mine]\nname = "local"\nlocal_dir = "{local_dir}"\n[caption]\nconcurrency = 1\n'
    file.write_text("\n".join([source, *lines]), encoding="utf-8")
    return str(file)


def prepare(flows: Flows, dataset: str, url: str = "") -> Started:
    return flows.start_command("tests.e2e.prepare_without_prefect", dataset, url or flows.store)


def captions(url: str) -> list[str]:
    """Captions of the newest snapshot."""
    head = snapshots.newest(url, "clips")
    assert head is not None
    return list(
        Parts([Artifact(part) for part in head.parts], [Artifact(one) for one in head.captions]).items["caption"]
    )


def test_a_preparation_whose_processes_are_all_killed_goes_on(flows: Flows, tmp_path: Path):
    write_images(tmp_path / "clips", SHARD + 3)
    with serving() as server:

        def first_shard_only(asked: Asked) -> Reply:
            return size_of_pictures(asked) if len(server.asked) <= SHARD else Reply(body={}, hangs=True)

        server.caption = first_shard_only
        dataset = dataset_of(tmp_path, str(tmp_path / "clips"), server)
        killed = prepare(flows, dataset)
        killed.wait_until(lambda: len(server.asked) > SHARD)
        flows.kill_all()
        killed.process.wait()
        assert flows.nothing_is_left()
        assert snapshots.newest(flows.store, "clips") is None
        server.caption = size_of_pictures
        said = prepare(flows, dataset).finish()
        assert "index                        kept" in said
        assert f"clips: snapshot 1: {SHARD + 3} new, 0 removed, 0 left out, {SHARD + 3} captioned" in said
        # The request that hung is asked again, no other.
        assert len(server.asked) == SHARD + 1 + 3
    assert captions(flows.store) == ["1 of 8 x 8"] * (SHARD + 3)
    assert flows.nothing_is_left()


def test_two_at_once_write_one_snapshot(flows: Flows, tmp_path: Path):
    write_images(tmp_path / "clips", 3)
    with serving() as server:
        dataset = dataset_of(tmp_path, str(tmp_path / "clips"), server)
        both = [prepare(flows, dataset) for _ in range(2)]
        said = [one.finish() for one in both]
    assert any("clips: snapshot 1: 3 new" in words for words in said)
    assert all("clips: snapshot 1" in words for words in said)
    assert snapshots.Snapshot.read(flows.store, "clips", 2) is None
    assert captions(flows.store) == ["1 of 8 x 8"] * 3
    assert flows.nothing_is_left()


def test_a_store_that_is_killed_and_comes_back_loses_nothing(
    tmp_path: Path, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch
):
    write_images(tmp_path / "clips", 5)
    root = f"s3://{BUCKET}/{tmp_path.name}"
    for file in (tmp_path / "clips").iterdir():
        store.write(f"{root}/clips/{file.name}", file.read_bytes())
    flows, died = Flows(tmp_path / "flows", {}), threading.Event()
    with serving() as server:

        def die_at_the_second(asked: Asked) -> Reply:
            if len(server.asked) == 2 and not died.is_set():
                died.set()
                seaweed.kill()
                seaweed.start()
            return size_of_pictures(asked)

        server.caption = die_at_the_second
        try:
            assert os.environ["PROD_S3_CHECKPOINT_ACCESS_KEY_ID"]
            said = prepare(flows, dataset_of(tmp_path, f"{root}/clips", server), root).finish()
        finally:
            flows.kill_all()
            seaweed.make_bucket()
        assert died.is_set()
        assert "clips: snapshot 1: 5 new, 0 removed, 0 left out, 5 captioned" in said
    assert captions(root) == ["1 of 8 x 8"] * 5
