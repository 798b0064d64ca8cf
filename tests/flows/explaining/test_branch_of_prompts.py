"""Prompts whose file may change under its name: the plan says so."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.datasets import prompt_set
from flows.explaining.explain import explain_plan
from flows.planning.plan import Settings, plan_of

Recipe = Callable[..., str]


def test_the_plan_names_a_set_of_prompts_that_follows_a_branch(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "diffusion_nft" / "dance_grpo_t2v"
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text("\n".join(f'a sign that says "{word}"' for word in range(4)), encoding="utf-8")
    few = prompt_set.SETS["dance_grpo_t2v"]._replace(lines=(4, 4))
    monkeypatch.setitem(prompt_set.SETS, "dance_grpo_t2v", few)
    words = f'name = "ocr"\nlocal_dir = "{tmp_path}/words"\n'
    dataset = 'name = "prompt_set"\nset = "dance_grpo_t2v"\n'

    def lines(dataset: str) -> list[str]:
        plan = plan_of(Settings(recipe((words, dataset))))
        return [line for line in explain_plan(plan, "outputs").splitlines() if line.startswith("follows")]

    follows = ["follows    set dance_grpo_t2v is a file of the branch main, which may change; state its sha256"]
    assert lines(dataset) == follows
    held = f'{dataset}local_dir = "{folder}"\n'
    assert lines(held) == []

    def mixture(one: str) -> str:
        tables = (", ".join(each.splitlines()) for each in (words, one))
        return f'name = "mixture"\nsets = [{", ".join(f"{{ dataset = {{ {each} }} }}" for each in tables)}]\n'

    assert lines(mixture(dataset)) == follows
    assert lines(mixture(held)) == []
