"""Latents of Wan: decoded each alone, to the bits of the stock VAE, cut to uint8 as in cosmos-rl."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.reward_service import decoder
from cosmos_rl_core.reward_service.config import DecodeArgs
from cosmos_rl_core.reward_service.service import DECODED_AHEAD
from cosmos_rl_core.tiny.autoencoders import wan_vae
from tests import running_service as running
from tests.upstream_client import UpstreamClient, frame

DTYPES = {"float16": torch.float16, "float32": torch.float32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """VAEs with random weights; one lies in the folder of a pipeline."""
    place = tmp_path_factory.mktemp("vaes")
    found = {16: place / "wan" / "vae", 48: place / "wan2.2"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for channels, folder in found.items():
            wan_vae(channels).save_pretrained(folder)
    return found


def settings_of(folders: dict[int, Path]) -> dict[str, str]:
    return {"model_path": str(folders[16].parent), "wan2pt2_model_path": str(folders[48]), "dtype": "float32"}


@pytest.fixture(scope="module")
def decoding(folders: dict[int, Path]) -> decoder.Decoding:
    found = decoder.folders_of(DecodeArgs(**settings_of(folders)))  # pyright: ignore[reportArgumentType]
    return decoder.Decoding({"decoders": {c: str(path) for c, path in found.items()}, "dtype": "float32"})


def latents(channels: int = 16, count: int = 2) -> torch.Tensor:
    return torch.randn(count, channels, 2, 3, 4, generator=torch.Generator().manual_seed(1))


def stock(folder: Path, sample: torch.Tensor) -> np.ndarray:
    """The VAE's own decode of one sample of bfloat16 latents, as a pipeline of diffusers calls it."""
    vae = AutoencoderKLWan.from_pretrained(folder)
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        x = vae.decode(sample[None].float() / (1.0 / std) + mean, return_dict=False)[0][0]
    return np.trunc(((1 + x) / 2).clamp(0, 1).numpy() * np.float32(255)).astype(np.uint8)


def decode(decoding: decoder.Decoding, folder: Path, array: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    body = frame(["a"] * len(array), {"x": 1.0}, array, media_type="latent")
    (folder / "frame").write_bytes(body)
    (answer,) = decoding.answers([{"frame": str(folder / "frame"), "pixels": str(folder / "frame.npy")}])
    return np.load(folder / "frame.npy"), answer


@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_pixels_equal_the_stock_vaes(
    decoding: decoder.Decoding, folders: dict[int, Path], tmp_path: Path, channels: int, dtype: str
):
    sent = latents(channels).to(DTYPES[dtype])
    pixels, answer = decode(decoding, tmp_path, sent.numpy())
    expected = [stock(folders[channels], sample.to(torch.bfloat16)) for sample in sent]
    assert np.array_equal(pixels, np.stack(expected))
    assert pixels.shape == (2, 3, 5, 24, 32)
    assert pixels.std() > 1
    told = sent.to(torch.bfloat16)
    assert answer["input"] == {
        "shape": list(sent.shape),
        "dtype": "torch.bfloat16",
        "min": f"{told.min().item():.3f}",
        "max": f"{told.max().item():.3f}",
    }


def test_bytes_are_the_bits_of_bfloat16(decoding: decoder.Decoding, tmp_path: Path):
    sent = latents().to(torch.bfloat16)
    as_bytes, answer = decode(decoding, tmp_path, sent.view(torch.uint8).numpy())
    as_floats, _ = decode(decoding, tmp_path, sent.float().numpy())
    assert np.array_equal(as_bytes, as_floats)
    assert answer["input"]["shape"] == [2, 16, 2, 3, 4]


def test_a_sample_has_the_same_pixels_alone_and_among_others(decoding: decoder.Decoding, tmp_path: Path):
    sent = latents(count=3).numpy()
    together, _ = decode(decoding, tmp_path, sent)
    for i in range(3):
        assert np.array_equal(decode(decoding, tmp_path, sent[i : i + 1])[0][0], together[i])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_become_no_pixels(decoding: decoder.Decoding, tmp_path: Path, wrong: float):
    sent = latents()
    sent[1, 0, 0, 0, 0] = wrong
    with pytest.raises(ValueError, match="the latents of sample 1 are not all finite"):
        decode(decoding, tmp_path, sent.numpy())


def test_the_version_names_the_bytes_of_the_weights(folders: dict[int, Path], tmp_path: Path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wan_vae(16).save_pretrained(tmp_path / "other")
    versions = [decoder.version({"16": folder}, "float32") for folder in (folders[16], tmp_path / "other")]
    assert versions[0] != versions[1]
    assert f"torch {torch.__version__}" in versions[0]
    assert decoder.version({"16": folders[16]}, "float16") != versions[0]


def test_folders_that_hold_no_such_vae_are_named(folders: dict[int, Path], tmp_path: Path):
    args = DecodeArgs(model_path=str(folders[48]), wan2pt2_model_path="https://somewhere/Wan2.1_VAE.pth")
    with pytest.raises(ConfigError) as refused:
        decoder.folders_of(args)
    assert f"decode_args.model_path = {str(folders[48])!r}: the VAE has 48 channels; expected 16" in str(refused.value)
    assert "Wan2.1_VAE.pth': there is no folder of diffusers" in str(refused.value)


@pytest.fixture(scope="module")
def served(folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[UpstreamClient, Path]]:
    """A service that decodes 16 channels, and its spool."""
    folder = tmp_path_factory.mktemp("served")
    values = running.settings(folder) | {"decode_args": settings_of(folders) | {"wan2pt2_model_path": ""}}
    with running.in_thread(running.write(folder, values)) as client:
        yield client, folder / "spool"


@pytest.mark.processes
def test_latents_are_scored_as_pixels_and_need_a_decoder(folders: dict[int, Path], served: tuple[UpstreamClient, Path]):
    client, _ = served
    sent = latents().to(torch.float16)
    infos = [{"video_fps": 16.0}] * 2
    # Without media_type, as cosmos-rl's client of world models sends them.
    told = client.scores(frame(["a", "b"], {"probe": 1.0}, sent.numpy(), video_infos=infos), "probe")
    media = client.get("/api/reward/info")[1]["scorers"]["probe"]["media"]
    refused = client.post("enqueue", frame(["a"], {"probe": 1.0}, latents(48, 1).numpy()))
    expected = [stock(folders[16], sample.to(torch.bfloat16)) for sample in sent]
    assert told["scores"]["probe_reward"] == [float(pixels.mean()) for pixels in expected]
    assert told["scores"]["shape"] == ["(5, 24, 32, 3)"] * 2
    assert (told["input_info"]["dtype"], told["input_info"]["video_infos"]) == ("torch.bfloat16", infos)
    assert float(told["decoded_duration"]) > 0
    assert media == ["image", "video", "latent"]
    assert refused == (422, {"detail": "latents of 48 channels; this service decodes 16"})


@pytest.mark.processes
def test_pixels_of_waiting_requests_never_fill_the_disk(served: tuple[UpstreamClient, Path]):
    client, spool = served
    body = frame(["sleep 0.15"], {"probe": 1.0}, latents(count=1).numpy(), media_type="latent")
    uuids, most = [client.enqueue(body) for _ in range(8)], 0
    while any(client.form("pull", uuid=uuid, type="probe")[0] == 400 for uuid in uuids):
        most = max(most, len([*(spool / "decoded").iterdir()]))
    assert 1 <= most <= 1 + DECODED_AHEAD
