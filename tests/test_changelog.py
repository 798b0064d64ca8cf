"""The changelog names every stage whose version was raised since the last release."""

import re

from stages.registry import STAGES
from tests.pages import ROOT

RELEASED = {
    "index": 2, "caption": 1, "describe": 1, "embed": 2, "encode": 2, "policy": 1, "rollout": 1, "reward": 1,
    "judge": 1, "warn": 3, "update": 1, "finetune": 2, "export": 1, "evaluate": 1, "validate": 1, "fragment": 2,
    "report": 5, "vlm_index": 2, "vlm_tokenize": 1, "vlm_policy": 1, "vlm_finetune": 1, "vlm_evaluate": 2,
    "vlm_export": 1,
}  # fmt: skip
"""Versions of the stages in 0.1.0; a stage that came later began with 1."""


def test_raised_versions_are_listed():
    page = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    unreleased = page.partition("## Unreleased")[2].partition("\n## ")[0]
    listed = {name: int(version) for name, version in re.findall(r"^\| `(\w+)` \| (\d+) \|", unreleased, re.MULTILINE)}
    raised = {name: stage.version for name, stage in STAGES.items() if stage.version != RELEASED.get(name, 1)}
    assert listed == raised
