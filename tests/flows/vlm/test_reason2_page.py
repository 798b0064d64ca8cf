"""Figures of docs/from-llava-to-reason2.md follow from the published configs, the recipes and the profiles."""

import json
import math
import re
from pathlib import Path

import pytest

from cosmos_rl_core.config.vlm.recipe import checked
from cosmos_rl_core.recipes.reading import read_values
from flows.vlm import memory
from flows.vlm.memory import Model
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.core.vlms.published import PUBLISHED
from tests.test_rules import ROOT, VLM_RECIPES

PAGE = (ROOT / "docs/from-llava-to-reason2.md").read_text(encoding="utf-8")
PROFILES = ("four-gpus-sharded", "eight-gpus-sharded", "eight-gpus")
GIB = 2**30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with the published config of each size, and without weights."""
    media = {kind: {"patch_size": 16} for kind in ("image", "video")}
    folders: dict[str, str] = {}
    for size, (config, _) in PUBLISHED.items():
        folders[size] = tiny.save(tmp_path_factory.mktemp(size), QWEN3, media)
        Path(folders[size], "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folders


def planned(recipe: str, profile: str, models: dict[str, str]) -> dict[str, memory.StageMemory]:
    values = read_values(str(ROOT / f"configs/vlm_sft/{recipe}.toml"), cluster=f"package:{profile}")
    path = models["8B" if "8b" in recipe else "2B"]
    found = memory.stages(checked(values, recipe)[0], path, memory.WORKS)
    return {stage.stage: stage for stage in found}


def test_the_table_has_the_memory_of_every_recipe(models: dict[str, str]):
    rows = re.findall(r"^\| (`.*?): .*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    shown = {name: figures for names, *figures in rows for name in re.findall(r"`(\w+)\.toml`", names)}
    assert shown.keys() == {path.stem for path in VLM_RECIPES}
    for recipe, figures in shown.items():
        peaks = [planned(recipe, profile, models)["finetune"].peak.device / GIB for profile in PROFILES]
        assert figures == [f"{peak:.1f}" for peak in peaks], recipe


def test_the_sentences_have_the_same_figures(models: dict[str, str]):
    two, eight = (planned(recipe, PROFILES[1], models) for recipe in ("llava", "llava_8b"))
    logits = two["finetune"].rows[memory.LOGITS].device / GIB
    tables = [stages["finetune"].rows[memory.READING].cpu / GIB for stages in (two, eight)]
    whole = [stages["validate"].peak.device / GIB for stages in (two, eight)]
    for said in (
        f"- {logits:.1f} GiB of it are logits",
        f"{tables[0]:.1f} GiB for the 2B model and {tables[1]:.1f} GiB for the 8B model in float32",
        f"{whole[0]:.1f} GiB for 2B, {whole[1]:.1f} GiB for 8B",
    ):
        assert said in PAGE, said
    parameters = [sum(map(math.prod, model_of(models[size]).shapes.values())) for size in PUBLISHED]
    assert parameters == [count for _, count in PUBLISHED.values()]
    assert f"{parameters[0] / 1e9:.2f} billion parameters" in PAGE
    assert f"has {parameters[1] / 1e9:.2f} billion" in PAGE


def model_of(path: str) -> Model:
    values = read_values(str(ROOT / "configs/vlm_sft/llava.toml"))
    model = memory.model_of(checked(values, "llava")[0], path)
    assert model is not None
    return model
