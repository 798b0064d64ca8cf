"""Latents of media sets through the real stage: images by SD3's VAE, videos by Wan's, on one rank and on two."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import local, rendered_text
from cosmos_rl_core.datasets._base import Media
from cosmos_rl_core.errors import ArtifactError, ConfigError, DatasetError
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage import media as media_files
from cosmos_rl_core.storage import shards
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Encode, MediaShape, ModelRef
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.latents import Latents
from stages.formats.tables import read_table
from stages.training.loading import load_media, load_model
from tests.stages.conftest import make

CPU = torch.device("cpu")
ITEMS = 5
IN_ORDER = [0, 0, 1, 1, 2]
"""The shard of each item, two in one."""


class Stopped(Exception):  # noqa: N818
    """What ends an attempt."""


class StopsAt(Outcome):
    """Ends the attempt when so many items are done."""

    def __init__(self, directory: Path, items: int) -> None:
        super().__init__(directory, 0)
        self.items = items

    def progress(self, phase: str, step: int, total: int) -> None:
        if phase == "making latents" and step == self.items:
            raise Stopped
        super().progress(phase, step, total)


class Records(Outcome):
    """Remembers the calls that it got."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 0)
        self.steps: list[tuple[int, int]] = []

    def progress(self, phase: str, step: int, total: int) -> None:
        self.steps += [(step, total)] if phase == "making latents" else []


@pytest.fixture
def videos(tmp_path: Path) -> local.Options:
    """Clips of noise, one frame longer than what is read, the first and the last of one caption."""
    for name in ("videos", "metas"):
        (tmp_path / "clips" / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index in range(ITEMS):
        _, data = media_files.encode(rng.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8))
        (tmp_path / "clips" / "videos" / f"clip-{index}.mkv").write_bytes(data)
        caption = f"clip {index % (ITEMS - 1)}"
        (tmp_path / "clips" / "metas" / f"clip-{index}.txt").write_text(caption, encoding="utf-8")
    return local.Options(local_dir=str(tmp_path / "clips"), size=(16, 16), frames=5)


@pytest.fixture(params=["images", "videos"])
def config(request: pytest.FixtureRequest) -> Encode:
    """Generated images for the tiny SD3, a folder of clips for the tiny Wan."""
    if request.param == "images":
        return config_of("package:tiny-sd3", rendered_text.Options(num_items=ITEMS), (32, 64), 1)
    return config_of(request.getfixturevalue("wan_path"), request.getfixturevalue("videos"), (16, 16), 5)


def config_of(model: str, dataset: DatasetOptions, size: tuple[int, int], frames: int, **changed: Any) -> Encode:
    path = directories.resolve_path(model)
    digest = local.digest(dataset) if isinstance(dataset, local.Options) else ""
    return Encode(
        model=ModelRef(
            path=path,
            adapter=directories.adapter_name(path),
            digest=directories.pipeline_digest(path),
        ),
        dataset=dataset,
        dataset_digest=changed.get("dataset_digest", digest),
        media=MediaShape(size=size, frames=frames),
        items_per_shard=2,
    )


def asked(config: Encode, tmp_path: Path, name: str = "slot") -> Request:
    return Request(stage="encode", slot=str(tmp_path / name), seed=0, config=config)


def media_of(config: Encode) -> Media:
    assert config.dataset is not None
    return load_media(config.dataset, config.dataset_digest, Group(60.0))


def run_with(outcome: Outcome, request: Request) -> None:
    execute(request, Execution(), outcome)


def test_latents_equal_the_models_latents_of_each_item(config: Encode, tmp_path: Path):
    outcome = Records(tmp_path / "outcome")
    run_with(outcome, asked(config, tmp_path))
    assert outcome.steps[-1] == (ITEMS, ITEMS)
    assert [step for step, _ in outcome.steps] == sorted(step for step, _ in outcome.steps)
    source, media = input_of(str(tmp_path / "slot")), media_of(config)

    found = Latents([source])
    index = found.index
    assert index.columns.tolist() == ["item_id", "prompt_id", "latents_id", "source", "medium"]
    assert index["item_id"].tolist() == list(media.item_ids)
    assert index["prompt_id"].tolist() == [media.item(i)[1].id for i in range(ITEMS)]
    stored = read_table(Artifact(source), "index.parquet")
    assert stored["latents_id"].tolist() == index["latents_id"].tolist() == list(media.item_ids)
    assert stored["shard"].tolist() == IN_ORDER

    model = load_model(config.model, ("vae",), CPU)
    for i, item_id in enumerate(media.item_ids):
        expected = model.encode_media(torch.tensor(media.item(i)[0], device=CPU)[None])[0]
        assert found[item_id].shape == model.latent_shape(config.media.size, config.media.frames)
        assert found[item_id].dtype == torch.float32
        assert torch.equal(found[item_id], expected)
    assert len({tuple(latents.flatten().tolist()) for latents in map(found.__getitem__, media.item_ids)}) == ITEMS


