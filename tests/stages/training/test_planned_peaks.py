"""Memory of the tensors that a rank holds while a stage computes, against the plan."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from cosmos_rl_core.footprint.live import LiveBytes
from cosmos_rl_core.models.wan.model import Wan
from flows.planning import requests
from flows.sizes import memory
from flows.sizes.memory import ACTIVATIONS, GRADIENTS, VAE
from stages.artifacts.slots import input_of
from stages.training import trainer
from tests.stages.conftest import make_on_ranks
from tests.stages.small_video import LORA, recipe
from tests.stages.training.test_sharded_training import aside, begun

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FOLDER = "MEASURED_PEAKS_FOLDER"
"""Environment variable: where a rank writes how much it held."""
WITHIN = 0.15


def measured(kind: type, method: str, own: Callable[[Any], list[Tensor]]) -> None:
    """Have every call of a method write the most bytes of tensors that it made and held in any call but the first."""
    original: Callable[..., Any] = getattr(kind, method)
    peaks: list[int] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with LiveBytes(own(self)) as live:
            found = original(self, *args, **kwargs)
        peaks.append(live.peak)
        file = Path(os.environ[FOLDER], f"{method}.json")
        file.write_text(json.dumps(max(peaks[1:], default=0)), encoding="utf-8")
        return found

    setattr(kind, method, call)


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def measure_steps() -> None:
    measured(trainer.Trainer, "step", lambda self: tensors_of(self.model.transformer))


def measure_samples() -> None:
    measured(Wan, "decode", lambda self: tensors_of(self.pipeline.vae))
    measured(Wan, "velocity", lambda self: tensors_of(self.transformer))


def held(folder: Path, method: str) -> int:
    return json.loads((folder / f"{method}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_stage_takes_the_memory_that_was_planned(
    lora: dict[str, Any] | None,
    wan_path: str,
    prompt_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    values = recipe(wan_path, prompt_dir, lora)
    values["policy"]["diffusers"] |= {"inference_size": [64, 64]}
    values["policy"]["diffusers"]["sample"]["guidance_scale"] = 1.0
    values["train"] |= {"train_batch_per_replica": 12}
    values["train"]["train_policy"] |= {"mini_batch": 6, "batch_size_per_optimize": 6}
    values["rollout"] |= {"n_generation": 6, "n_generation_mini_batch": 6, "samples_per_shard": 6}
    run = begun(tmp_path, values)

    def planned(stage: str, **policy: Any) -> memory.Rows:
        asked = run.recipe.model_copy(update={"policy": run.recipe.policy.model_copy(update=policy)})
        (found,) = memory.stages(asked, [stage], activations=True)
        return found.rows

    found: dict[str, tuple[int, int]] = {}
    again = aside(requests.rollout(run, 0), "again")
    make_on_ranks(again, tmp_path, 1, before=measure_samples)
    rows = planned("rollout")
    found["decode"] = held(tmp_path, "decode"), rows[VAE].device
    found["velocity"] = held(tmp_path, "velocity"), rows[ACTIVATIONS].device
    for checkpointing in (False, True):
        update = aside(requests.update(run, 0), f"{checkpointing}", gradient_checkpointing=checkpointing)
        make_on_ranks(update, tmp_path, 1, before=measure_steps)
        rows = planned("update", model_gradient_checkpointing=checkpointing)
        # Gradients are made anew in each step; the micro-batch was made before it, by another thread.
        expected = rows[ACTIVATIONS].device + rows[GRADIENTS].device
        found[f"update {checkpointing}"] = held(tmp_path, "step"), expected
    # The same bits, recomputed or not.
    kept, recomputed = (aside(requests.update(run, 0), name).slot for name in ("False", "True"))
    assert input_of(kept).content == input_of(recomputed).content
    assert found["update True"][1] < found["update False"][1]
    for most, expected in found.values():
        assert most == pytest.approx(expected, rel=WITHIN), found
