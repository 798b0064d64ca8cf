"""Shards of an artifact on a real S3 server, streamed by webdataset."""

import io
import secrets
from typing import Any

import pytest
from PIL import Image

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import media, shards
from stages.formats.web import web_dataset
from tests.hand_made import make, report
from tests.seaweed import BUCKET


@pytest.fixture
def slot(seaweed) -> str:
    """A slot of its own."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}/slot"


def test_webdataset_streams_the_shards_from_the_bucket(slot):
    pixels = [Image.effect_noise((16, 8), 50).convert("RGB") for _ in range(4)]
    pictures = [io.BytesIO() for _ in pixels]
    for picture, buffer in zip(pixels, pictures, strict=True):
        picture.save(buffer, media.IMAGE)
    samples = [{f"{n}.{media.IMAGE}": p.getvalue(), f"{n}.json": b'{"n": %d}' % n} for n, p in enumerate(pictures)]
    make(
        report(slot),
        {
            "media/00000.tar": shards.pack(samples[0] | samples[1]),
            "media/00001.tar": shards.pack(samples[2] | samples[3]),
            "tensors/00000.tar": shards.pack({"0.safetensors": b""}),
            "index/00000.json": b"[]",
        },
    )
    dataset: Any = web_dataset(slot, "media").decode("rgb8")
    found = list(dataset)
    assert [(sample["__key__"], sample["json"]["n"]) for sample in found] == [(str(n), n) for n in range(4)]
    for sample, picture in zip(found, pixels, strict=True):
        assert (Image.fromarray(sample[media.IMAGE]).tobytes(), sample["__url__"][:5]) == (picture.tobytes(), "s3://")


def test_a_slot_without_shards_is_no_web_dataset(slot):
    with pytest.raises(ArtifactError, match="has no artifact with tar shards media/"):
        web_dataset(slot, "media")
    make(report(slot), {"index.html": b""})
    with pytest.raises(ArtifactError, match="has no artifact with tar shards media/"):
        web_dataset(slot, "media")