def test_the_next_attempt_adopts_the_shards_of_an_ended_one(config: Encode, tmp_path: Path):
    whole = make(asked(config, tmp_path, "whole"), tmp_path)
    with pytest.raises(Stopped):
        run_with(StopsAt(tmp_path / "outcome", items=3), asked(config, tmp_path))
    retried = make(asked(config, tmp_path), tmp_path)
    assert retried.content == whole.content
    # The second shard was half made: it is made again, whole.
    own = f"attempts/{retried.attempt}/"
    assert [name for name, file in retried.files.items() if not file.path.startswith(own)] == ["latents/00000.tar"]


def test_reading_opens_only_the_needed_shards(config: Encode, tmp_path: Path):
    manifest = make(asked(config, tmp_path), tmp_path)
    source, ids = input_of(str(tmp_path / "slot")), media_of(config).item_ids
    for number in (0, 2):
        Path(source.url, manifest.files[f"latents/0000{number}.tar"].path).unlink()
    latents = Latents([source])
    assert torch.equal(latents[ids[3]], latents[ids[3]])
    assert not torch.equal(latents[ids[3]], latents[ids[2]])
    with pytest.raises(ArtifactError, match="is missing"):
        latents[ids[0]]


def test_shards_are_named_by_item(config: Encode, tmp_path: Path):
    make(asked(config, tmp_path), tmp_path)
    artifact, ids = Artifact(input_of(str(tmp_path / "slot"))), media_of(config).item_ids
    members = [list(shards.unpack(artifact.read(name))) for name in artifact.names("latents/")]
    assert members == [[f"{item_id}.safetensors" for item_id in ids[n : n + 2]] for n in (0, 2, 4)]


@pytest.mark.parametrize("file", ["metas/clip-1.txt", "videos/clip-1.mkv"])
def test_a_folder_that_changed_since_the_plan_is_an_error(
    file: str, wan_path: str, videos: local.Options, tmp_path: Path
):
    config = config_of(wan_path, videos, (16, 16), 5)
    with Path(videos.local_dir, file).open("ab") as stream:
        stream.write(b" ")
    with pytest.raises(ArtifactError, match="differ from the planned ones"):
        make(asked(config, tmp_path), tmp_path)
    assert not (tmp_path / "slot" / "shards").exists()


def test_a_generated_set_that_was_planned_with_files_is_an_error(tmp_path: Path):
    config = config_of("package:tiny-sd3", rendered_text.Options(num_items=1), (32, 64), 1, dataset_digest="0" * 64)
    with pytest.raises(ArtifactError, match="digest none, planned 000"):
        make(asked(config, tmp_path), tmp_path)


def test_media_of_another_size_are_refused(tmp_path: Path):
    config = config_of("package:tiny-sd3", rendered_text.Options(num_items=1), (32, 32), 1)
    with pytest.raises(ConfigError, match=r"shape \(1, 32, 64, 3\), expected \(1, 32, 32, 3\)"):
        make(asked(config, tmp_path), tmp_path)


def test_all_media_that_cannot_be_used_are_named_before_anything_is_encoded(
    wan_path: str, videos: local.Options, tmp_path: Path
):
    folder = Path(videos.local_dir, "videos")
    whole = (folder / "clip-1.mkv").read_bytes()
    (folder / "clip-1.mkv").write_bytes(whole[:300] + bytes(len(whole) - 300))
    (folder / "clip-3.mkv").write_bytes(media_files.encode(np.zeros((4, 16, 16, 3), np.uint8))[1])
    (folder / "clip-4.mkv").write_bytes(b"")
    # Nothing but the media is read: there are no weights at this path.
    config = config_of(wan_path, videos, (16, 16), 5)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "nowhere")})})
    with pytest.raises(DatasetError) as caught:
        make(asked(config, tmp_path), tmp_path)
    assert caught.value.exit_code == 65
    first, *found = str(caught.value).split("\n    ")
    assert first.startswith("3 media of the dataset 'local' cannot be used; mend or remove")
    assert [line.partition(": ")[0] for line in found] == ["clip-1.mkv", "clip-3.mkv", "clip-4.mkv"]
    assert found[1] == "clip-3.mkv: 4 frames, expected at least 5"
    assert not (tmp_path / "slot" / "shards").exists()


def test_a_frame_that_is_found_damaged_when_it_is_decoded_is_an_error(
    wan_path: str, videos: local.Options, tmp_path: Path
):
    file = Path(videos.local_dir, "videos", "clip-2.mkv").with_suffix(".mp4")
    file.with_suffix(".mkv").unlink()
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        for frame in np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(file)) as container:
        place = [packet.pos for packet in container.demux(video=0)][3]
    assert place
    with file.open("r+b") as damaged:
        damaged.seek(place)
        damaged.write(b"\xff" * 8)
    with pytest.raises(
        DatasetError, match=r"a medium of the dataset 'local' cannot be used; [^\n]+\n    clip-2\.mp4: "
    ):
        make(asked(config_of(wan_path, videos, (16, 16), 5), tmp_path), tmp_path)
