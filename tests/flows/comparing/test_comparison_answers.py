"""Two runs of a VLM side by side, whose answers and losses are made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save, save_file

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.config.toml import dumps
from flows.comparing.comparison import compare
from flows.comparing.scores import Difference
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import run_of
from flows.session import loop
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.contracts import METRICS
from stages.formats.tables import to_parquet
from stages.vlm.contracts import VlmEvaluate
from stages.vlm.evaluated import summary_of
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.hand_made import make

TOKENS = 2
"""Labels of a conversation."""
Told = dict[str, tuple[float, bool]]
"""The loss a label, and whether the answer is correct, by the id of the conversation."""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """Path of a recipe of one iteration."""
    folder = tmp_path / "vlm"
    folder.mkdir()
    save_file({"one": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]
    (tmp_path / "mine.json").write_text(json.dumps([{"conversations": turns}] * 4), encoding="utf-8")
    datasets = {"mine": {"name": "llava", "annotation_path": str(tmp_path / "mine.json")}}
    policy = {"type": "vlm_sft", "steps_per_iteration": 1, "model_max_length": 64, "datasets": datasets}
    values: dict[str, Any] = {
        "policy": {"model_name_or_path": tiny.save(folder, QWEN3)},
        "train": {"num_iterations": 1, "train_batch_per_replica": 4, "train_policy": policy},
        "validation": {"datasets": datasets, "max_new_tokens": 3},
    }
    path = tmp_path / "vlm.toml"
    path.write_text(dumps(values), encoding="utf-8")
    return str(path)


def finish(recipe: str, tmp_path: Path, run_id: str, told: Told) -> None:
    """Make a run whose trained policy tells this."""
    url = str(tmp_path / "store")
    run = run_of(freeze(plan_of(Settings(recipe, url, run_id)), url), url)

    def launch(_: str, *wanted: Request) -> list[Manifest]:
        return [current_manifest(request) or made(request) for request in wanted]

    def made(request: Request) -> Manifest:
        if request.stage == "vlm_evaluate":
            return make(request, answers(told), **summary_of(table_of(told), generated=True))
        weights = save({"one": np.full(1, float(request.iteration or 0), "f4")})
        steps = to_parquet(pd.DataFrame({"step": [0], "loss": [1.0], "grad_norm": [1.0], "lr": [1e-3]}))
        return make(request, {"current/00000.safetensors": weights, METRICS: steps})

    loop.make(run, launch)


def table_of(told: Told) -> pd.DataFrame:
    """A row a conversation, by its place in the dataset."""
    losses, correct = zip(*told.values(), strict=True)
    table = pd.DataFrame({"number": range(len(told)), "id": [*told], "source": "mine", "correct": correct})
    table = table.assign(loss_sum=[loss * TOKENS for loss in losses], label_tokens=TOKENS)
    return table.assign(expected="x", answer="x", whole=True, asked=True)


def answers(told: Told) -> dict[str, bytes]:
    """Files of an evaluation that shows nothing."""
    return {VlmEvaluate.ANSWERS: to_parquet(table_of(told)), VlmEvaluate.SHOWN: canonical_json([])}


A: Told = {"a": (1.0, False), "b": (3.0, True), "c": (5.0, False), "d": (9.0, True)}
B: Told = {"d": (8.7, True), "c": (4.9, True), "b": (2.9, True), "a": (0.9, False)}
"""Other places of the same conversations."""


def scores(tmp_path: Path) -> dict[str, Difference]:
    return {one.name: one for one in compare("one", "two", str(tmp_path / "store")).scores}


def test_answers_are_compared_conversation_by_conversation(recipe: str, tmp_path: Path):
    finish(recipe, tmp_path, "one", A)
    finish(recipe, tmp_path, "two", B)
    found = scores(tmp_path)
    assert {(one.where, one.how) for one in found.values()} == {("held-out, policy 1", "conversation by conversation")}
    loss, correct = found["val/avg_loss"], found["val/correct_mine"]
    assert (loss.a.mean, loss.a.error) == (pytest.approx(4.5), pytest.approx(math.sqrt(35 / 3 / 4)))
    # The differences are -0.1, -0.1, -0.1 and -0.3, whose standard deviation is 0.1.
    assert (loss.change.mean, loss.change.error) == (pytest.approx(-0.15), pytest.approx(0.1 / 2))
    # One of four answers differs: a standard deviation of 0.5.
    assert (correct.a.mean, correct.b.mean) == (0.5, 0.75)
    assert (correct.change.mean, correct.change.error) == (pytest.approx(0.25), pytest.approx(0.5 / 2))


def test_answers_to_different_conversations_are_compared_as_independent(recipe: str, tmp_path: Path):
    finish(recipe, tmp_path, "one", A)
    finish(recipe, tmp_path, "two", {f"other-{name}": told for name, told in A.items()})
    for one in scores(tmp_path).values():
        assert one.how == "other items"
        assert (one.change.mean, one.change.error) == (0.0, pytest.approx(math.hypot(one.a.error, one.b.error)))
