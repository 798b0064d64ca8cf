"""A judge that is a model of somebody's own trains a policy only after it was compared with labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cosmos_rl_core.errors import ConfigError
from flows.cli.app import app
from flows.explaining.explain import explain_plan
from flows.planning.plan import Plan, Settings, plan_of
from tests import tiny_scorers

OCR = 'fn = { name = "ocr", line_width = 96 }'


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_scorers.settings("vlm_answer", tmp_path_factory.mktemp("judge"))


def planned(recipe: Any, tmp_path: Path, settings: dict[str, Any], role: str = "train") -> Plan:
    fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in {"name": "vlm_answer", **settings}.items())
    path = recipe((OCR, f"{OCR}\n\n[[rewards]]\nrole = '{role}'\nfn = {{ {fields} }}"))
    return plan_of(Settings(path, str(tmp_path / "store")))


def score(tmp_path: Path, settings: dict[str, Any]) -> str:
    """The command's words, and ``agreement.json``, for 40 labelled pictures."""
    draw = np.random.default_rng(0)
    files = [tmp_path / f"{number}.png" for number in range(40)]
    for file in files:
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
    (tmp_path / "labels.txt").write_text("".join(f"{number}\n" for number in range(40)))
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    options += ["--labels", str(tmp_path / "labels.txt"), "--agreement", str(tmp_path / "agreement.json")]
    ended = CliRunner().invoke(app, ["score", *map(str, files), "--reward", "vlm_answer", *options])
    # Of some pictures the answer goes on and on, which is a failure and no number.
    assert ended.exit_code == 65, ended.output
    return ended.stdout


def test_a_judge_trains_only_after_it_was_compared_with_labels(recipe: Any, tmp_path: Path, judge: dict[str, Any]):
    with pytest.raises(ConfigError, match="nothing shows that it is right; score labelled files"):
        planned(recipe, tmp_path, judge)
    planned(recipe, tmp_path, judge, "monitor")
    told = score(tmp_path, judge)
    line = next(line for line in told.splitlines() if line.startswith("40 labelled files, "))
    failed = told.count("FAILED")
    assert line.split(", ")[1] == f"{failed} without a score"
    assert 0 < failed <= 20
    compared = judge | {"agreement": str(tmp_path / "agreement.json")}
    plan = planned(recipe, tmp_path, compared)
    assert f"agreement  vlm_answer: {line}" in explain_plan(plan, str(tmp_path))
    with pytest.raises(ConfigError, match="belongs to vlm_answer, transformers"):
        planned(recipe, tmp_path, compared | {"rubric": "is it pretty?"})


def test_an_agreement_needs_labels(tmp_path: Path):
    ended = CliRunner().invoke(app, ["score", "a.png", "--reward", "jpeg", "--agreement", str(tmp_path / "a.json")])
    assert (ended.exit_code, "needs --labels" in ended.stderr) == (2, True), ended.output
