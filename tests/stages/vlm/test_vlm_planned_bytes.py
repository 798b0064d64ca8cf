"""What the plan of a VLM says that a rank holds in training, against what there is at an optimizer step."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.vlm.recipe import VlmRecipe, checked
from cosmos_rl_core.footprint.live import LiveBytes
from flows.sizes.memory import EMA, GATHERED, GRADIENTS, MODEL, OPTIMIZER
from flows.vlm import memory
from stages.vlm.finetune import VlmTrainer
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.conftest import make, make_on_ranks
from tests.stages.training.test_planned_bytes import FOLDER, held_by, nbytes
from tests.stages.vlm_data import Talks

LORA = {"r": 2, "lora_alpha": 4.0}
WITHIN = 0.15
CASES: dict[str, dict[str, Any]] = {
    "all": {"trains": ["vision", "projector", "language"]},
    "projector": {"trains": ["projector"]},
    "lora": {"trains": ["vision", "language"], "lora": LORA},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def talks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """Conversations, and a model whose output is the table of its words, or not."""
    folder = tmp_path_factory.mktemp("vlm")
    (folder / "model").mkdir()
    model = tiny.save_model(folder / "model", QWEN3, tie_word_embeddings=request.param)
    talks = Talks(folder / "data", model).standard()
    talks.index("index")
    talks.tokenize("tokens", "index")
    return talks


def measure() -> None:
    """Have every optimizer step write what the trainer's objects hold: gradients before it, everything else after."""
    move = VlmTrainer.move

    def measured(self: VlmTrainer, index: int) -> Any:
        weights = self.weights
        held = {GRADIENTS: nbytes(p.grad for p in weights.parameters.values() if p.grad is not None)}
        row = move(self, index)
        held |= {MODEL: nbytes(self.model.parameters()), EMA: nbytes(weights.here(EMA).values())}
        held[OPTIMIZER] = sum(nbytes(t for t in state.values() if t.ndim) for state in self.optimizer.state.values())
        Path(os.environ[FOLDER], f"{self.group.rank}.json").write_text(json.dumps(held), encoding="utf-8")
        return row

    setattr(VlmTrainer, "move", measured)  # noqa: B010


def recipe(talks: Talks, case: str, **launch: Any) -> VlmRecipe:
    options = {"type": "vlm_sft", "datasets": {"mine": talks.options.model_dump(mode="json")}}
    values = {
        "policy": {"model_name_or_path": talks.model, **CASES[case]},
        "train": {"num_iterations": 1, "ema_enable": True, "train_policy": options},
        "launch": launch,
    }
    return checked(values, "test")[0]


def planned(talks: Talks, case: str, **launch: Any) -> dict[str, int]:
    (found,) = memory.stages(recipe(talks, case, **launch), talks.model, ["vlm_finetune"])
    held = {name: found.rows[name] for name in (MODEL, GRADIENTS, OPTIMIZER, EMA)}
    return {name: each.device for name, each in held.items()}


def finetune_request(talks: Talks, slot: str, case: str) -> Any:
    trains, lora = tuple(CASES[case]["trains"]), CASES[case].get("lora")
    settings = None if lora is None else LoraConfig(target_modules=("all-linear",), **lora)
    talks.policy(f"{slot}-policy", settings, trains=trains)
    return talks.finetune_request(slot, f"{slot}-policy", range(1), lora=settings, trains=trains, keeps_ema=True)


@pytest.mark.parametrize("case", CASES)
def test_the_memory_of_a_rank_is_as_planned(case: str, talks: Talks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(VlmTrainer, "move", VlmTrainer.move)
        measure()
        make(finetune_request(talks, case, case), tmp_path)
    assert held_by(0) == planned(talks, case)


def measure_writing() -> None:
    """Have the writing of a policy write the most bytes of tensors that it made and held."""
    write = VlmTrainer.write

    def measured(self: VlmTrainer, *arguments: Any) -> None:
        with LiveBytes([]) as live:
            write(self, *arguments)
        Path(os.environ[FOLDER], f"{self.group.rank}.json").write_text(json.dumps(live.peak), encoding="utf-8")

    setattr(VlmTrainer, "write", measured)  # noqa: B010


@pytest.mark.processes
def test_writing_a_policy_takes_the_memory_that_was_planned(
    talks: Talks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    make_on_ranks(finetune_request(talks, "written", "all"), tmp_path, 2, dp_shard_size=2, before=measure_writing)
    (stage,) = memory.stages(recipe(talks, "all", processes=2, dp_shard_size=2), talks.model, ["vlm_finetune"])
    peaks = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert max(peaks) == pytest.approx(stage.rows[GATHERED].device, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.processes
def test_two_ranks_share_matrices_and_keep_tables(talks: Talks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    make_on_ranks(finetune_request(talks, "shared", "all"), tmp_path, 2, dp_shard_size=2, before=measure)
    expected = planned(talks, "all", processes=2, dp_shard_size=2)
    # An output of its own has an odd number of rows, and the first rank the larger half.
    assert held_by(0) == expected
    assert all(0 <= expected[name] - held <= 2 * 4 * 16 for name, held in held_by(1).items())
    assert expected[MODEL] < planned(talks, "all")[MODEL]
