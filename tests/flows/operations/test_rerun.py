import shutil

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.cli import app as cli
from flows.library.states import states
from flows.operations import rerun as rerun_module
from flows.planning import requests
from flows.planning.run import Run
from flows.planning.steps import read_run
from stages.artifacts.records import Invalidated
from stages.artifacts.slots import current_of, why_stale
from tests.flows.by_hand import MONITORED, SFT, SMALL_SFT, make_all, make_one, planned_run, validated, whole_run
from tests.hand_made import adopt_or_make, begin, commit, planned, rewards

SCORES = ("evaluate-jpeg", "evaluate-ocr")
BASE = [f"policy-0000/{stage}" for stage in ("export", "evaluate", *SCORES, "fragment")]
FINAL = [f"policy-0002/{stage}" for stage in ("export", "evaluate", *SCORES, "fragment")]
FIRST = [f"iteration-0000/{stage}" for stage in ("rollout", "reward-jpeg", "reward-ocr", "update", "fragment")]
SECOND = [f"iteration-0001/{stage}" for stage in ("rollout", "reward-jpeg", "reward-ocr", "update", "fragment")]


def rerun(store_url: str, run_id: str, stage: str, iteration: int | None = None) -> list[str]:
    """What people are told."""
    return rerun_module.rerun(store_url, run_id, stage, iteration).lines()


def below(lines: list[str]) -> list[str]:
    """Names of what may become stale."""
    return [line.split()[0] for line in lines if line.startswith("  ")]


def mistake_of(run: Run, stage: str, iteration: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        rerun(run.store_url, "hand", stage, iteration)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "iteration", "expected"),
    [
        ("policy", None, [*BASE, *FIRST, *SECOND, *FINAL, "report"]),
        ("embed", None, [*FIRST, *SECOND, *FINAL, "report"]),
        ("rollout", 0, [*FIRST[1:], *SECOND, *FINAL, "report"]),
        ("reward-jpeg", 0, [FIRST[4], "report"]),
        ("reward-ocr", 0, [*FIRST[3:], *SECOND, *FINAL, "report"]),
        ("update", 0, [*SECOND, *FINAL, "report"]),
        ("update", 1, [*FINAL, "report"]),
        ("export", 2, [*FINAL[1:], "report"]),
        ("evaluate", 0, [*BASE[2:], FINAL[-1], "report"]),
        ("evaluate-jpeg", 0, [BASE[-1], FINAL[-1], "report"]),
        ("evaluate-ocr", 2, [FINAL[-1], "report"]),
        ("report", None, []),
    ],
)
def test_rerun_lists_the_artifacts_that_were_made_from_the_invalidated_one(
    recipe, tmp_path, stage, iteration, expected
):
    run = whole_run(recipe, tmp_path)
    before = {state.step.name: state for state in states(run)}
    lines = rerun(run.store_url, "hand", stage, iteration)
    assert below(lines) == expected
    after = {state.step.name: state.word for state in states(run)}
    (ended,) = [name for name, word in after.items() if word == "invalidated"]
    assert ended.rpartition("/")[2] == stage
    assert [name for name, word in after.items() if word == "waits"] == expected
    slot = before[ended].step.slot
    assert current_of(slot) == (2, None)
    assert lines[-1] == f"invalidated generation 1 of {slot}; give its command again or retry its flow run to make it"
    assert store.size(store.join(slot, "manifest.1.json")) is not None
    end = Invalidated.read(slot, 1)
    assert end is not None
    assert end.reason.startswith("asked for by")


def test_a_rerun_of_a_supervised_iteration_lists_the_iterations_after_it(tmp_path):
    run = planned(SFT, tmp_path, run_id="hand", overrides=SMALL_SFT)
    make_all(run)
    final = [f"policy-0002/{stage}" for stage in ("export", "evaluate", "evaluate-ocr", "fragment")]
    assert below(rerun(run.store_url, "hand", "finetune", 0)) == ["iteration-0001/finetune", *final, "report"]
    assert mistake_of(run, "rollout", 0).startswith("unknown stage 'rollout'; known: policy, embed, encode, export, ")


