"""What a plan says that a rank holds and an iteration writes, against what there is when an update has stepped."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load as load_tensors
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.storage import shards
from flows.planning import requests
from flows.planning.run import Run
from flows.sizes import costs, memory
from flows.sizes.memory import GRADIENTS, OPTIMIZER, PARTS, TRANSFORMER
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from stages.formats.policies import read_part
from stages.training import trainer
from tests.stages.conftest import make, make_on_ranks
from tests.stages.small_video import LORA, recipe
from tests.stages.training.test_sharded_training import aside, begun

FOLDER = "MEASURED_BYTES_FOLDER"
"""Environment variable: where each rank writes what it held."""


def nbytes(tensors: Iterable[Tensor]) -> int:
    """On this rank."""
    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in here)


def measure() -> None:
    """Have every optimizer step write what the trainer's objects hold: gradients before it, everything else after."""
    move = trainer.Trainer.move

    def measured(self: trainer.Trainer, index: int) -> Any:
        weights = self.weights
        held = {GRADIENTS: nbytes(p.grad for p in weights.parameters.values() if p.grad is not None)}
        row = move(self, index)
        held[TRANSFORMER] = nbytes(self.model.transformer.state_dict().values())
        # One that is another by a second name counts once, by the first.
        copies = {id(weights.here(part)): part for part in reversed(weights.parts[1:])}
        held |= {part: nbytes(weights.here(part).values()) for part in copies.values()}
        # Without counts of steps, a number a tensor.
        held[OPTIMIZER] = sum(nbytes(t for t in state.values() if t.ndim) for state in self.optimizer.state.values())
        Path(os.environ[FOLDER], f"{self.group.rank}.json").write_text(json.dumps(held), encoding="utf-8")
        return row

    setattr(trainer.Trainer, "move", measured)  # noqa: B010


def held_by(rank: int) -> dict[str, int]:
    return json.loads(Path(os.environ[FOLDER], f"{rank}.json").read_text(encoding="utf-8"))


def planned(run: Run, **launch: Any) -> dict[str, int]:
    """What the plan says of the same kinds, for an update."""
    recipe = run.recipe.model_copy(update={"launch": LaunchConfig(**launch)})
    (update,) = memory.stages(recipe, ["update"])
    held = {name: update.rows.get(name) for name in (TRANSFORMER, GRADIENTS, OPTIMIZER, *PARTS)}
    return {name: each.device + each.cpu for name, each in held.items() if each is not None}


def files_of(slot: str, prefix: str) -> list[bytes]:
    artifact = Artifact(input_of(slot))
    return [artifact.read(name) for name in artifact.names(prefix)]


def require_files_as_planned(run: Run, lora: dict[str, Any] | None) -> None:
    """Parts of the policy, tensors of the samples, embeddings."""
    policy = input_of(requests.update(run, 0).slot)
    written = {
        part: nbytes(tensor for tensor in read_part(policy, part).values() if tensor.ndim)
        for part in ("current", *PARTS, OPTIMIZER)
    }
    assert {part: size for part, size in written.items() if size} == costs.policy_parts(run.recipe)
    if lora is None:
        # Tiny adapters are no larger than the headers of their files.
        files = sum(len(data) for part in written for data in files_of(policy.url, f"{part}/"))
        assert files == pytest.approx(sum(costs.policy_parts(run.recipe).values()), rel=0.1)
    tensors = [
        load_tensors(data)
        for shard in files_of(run.slots.iteration(0, "rollout"), "tensors/")
        for name, data in shards.unpack(shard).items()
        if name.endswith(".safetensors")
    ]
    assert len(tensors) == run.recipe.train.train_batch_per_replica
    assert {nbytes(each.values()) for each in tensors} == {costs.sample_bytes(run.recipe)}
    each = costs.embedding_bytes(run.recipe)
    assert each is not None
    ids = [prompt.id for prompt in run.plan.prompts]
    stored = Embeddings([input_of(run.prepared.embed.slot)], ids)
    assert {nbytes(stored[one].values()) for one in ids} == {each}


@pytest.mark.processes
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_memory_of_a_rank_and_the_bytes_of_an_iteration_are_as_planned(
    lora: dict[str, Any] | None,
    wan_path: str,
    prompt_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    run = begun(tmp_path, recipe(wan_path, prompt_dir, lora))
    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "move", trainer.Trainer.move)
        measure()
        make(requests.update(run, 0), tmp_path)
    alone = planned(run)
    assert alone.keys() == {TRANSFORMER, GRADIENTS, OPTIMIZER, "old", "ema", "reference"}
    assert held_by(0) == alone
    require_files_as_planned(run, lora)

    shared = aside(requests.update(run, 0), "shared")
    offload = not lora
    make_on_ranks(shared, tmp_path, 2, dp_shard_size=2, fsdp_offload=offload, before=measure)
    expected = planned(run, processes=2, dp_shard_size=2, fsdp_offload=offload)
    assert [held_by(rank) for rank in range(2)] == [expected] * 2
    # Half of the matrices, which are nearly everything, and of what is made of them if they train.
    assert expected[TRANSFORMER] < 0.7 * alone[TRANSFORMER]
    assert (expected["old"] < 0.7 * alone["old"]) == (lora is None)
