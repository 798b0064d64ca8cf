"""A tiny VLM learns from files what pictures and clips show; from shuffled media it learns nothing."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cosmos_rl_core.chat_datasets import llava
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.rewards import vlm_answer
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.tiny import shapes
from cosmos_rl_core.vlms import _folders
from cosmos_rl_core.weights.parts import CURRENT
from flows.cli.app import app
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.vlm.contracts import VlmEvaluate, VlmExport, VlmFinetune, VlmIndex, VlmPolicy, VlmRef, VlmTokenize
from tests import running_service as running
from tests.stages.conftest import make
from tests.upstream_client import frame

HELD_OUT = 64
"""Pictures that the judge is compared on."""
JUDGE: dict[str, Any] = {
    "rubric": "{prompt}",
    "pattern": "[rgby]([1-4])",
    "lowest": 1,
    "highest": 4,
    "max_new_tokens": 4,
    "param_dtype": "float32",
}
EVERY = ("vision", "projector", "language")
STEPS = 450


class Learning:
    """Generated conversations, and every stage on them, from the index to the export."""

    def __init__(self, folder: Path, seed: int, *, shuffled: bool) -> None:
        self.folder, self.seed = folder, seed
        shapes.main([str(folder), "--seed", str(seed), *(["--shuffled"] if shuffled else [])])
        model = str(folder / "model")
        self.vlm = VlmRef(path=model, digest=_folders.digest(model), changes={"video": {"fps": 4.0}})

    def make(self, slot: str, config: Any, iteration: int | None = None, **inputs: Input) -> Manifest:
        given = {name: (one,) for name, one in inputs.items()}
        place = {"slot": f"{self.folder}/{slot}", "seed": self.seed, "iteration": iteration}
        return make(Request(stage=config.name, config=config, inputs=given, **place), self.folder)

    def input(self, slot: str, part: str = "") -> Input:
        return input_of(f"{self.folder}/{slot}", *([part] if part else []))

    def sources(self, split: str) -> dict[str, Any]:
        folder = self.folder / split
        return {
            name: llava.Options(annotation_path=f"{folder}/{name}.json", media_path=f"{folder}/media")
            for name in ("pictures", "clips")
        }

    def tokens(self, split: str) -> Input:
        sources = self.sources(split)
        files = {name: self.folder / split / f"{name}.json" for name in sources}
        self.make(f"{split}-index", VlmIndex(sources=sources, files_digest=files_digest(files)))
        config = VlmTokenize(vlm=self.vlm, sources=sources, max_length=200, conversations_per_shard=1024)
        self.make(f"{split}-tokens", config, index=self.input(f"{split}-index"))
        return self.input(f"{split}-tokens")

    def judged(self) -> dict[str, Any]:
        """What evaluation says of the trained model."""
        tokens = {split: self.tokens(split) for split in ("train", "held-out")}
        of_vlm: Any = {"vlm": self.vlm, "lora": None, "trains": EVERY}
        self.make("policy", VlmPolicy(**of_vlm))
        training = VlmFinetune(
            **of_vlm,
            gradient_checkpointing=False,
            keeps_ema=False,
            steps=optimizer_steps(),
            sources=self.sources("train"),
            batch_size=24,
            row_length=8192,
        )
        self.make("trained", training, 0, policy=self.input("policy"), tokens=tokens["train"])
        policy = self.input("trained", CURRENT)
        judging = VlmEvaluate(**of_vlm, sources=self.sources("held-out"), max_new_tokens=3)
        summary = self.make("judged", judging, policy=policy, tokens=tokens["held-out"]).summary
        self.make("exported", VlmExport(**of_vlm), policy=policy)
        return dict(summary)


def optimizer_steps() -> OptimizerSteps:
    """AdamW with 20 steps to the highest learning rate, and from there down to 2 % of it."""
    return OptimizerSteps(
        lrs=tuple(2e-3 * min(1, (k + 1) / 20) * max(0.02, 1 - k / STEPS) for k in range(STEPS)),
        ema_decays=(None,) * STEPS,
        betas=(0.9, 0.95),
        epsilon=1e-8,
        weight_decay=0.01,
        grad_norm_clip=1.0,
        first_step=0,
    )


@pytest.fixture(scope="module", params=range(3))
def learned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Learning, dict[str, Any]]:
    """Conversations with a model that was trained on them, and what evaluation says of it."""
    learning = Learning(tmp_path_factory.mktemp("learned"), request.param, shuffled=False)
    return learning, learning.judged()


@pytest.mark.slow
def test_a_tiny_model_learns_what_pictures_and_clips_show(learned: tuple[Learning, dict[str, Any]]):
    _, found = learned
    assert found["items"] == 512
    assert found["correct_pictures"] >= 0.9
    assert found["correct_clips"] >= 0.7


@pytest.mark.slow
def test_the_learned_model_judges_with_labels_and_in_the_service(
    learned: tuple[Learning, dict[str, Any]], tmp_path: Path
):
    learning, _ = learned
    Artifact(learning.input("exported")).bring_to(tmp_path / "exported")
    rows = json.loads((learning.folder / "held-out" / "pictures.json").read_text(encoding="utf-8"))[:HELD_OUT]
    files = [learning.folder / "held-out" / "media" / row["image"] for row in rows]
    # The answer to a picture is a colour and a quadrant; the judge is asked for the quadrant.
    labels = [int(row["conversations"][1]["value"][1]) for row in rows]
    (tmp_path / "labels.txt").write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    compared = [*map(str, files), "--reward", "vlm_answer", "--labels", str(tmp_path / "labels.txt")]
    compared += ["--agreement", str(tmp_path / "agreement.json")]
    judge = JUDGE | {"model": str(tmp_path / "exported" / "model")}
    compared += [word for name, value in judge.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    ended = CliRunner().invoke(app, ["score", *compared])
    # Without a score, a picture is a failure and no number.
    assert ended.exit_code in (0, 65), ended.output
    judge["agreement"] = str(tmp_path / "agreement.json")
    reward = vlm_answer.Reward(vlm_answer.Options.model_validate(judge))
    found = json.loads((tmp_path / "agreement.json").read_text(encoding="utf-8"))
    assert found["files"] == HELD_OUT
    assert found["equal"] >= 0.9
    assert f"{HELD_OUT} labelled files" in reward.agreement()

    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files[:4]])
    own = reward.score([Sample(f"{i}", f"{i}", "", pixels[i][None]) for i in range(4)])
    scorer = {"reward_type": "vlm_answer", "options": judge}
    with running.in_thread(running.write(tmp_path, running.settings(tmp_path, scorer))) as client:
        told = client.result(
            client.enqueue(frame([""] * 4, {"vlm_answer": 1.0}, pixels, media_type="image")), "vlm_answer", 120
        )
    assert told["scores"]["vlm_answer"] == [one["vlm_answer"] for one in own if not isinstance(one, Exception)]
    # A judge whose answers cannot be read gives failures, never numbers.
    unreadable = vlm_answer.Options.model_validate(judge | {"pattern": "score ([0-9])", "agreement": None})
    assert all(
        isinstance(one, ValueError)
        for one in vlm_answer.Reward(unreadable).score([Sample("0", "0", "", pixels[0][None])])
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_model_learns_nothing_from_shuffled_media(tmp_path: Path, seed: int):
    found = Learning(tmp_path, seed, shuffled=True).judged()
    for name, chance in (("pictures", 1 / 16), ("clips", 1 / 4)):
        assert abs(found[f"correct_{name}"] - chance) <= 3 * sqrt(chance * (1 - chance) / 256)