def test_the_cost_of_a_rerun_is_what_the_stages_took_last_time(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    assert rerun(run.store_url, "hand", "evaluate", 2)[:-1] == [
        "stale if policy-0002/evaluate comes out differently: 4 artifacts, 11 s to make again",
        "  policy-0002/evaluate-jpeg    3 s",
        "  policy-0002/evaluate-ocr     3 s",
        "  policy-0002/fragment         0 s",
        "  report                       5 s",
    ]
    assert rerun(run.store_url, "hand", "report")[:-1] == ["nothing was made from report"]


def test_an_unknown_cost_is_not_shown_as_zero(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    request = rewards(run, run.slots.version(2, "evaluate"), 2)[1]
    rerun(run.store_url, "hand", "evaluate-ocr", 2)
    attempt = begin(request)
    attempt.put("scores", b"s")
    commit(attempt)
    assert "  policy-0002/evaluate-ocr     ? s" in rerun(run.store_url, "hand", "evaluate", 2)


def test_a_long_list_is_cut_and_its_rest_counted(recipe, tmp_path, monkeypatch):
    run = whole_run(recipe, tmp_path)
    monkeypatch.setattr(rerun_module, "SHOWN", 2)
    lines = rerun(run.store_url, "hand", "export", 0)
    assert lines[0].endswith(": 6 artifacts, 31 s to make again")
    assert below(lines) == ["policy-0000/evaluate", "policy-0000/evaluate-jpeg", "and"]
    assert lines[3] == "  and 4 more"


def test_embeddings_are_said_to_be_shared(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    assert any(line.startswith("other runs of this store") for line in rerun(run.store_url, "hand", "embed"))
    assert not any(line.startswith("other runs") for line in rerun(run.store_url, "hand", "policy"))


def test_artifacts_stay_current_only_if_a_remade_input_has_equal_bytes(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    request = rewards(run, run.slots.iteration(0, "rollout"), 0)[1]
    _, update = current_of(run.slots.iteration(0, "update"))
    assert update is not None
    rerun(run.store_url, "hand", "reward-ocr", 0)
    assert make_one(request).generation == 2
    assert why_stale(update, requests.update(run, 0)) is None
    rerun(run.store_url, "hand", "reward-ocr", 0)
    assert make_one(request, salt="other").generation == 3
    assert why_stale(update, requests.update(run, 0)) == "scores changed since update was made"


def test_the_list_passes_through_ended_generations(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    rerun(run.store_url, "hand", "update", 0)
    # Nothing of iteration 1 names the rewards of iteration 0; it is the ended update that links them.
    assert below(rerun(run.store_url, "hand", "reward-ocr", 0)) == [FIRST[4], *SECOND, *FINAL, "report"]
    assert below(rerun(run.store_url, "hand", "rollout", 0)) == [FIRST[1], FIRST[4], *SECOND, *FINAL, "report"]


def test_the_list_passes_through_damaged_manifests(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    store.write(store.join(run.slots.iteration(0, "update"), "manifest.1.json"), b"{")
    lines = rerun(run.store_url, "hand", "reward-ocr", 0)
    assert below(lines) == [*FIRST[3:], *SECOND, *FINAL, "report"]
    assert "  iteration-0000/update        ? s" in lines


def test_a_damaged_artifact_can_be_made_again(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    slot = run.slots.iteration(1, "update")
    store.write(store.join(slot, "manifest.1.json"), b"{")
    assert below(rerun(run.store_url, "hand", "update", 1)) == [*FINAL, "report"]
    assert current_of(slot) == (2, None)


def test_a_moved_store_has_the_same_list(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    moved = shutil.move(run.store_url, tmp_path / "elsewhere")
    assert below(rerun(f"{moved}/", "hand", "update", 1)) == [*FINAL, "report"]


def test_an_unfinished_generation_is_ended_and_nothing_of_it_adopted(recipe, tmp_path):
    run = whole_run(recipe, tmp_path).going_to(3)
    request = requests.rollout(run, 2)
    cut = {"shards": [["a"]]}
    begin(request, layout=cut).finish(0, {"a": b"half-made"})
    again = begin(request, layout=cut)
    assert again.adopt(0)
    assert again.adopted == 1

    assert rerun(run.store_url, "hand", "rollout", 2) == [
        "nothing was made from iteration-0002/rollout",
        f"nothing will be adopted from the unfinished generation 1 of {request.slot}; "
        "give its command again or retry its flow run to make it",
    ]
    fresh = begin(request, layout=cut)
    adopt_or_make(fresh, 0, lambda: {"a": b"made anew"})
    assert (fresh.generation, fresh.adopted, fresh.read("a")) == (2, 0, b"made anew")


def test_an_unfinished_second_generation_still_has_the_list_of_the_first(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    request = requests.update(run, 1)
    rerun(run.store_url, "hand", "update", 1)
    assert mistake_of(run, "update", 1) == (
        "iteration-0001/update of hand has no artifact and no unfinished one; just run it"
    )
    begin(request, layout={"steps": []})
    lines = rerun(run.store_url, "hand", "update", 1)
    assert below(lines) == [*FINAL, "report"]
    assert lines[-1].startswith("nothing will be adopted from the unfinished generation 2 of ")
    assert current_of(request.slot) == (3, None)


def test_an_unknown_stage_lists_the_known_ones_and_the_nearest(recipe, tmp_path):
    run = planned_run(recipe, tmp_path)
    judged, trained = (
        "export, evaluate, evaluate-jpeg, evaluate-ocr, fragment",
        "rollout, reward-jpeg, reward-ocr, update",
    )
    known = f"policy, embed, {judged}, {trained}, report"
    assert mistake_of(run, "reward-orc", 0) == (
        f"unknown stage 'reward-orc'; known: {known}; did you mean 'reward-ocr'?"
    )
    assert mistake_of(run, "xyz") == f"unknown stage 'xyz'; known: {known}"


@pytest.mark.parametrize(
    ("stage", "iteration", "expected"),
    [
        ("policy", 0, "a run has one policy; leave --iteration out"),
        ("report", 3, "a run has one report; leave --iteration out"),
        ("rollout", None, "rollout needs --iteration: which iteration, from 0"),
        ("reward-ocr", 7, "hand has no reward-ocr of iteration 7; known: 0 to 1"),
        ("evaluate", None, "evaluate needs --iteration: which policy version, from 0"),
        ("evaluate-ocr", 1, "hand has no evaluate-ocr of policy version 1; known: 0, 2"),
    ],
)
def test_an_iteration_must_be_named_where_there_are_several(recipe, tmp_path, stage, iteration, expected):
    run = planned_run(recipe, tmp_path)
    assert mistake_of(run, stage, iteration) == expected
    assert {state.word for state in states(run)} == {"missing"}


def test_a_stage_that_was_never_made_has_nothing_to_invalidate(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    assert mistake_of(run, "policy") == "policy of hand has no artifact and no unfinished one; just run it"
    assert current_of(run.slots.policy(0)) == (1, None)


def test_the_command_line_takes_stages_with_and_without_an_iteration(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)

    def command(*options: str):
        return CliRunner().invoke(cli.app, ["rerun", "hand", "--store", run.store_url, *options])

    assert command("--stage", "report").exit_code == 0
    ended = command("--stage", "update", "--iteration", "1")
    assert ended.exit_code == 0
    # The report is to be made already.
    assert below(ended.stdout.splitlines()) == FINAL
    refused = command("--stage", "update")
    assert refused.exit_code == 64
    assert refused.stderr.strip() == "update needs --iteration: which iteration, from 0"
    waiting = [state.step.name for state in states(read_run(run.store_url, "hand")) if state.word == "waits"]
    assert waiting == FINAL


def test_a_stage_whose_inputs_were_deleted_is_refused_before_anything_is_invalidated(recipe, tmp_path):
    path = validated(recipe, tmp_path, MONITORED, ("n_generation = 4", "n_generation = 4\nkeep.media = 1"))
    run = planned(path, tmp_path, run_id="hand")
    make_all(run)
    mistake = mistake_of(run, "reward-ocr", 0)
    assert "iteration-0000/reward-ocr cannot be made again: it reads media of " in mistake
    assert "iterations/0000/rollout, which this run deleted" in mistake
    assert current_of(run.slots.iteration(0, "reward-ocr"))[0] == 1
    assert rerun(run.store_url, "hand", "reward-ocr", 1)
    assert rerun(run.store_url, "hand", "rollout", 0)
