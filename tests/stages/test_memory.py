"""What a plan says that a rank holds and an iteration writes, against what there is when an update has stepped."""

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load as load_tensors
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl_core import shards
from cosmos_rl_core.config.launch import LaunchConfig
from flows import costs, memory
from flows.memory import COPIES, GRADIENTS, OPTIMIZER, TRANSFORMER
from flows.requests import Run
from stages import trainer
from stages.artifacts import Artifact, input_of
from tests.stages.conftest import make, make_on_ranks
from tests.stages.test_sharding import aside, begun
from tests.stages.test_wan import LORA, recipe

WITHIN = 0.1
FOLDER = "MEASURED_BYTES_FOLDER"
"""Environment variable: where each rank writes what it held."""


def nbytes(tensors: Iterable[Tensor]) -> int:
    """On this rank."""
    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in here)


def measure() -> None:
    """Have every optimizer step write what the trainer's objects hold: gradients before it, everything else after."""
    move = trainer.Trainer._move

    def measured(self: trainer.Trainer, index: int) -> Any:
        weights = self.weights
        held = {GRADIENTS: nbytes(p.grad for p in weights.parameters.values() if p.grad is not None)}
        row = move(self, index)
        held[TRANSFORMER] = nbytes(self.model.transformer.state_dict().values())
        held[COPIES] = sum(nbytes(weights.here(part).values()) for part in weights.parts[1:])
        held[OPTIMIZER] = sum(nbytes(state.values()) for state in self.optimizer.state.values())
        Path(os.environ[FOLDER], f"{self.group.rank}.json").write_text(json.dumps(held), encoding="utf-8")
        return row

    setattr(trainer.Trainer, "_move", measured)  # noqa: B010


def held_by(rank: int) -> dict[str, int]:
    return json.loads(Path(os.environ[FOLDER], f"{rank}.json").read_text(encoding="utf-8"))


def planned(run: Run, **launch: Any) -> dict[str, int]:
    """What the plan says of the same kinds, for an update."""
    recipe = run.recipe.model_copy(update={"launch": LaunchConfig(**launch)})
    (update,) = (stage for stage in memory.stages(recipe) if stage.stage == "update")
    held = {name: update.rows[name] for name in (TRANSFORMER, COPIES, GRADIENTS, OPTIMIZER)}
    return {name: each.device + each.cpu for name, each in held.items() if each is not None}


def files_of(slot: str, prefix: str) -> list[bytes]:
    artifact = Artifact(input_of(slot))
    return [artifact.read(name) for name in artifact.names(prefix)]


def require_files_as_planned(run: Run) -> None:
    """Parts of the policy, tensors of the samples, embeddings."""
    parts = costs.policy_files(run.recipe)
    written = {part: sum(map(len, files_of(run.update(0).slot, f"{part}/"))) for part in parts}
    assert written == pytest.approx(parts, rel=WITHIN)
    tensors = [
        load_tensors(data)
        for shard in files_of(run.iteration(0, "rollout"), "samples/")
        for name, data in shards.unpack(shard).items()
        if name.endswith(".safetensors")
    ]
    assert len(tensors) == run.recipe.train.train_batch_per_replica
    assert {nbytes(each.values()) for each in tensors} == {costs.sample_bytes(run.recipe)}
    embeddings = [shards.unpack(shard) for shard in files_of(run.embed_slot, "embeddings/")]
    each = costs.embedding_bytes(run.recipe)
    assert each is not None
    for data in (data for shard in embeddings for data in shard.values()):
        assert len(data) == pytest.approx(each, rel=WITHIN)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("model", ["wan", "sd3"])
def test_a_rank_holds_and_an_iteration_writes_what_was_planned(
    model: str,
    lora: dict[str, Any] | None,
    wan_path: str,
    prompt_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    values = recipe(wan_path, prompt_dir, lora)
    if model == "sd3":
        values["policy"]["model_name_or_path"] = "package:tiny-sd3"
        values["policy"]["diffusers"] |= {"inference_size": [32, 64], "train_frames": 1}
    run = begun(tmp_path, values)
    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "_move", trainer.Trainer._move)
        measure()
        make(run.update(0), tmp_path)
    assert held_by(0) == pytest.approx(planned(run), rel=WITHIN)
    require_files_as_planned(run)
    if model == "sd3":
        return

    shared = aside(run.update(0), "shared")
    offload = () if lora else ("--fsdp-offload",)
    make_on_ranks(shared, tmp_path, 2, "--dp-shard-size", "2", *offload, before=measure)
    expected = planned(run, processes=2, dp_shard_size=2, fsdp_offload=bool(offload))
    for rank in range(2):
        assert held_by(rank) == pytest.approx(expected, rel=WITHIN)
    # Half of the matrices, which are nearly everything, and of what is made of them if they train.
    assert expected[TRANSFORMER] < 0.7 * planned(run)[TRANSFORMER]
    assert (expected[COPIES] < 0.7 * planned(run)[COPIES]) == (lora is None)
