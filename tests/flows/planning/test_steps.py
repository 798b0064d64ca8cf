import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import post_train as the_list
from flows.planning import requests
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.post_train import post_train, steps
from flows.session import loop
from stages.artifacts.generations import has_begun
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from tests.flows.by_hand import HELD_OUT_MEDIA, MONITORED, SFT, SMALL_SFT, ByHand, make_all, validated
from tests.hand_made import begin, make_run, planned


@pytest.mark.parametrize(
    ("freq", "iterations", "held_out", "monitored", "versions"),
    [
        (0, 2, False, False, [0, 2]),
        (0, 2, True, True, [0, 2]),
        (1, 2, True, False, [0, 1, 2]),
        (2, 3, True, True, [0, 2, 3]),
    ],
)
def test_the_list_of_a_reward_trained_run_is_what_the_loop_asks_for(
    recipe, tmp_path, freq, iterations, held_out, monitored, versions
):
    replacements = [MONITORED] if monitored else []
    path = validated(recipe, tmp_path, *replacements, freq=freq) if held_out else recipe(*replacements)
    run = planned(path, tmp_path, iterations=iterations)
    asked = make_all(run)
    assert [(step.slot, step.request()) for step in steps(run)] == list(asked.items())
    assert [step.kind for step in steps(run)] == [request.stage for request in asked.values()]
    assert [step.k for step in steps(run) if step.stage == "export"] == versions


@pytest.mark.parametrize("media", [(), (HELD_OUT_MEDIA,)])
@pytest.mark.parametrize("freq", [0, 1])
def test_the_list_of_a_supervised_run_is_what_the_loop_asks_for(tmp_path, freq, media):
    run = planned(SFT, tmp_path, overrides=(*SMALL_SFT, f"validation.freq={freq}", *media))
    asked = make_all(run)
    assert run.slots.iteration(1, "finetune") in asked
    assert (run.slots.version(2, "validate") in asked) == bool(media)
    assert [(step.slot, step.request()) for step in steps(run)] == list(asked.items())


def test_a_run_that_went_further_keeps_the_evaluation_of_its_earlier_end(recipe, tmp_path):
    path = validated(recipe, tmp_path)
    run = planned(path, tmp_path, run_id="hand")
    make_all(run)
    asked = make_all(planned(path, tmp_path, run_id="hand", iterations=3))
    longer = read_run(run.store_url, "hand")
    assert longer.recipe.train.num_iterations == 3
    of_earlier_end = [f"policy-0002/{stage}" for stage in ("export", "evaluate", "evaluate-ocr", "fragment")]
    names = [step.name for step in steps(longer)]
    assert {step.name for step in steps(longer) if step.slot not in asked} == {*of_earlier_end}
    assert names.index("iteration-0001/update") < names.index(of_earlier_end[0]) < names.index("iteration-0002/rollout")
    assert steps(longer)[-1].request() == asked[run.slots.report]


def test_an_iteration_counts_from_its_first_layout_on(recipe, tmp_path):
    run = make_run(recipe(), tmp_path)
    assert read_run(run.store_url, "hand").recipe.train.num_iterations == 2
    begin(requests.rollout(run, 2), layout={"shards": [["a"]]})
    assert has_begun(run.slots.iteration(2, "rollout"))
    assert read_run(run.store_url, "hand").recipe.train.num_iterations == 3


def test_a_rollout_during_an_update_is_the_next_iterations(recipe, tmp_path):
    path = recipe(("num_iterations = 2", "num_iterations = 3\nstaleness = 1"))
    waves = {wave.name: [step.name for step in wave.steps] for wave in post_train(planned(path, tmp_path))}
    rollouts = {name: names for name, names in waves.items() if "rollout" in name}
    assert rollouts == {"iteration-0000/rollout": ["iteration-0000/rollout"]} | {
        f"iteration-000{k}/update+fragment+rollout": [
            f"iteration-000{k}/update",
            f"iteration-000{k}/fragment",
            f"iteration-000{k + 1}/rollout",
        ]
        for k in (0, 1)
    }
    assert "iteration-0002/update+fragment" in waves


def test_the_page_on_architecture_shows_the_iteration_that_runs():
    page = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = page.partition("```python\n# flows/post_train.py\n")[2].partition("```")[0]
    assert shown.rstrip() in inspect.getsource(the_list)
    assert shown.count("yield Wave") == 5


def groups_of(run: Run) -> list[tuple[str, ...]]:
    """Names of the groups around each wave, and the wave's own, in order."""
    by_hand, around, seen = ByHand(), list[str](), list[tuple[str, ...]]()

    def grouped(name: str, work: Callable[[], None]) -> None:
        around.append(name)
        work()
        around.pop()

    def launch(name: str, *requests: Request) -> list[Manifest]:
        seen.append((*around, name))
        return by_hand.launch(name, *requests)

    loop.make(run, launch, grouped)
    return seen


def test_waves_are_grouped_by_iterations_and_policies(recipe, tmp_path):
    groups = groups_of(planned(validated(recipe, tmp_path), tmp_path, iterations=1))
    assert [*groups[:2], groups[-1]] == [("policy",), ("embed",), ("report",)]
    assert all(name.startswith(f"{group}/") for group, name in groups[2:-1])
    assert list(dict.fromkeys(group for group, _ in groups[2:-1])) == ["policy-0000", "iteration-0000", "policy-0001"]


def test_long_runs_are_grouped_by_blocks_of_iterations_too(tmp_path):
    settings = (*SMALL_SFT, "train.num_iterations=101", "validation.freq=50", HELD_OUT_MEDIA)
    groups = groups_of(planned(SFT, tmp_path, overrides=settings))
    blocks = dict.fromkeys(names[0] for names in groups if names[0].startswith("iterations"))
    assert list(blocks) == ["iterations-0000-0049", "iterations-0050-0099", "iterations-0100-0100"]
    by_wave = {names[-1]: names[:-1] for names in groups}
    # A single stage needs no group of its own, and a policy is judged in the block that made it.
    assert by_wave["iteration-0049/finetune"] == ("iterations-0000-0049",)
    assert by_wave["policy-0050/validate"] == ("iterations-0000-0049", "policy-0050")
    assert by_wave["policy-0000/validate"] == ("policy-0000",)
