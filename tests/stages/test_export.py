"""The export of a model that is larger than the memory it takes."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.parts import cut
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages import contracts
from stages.artifacts import files
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import ModelRef
from tests import hand_made
from tests.live_tensors import Live
from tests.stages.conftest import make

LAYERS, WIDTH = 24, 64
BLOCK_BYTES = 2**16
PART_FILE_BYTES = 2**22
"""Most bytes of a file of the policy, whose files are cut otherwise than the base's."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of a transformer of many small layers, in bfloat16 and several files."""
    folder = tiny_pipelines.save("wan", tmp_path_factory.mktemp("export") / "wan")
    settings: dict[str, Any] = directories.read_json(folder, "transformer", "config.json")
    settings |= {"num_layers": LAYERS, "num_attention_heads": 2, "attention_head_dim": WIDTH // 2, "ffn_dim": 4 * WIDTH}
    (folder / "transformer" / directories.WEIGHTS).unlink()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = WanTransformer3DModel.from_config(settings)
    assert isinstance(transformer, WanTransformer3DModel)
    transformer.bfloat16().save_pretrained(folder / "transformer", max_shard_size="1MB")
    return folder


@pytest.fixture(scope="module")
def tensors(base: Path) -> dict[str, torch.Tensor]:
    """All of the policy's, float32, in no type that the base has exactly."""
    transformer = WanTransformer3DModel.from_pretrained(base / "transformer", torch_dtype=torch.float32)
    return {name: tensor + 1 / 3 for name, tensor in transformer.state_dict().items()}


def exported(base: Path, tensors: dict[str, torch.Tensor], folder: Path) -> Request:
    """What is asked of a policy of these tensors."""
    names = cut({name: tensor.nbytes for name, tensor in tensors.items()}, PART_FILE_BYTES)
    parts = {f"ema/{n:05d}.safetensors": to_bytes({k: tensors[k] for k in file}) for n, file in enumerate(names)}
    hand_made.make(hand_made.report(str(folder / "policy")), parts)
    model = ModelRef(path=str(base), adapter="wan", digest="")
    config = contracts.Export(model=model, lora=None)
    inputs = {"policy": (input_of(str(folder / "policy"), "ema"),)}
    return Request(stage="export", slot=str(folder / "export"), seed=0, config=config, inputs=inputs)


def peak_bytes(request: Request, folder: Path) -> tuple[Manifest, int]:
    """Make the stage. Return its manifest and the most bytes of Python plus the most bytes of torch meanwhile."""
    with Live() as live:
        tracemalloc.start()
        try:
            manifest = make(request, folder)
            return manifest, tracemalloc.get_traced_memory()[1] + live.peak
        finally:
            tracemalloc.stop()


def test_an_export_takes_a_small_part_of_the_models_size_and_reloads_equal(
    base: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = exported(base, tensors, tmp_path / "whole")
    unhurried = make(whole, tmp_path)
    monkeypatch.setattr(files, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(export, "_COPIED_BYTES", BLOCK_BYTES)
    manifest, peak = peak_bytes(exported(base, tensors, tmp_path / "measured"), tmp_path)
    # Whatever is read and written at once.
    assert manifest.content == unhurried.content
    model = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(tensor.nbytes for tensor in tensors.values())
    # Blocks that are read ahead, four and the one in use, and as they are passed on; a tensor as bytes, as numbers and
    # as the base has it; besides, tables of digests and what the runner itself takes.
    assert peak < 8 * BLOCK_BYTES + 4 * largest + 2**18
    assert peak < 0.2 * model

    Artifact(input_of(whole.slot)).bring_to(tmp_path / "out")
    out = tmp_path / "out/pipeline"
    assert directories.pipeline_files(out) == directories.pipeline_files(base)
    assert len(directories.transformer_files(out)) > 3
    loaded = DiffusionPipeline.from_pretrained(out, local_files_only=True, dtype=torch.bfloat16)
    state = loaded.transformer.state_dict()
    assert state.keys() == tensors.keys()
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    assert all(torch.equal(state[name].to(torch.bfloat16), tensor) for name, tensor in stored.items())


def test_an_export_of_a_damaged_policy_is_an_error_and_commits_nothing(
    base: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
):
    request = exported(base, tensors, tmp_path)
    policy = Artifact(input_of(str(tmp_path / "policy")))
    path = Path(policy.url, policy.manifest.files["ema/00000.safetensors"].path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="is not what was committed"):
        make(request, tmp_path)
    assert not list((tmp_path / "export").glob("manifest.*"))
