"""The list of waves of a run: what the loop asks for, in its order."""

import inspect
from pathlib import Path

import pytest

from flows import post_train as the_list
from flows.planning.steps import read_run
from flows.post_train import post_train, steps
from tests.flows.by_hand import HELD_OUT_MEDIA, MONITORED, SFT, SMALL_SFT, make_all, validated
from tests.hand_made import planned


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


def test_a_rollout_during_an_update_belongs_to_the_next_iteration(recipe, tmp_path):
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
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = page.partition("```python\n# flows/post_train.py\n")[2].partition("```")[0]
    assert shown.rstrip() in inspect.getsource(the_list)
    assert shown.count("yield Wave") == 5
