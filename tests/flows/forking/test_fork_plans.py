"""Forks: new runs in the middle of others, with their artifacts by reference."""

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.auditing.audit import audit
from flows.forking.plan import plan_of_fork
from flows.forking.references import found_in_origin, refer_to_origin
from flows.forking.work import planned_fork
from flows.heads.heads import read_heads
from flows.lineage.forks import Fork, forks_of, note
from flows.planning.base import AnyRun
from flows.planning.plan import METRICS_FILE, ForkOf, Settings, freeze, plan_of
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.post_train import post_train, steps
from flows.session.current_waves import leading
from flows.watching.tracking import Tracker
from stages.artifacts.slots import current_of, one_look
from tests.flows.by_hand import make_all, planned_run, validated
from tests.flows.forking.forked import begun, made
from tests.hand_made import planned

FASTER = ("train.optm_lr=2e-3",)


@pytest.fixture
def origin(recipe: Any, tmp_path: Path) -> Run:
    """A finished run of two iterations with held-out samples of policies 0 and 2."""
    run = planned_run(recipe, tmp_path)
    make_all(run)
    return run


def contents(run: AnyRun) -> dict[str, str]:
    """Contents of the current artifacts of a run, without the report, by the end of their slots."""
    found = {step.slot: current_of(step.slot)[1] for step in steps(run) if step.slot.startswith(run.url)}
    there = {slot.removeprefix(run.url): one.content for slot, one in found.items() if one is not None}
    return {slot: content for slot, content in there.items() if slot != "/report"}


def files(run: AnyRun) -> dict[str, bytes]:
    """Every file of a run, without what a fork writes there."""
    names = (name for name in store.listed(run.url) if not name.startswith("forks/"))
    return {name: store.read(store.join(run.url, name)) for name in names}


def faults(run: AnyRun) -> list[str]:
    found = audit(run.store_url, run.plan.run_id)
    # Files made by hand are no tables, pictures and pages.
    records = (fault for fault in found.faults if fault.field in ("inputs", "recipe", "references", "manifest", "file"))
    return [f"{fault.file}: {fault.field}: {fault.what}" for fault in records if "metrics" not in fault.file]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_fork_without_changes_equals_its_origin_and_makes_only_its_report(origin: Run, at: int) -> None:
    before = files(origin)
    fork = begun(origin, at)
    asked = make_all(fork)
    expected = {slot: content for slot, content in contents(origin).items() if slot in contents(fork)}
    assert contents(fork) == expected
    assert expected
    own = [slot for slot in asked if slot.startswith(fork.url) and made(slot).slot == slot]
    assert own == [fork.slots.report]
    assert files(origin) == before
    assert faults(fork) == faults(origin)


def test_a_fork_begins_at_its_policy_and_remakes_nothing_before_it(origin: Run) -> None:
    fork = begun(origin, 1, overrides=FASTER)
    asked = make_all(fork)
    own = {slot.removeprefix(fork.url) for slot in asked if slot.startswith(fork.url)}
    assert not any("/iterations/0000/" in slot for slot in own)
    computed = {slot for slot in own if made(fork.url + slot).slot == fork.url + slot}
    assert "/iterations/0001/update" in computed
    assert computed.isdisjoint({"/iterations/0001/rollout", "/iterations/0001/reward-ocr", "/iterations/0001/warn"})
    assert faults(fork) == faults(origin)


def test_schedules_and_draws_go_on_where_the_origin_was(origin: Run) -> None:
    fork = begun(origin, 1, overrides=FASTER)
    asked = make_all(fork)
    there = made(origin.slots.policy(2))
    steps_taken = asked[fork.slots.policy(2)].config.identity()["steps"]
    assert steps_taken["first_step"] == there.config["steps"]["first_step"] == 2
    assert steps_taken["lrs"] == [pytest.approx(2 * lr) for lr in there.config["steps"]["lrs"]]
    assert isinstance(fork, Run)
    assert fork.plan.prompts_of(1) == origin.plan.prompts_of(1)


def test_optimizer_steps_of_another_size_are_counted_on_from_the_origins(origin: Run) -> None:
    fork = begun(origin, 1, overrides=("train.train_policy.batch_size_per_optimize=2",))
    taken = make_all(fork)[fork.slots.policy(2)].config.identity()["steps"]
    assert (taken["first_step"], len(taken["lrs"])) == (2, 4)


def test_a_longer_fork_goes_on_after_the_end_of_its_origin(origin: Run, recipe: Any, tmp_path: Path) -> None:
    fork = begun(origin, 1, iterations=4)
    make_all(fork)
    there = contents(origin)
    assert {slot: content for slot, content in contents(fork).items() if slot in there}.items() <= there.items()
    assert made(fork.slots.policy(4)).slot == fork.slots.policy(4)
    assert faults(fork) == faults(origin)


def test_a_fork_of_a_fork_refers_to_the_run_that_has_the_files(origin: Run) -> None:
    first = begun(origin, 1, run_id="first", iterations=4)
    make_all(first)
    second = begun(first, 3, run_id="second", iterations=4)
    make_all(second)
    assert made(second.slots.policy(1)).slot == origin.slots.policy(1)
    assert made(second.slots.policy(3)).slot == first.slots.policy(3)
    assert contents(second).items() <= contents(first).items()
    assert [fork.run for fork in forks_of(origin.url)] == ["first", "second"]
    assert [fork.run for fork in forks_of(first.url)] == ["second"]
    assert faults(second) == faults(origin)


def test_with_staleness_a_fork_has_the_rollout_made_during_its_update(recipe: Any, tmp_path: Path) -> None:
    stale = ("optm_lr = 1e-3", "optm_lr = 1e-3\nstaleness = 1")
    origin = planned(validated(recipe, tmp_path, stale), tmp_path, run_id="hand", iterations=3)
    make_all(origin)
    same = begun(origin, 1)
    make_all(same)
    assert contents(same).items() <= contents(origin).items()
    other = begun(origin, 1, overrides=FASTER)
    asked = make_all(other)
    assert made(other.slots.iteration(1, "rollout")).slot == origin.slots.iteration(1, "rollout")
    # Rollout 2 is made by policy 1, before any change; its behaviour is the origin's.
    assert made(other.slots.iteration(2, "rollout")).content == contents(origin)["/iterations/0002/rollout"]
    assert asked[other.slots.policy(2)].inputs["behaviours"][0].url == origin.slots.policy(0)
    assert faults(other) == faults(origin)


def test_a_fork_may_train_by_another_algorithm_on_rewards(origin: Run) -> None:
    fork = begun(origin, 1, overrides=("train.train_policy.type=dpo",))
    asked = make_all(fork)
    algorithm = asked[fork.slots.policy(2)].config.identity()["algorithm"]
    assert (algorithm["type"], algorithm["mini_batch"]) == ("dpo", 2)
    # Its rollouts are by the current policy, rollouts of NFT by the slow copy.
    assert made(fork.slots.iteration(1, "rollout")).slot == fork.slots.iteration(1, "rollout")
    with pytest.raises(ConfigError, match=r"sft trains on data: give its rewards role = .monitor."):
        begun(origin, 1, overrides=("train.train_policy.type=sft",))


def test_with_other_rewards_policies_are_judged_from_the_fork_on(origin: Run, tmp_path: Path) -> None:
    file = tmp_path / "rewards.toml"
    file.write_text('[[rewards]]\nfn = { name = "jpeg" }\n', encoding="utf-8")
    fork = begun(origin, 1, str(file), overrides=("early_warning.statistics=false",))
    assert fork.plan.origin is not None
    assert not fork.plan.origin.alike
    asked = make_all(fork)
    assert fork.headline_reward == "jpeg"
    assert made(fork.slots.iteration(1, "rollout")).slot == origin.slots.iteration(1, "rollout")
    assert [wave.name for wave in post_train(fork)][-1] == "report"
    assert len(asked[fork.slots.report].inputs["fragments"]) == 1
    # Its former judges are the same, so it is not judged again.
    assert made(fork.slots.version(1, "evaluate")) is not None
    assert faults(fork) == faults(origin)


def test_the_first_head_names_the_references(origin: Run) -> None:
    fork = begun(origin, 1)
    make_all(fork)
    (first, _), *_ = read_heads(fork.url)
    references = {f"runs/{fork.plan.run_id}/{slot}/manifest.1.json" for slot in ("policy", "iterations/0000/update")}
    assert references <= first.records.keys()


def test_a_tampered_reference_is_found(origin: Run) -> None:
    fork = begun(origin, 1)
    make_all(fork)
    mine, other = (store.join(slot, "manifest.1.json") for slot in (fork.slots.policy(1), fork.slots.policy(0)))
    whole = store.read(mine)
    other_digit = b"1" if whole[-9:-8] == b"0" else b"0"
    store.write(mine, whole[:-9] + other_digit + whole[-8:])
    assert any("iterations/0000/update" in fault for fault in faults(fork))
    store.write(mine, store.read(other))
    assert any("iterations/0000/update" in fault for fault in faults(fork))


@pytest.mark.parametrize("written", [0, 1, 5])
def test_a_fork_that_was_killed_at_its_beginning_is_finished_by_the_next_command(
    origin: Run, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(begun(origin, 1, run_id="whole"))
    wanted = begun(origin, 1, run_id="killed")
    for slot in [*contents(wanted)][written:]:
        store.remove(store.join(wanted.url, slot.strip("/"), "manifest.1.json"))
    note(origin.url, Fork(run="killed", at=1, references={}, holds=("*",)))
    assert refer_to_origin(wanted)
    assert contents(wanted) == expected
    assert refer_to_origin(wanted) == 0


@pytest.mark.parametrize("at", [0, 1])
def test_a_fork_made_of_references_alone_has_all_its_numbers_and_heads(origin: Run, at: int) -> None:
    fork = begun(origin, at, overrides=FASTER)
    found = audit(fork.store_url, fork.plan.run_id).faults
    assert not [fault for fault in found if fault.file.startswith(f"runs/{fork.plan.run_id}/")]


def test_numbers_of_referenced_artifacts_are_written_before_a_fork_makes_any(origin: Run) -> None:
    fork = begun(origin, 1, overrides=FASTER)
    notes: list[str] = []
    with Tracker(fork, notes.append) as tracker, one_look():
        for one in leading([*post_train(fork)]):
            # Files made by hand hold no scores.
            if {request.stage for request in one.requests} <= {"rollout"}:
                tracker.passed(one.requests, one.manifests)
        tracker.taken()
        (line,) = store.read(store.join(fork.url, METRICS_FILE)).splitlines()
        assert json.loads(line)["stage"] == "rollout"
    assert not notes


def test_a_planned_fork_writes_nothing_and_says_what_it_makes(origin: Run, tmp_path: Path) -> None:
    fork = begun(origin, 1, overrides=FASTER)
    asked = make_all(begun(origin, 1, overrides=FASTER, run_id="made"))
    refers, work = len(found_in_origin(fork)), planned_fork(fork.plan, fork.store_url).work
    computed = [slot for slot in asked if made(slot).slot == slot and "/runs/" in slot]
    assert refers == planned_fork(fork.plan, fork.store_url).references
    assert (work.stages, work.generated, work.trained) == (len(computed), 0, 8)
    assert (work.held_out, work.scored) == (16, 32)


def test_all_mistakes_of_a_fork_are_named_at_once(origin: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no policy version 7; it has 0 to 2") as error:
        begun(origin, 7, overrides=("train.optm_nam=1",))
    assert "did you mean 'optm_name'" in str(error.value)
    with pytest.raises(ConfigError, match=r"policy\.lora\.r: 2 -> 4") as error:
        begun(origin, 1, overrides=("policy.lora.r=4", "train.optm_name=Adam"))
    assert "train.optm_name: 'AdamW' -> 'Adam'" in str(error.value)
    with pytest.raises(ConfigError, match="there is no run 'none'"):
        begun(read_run(origin.store_url, "none"), 1)
    file = tmp_path / "rewards.toml"
    file.write_text('seed = 3\n[[rewards]]\nfn = { name = "jpeg" }\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"must hold .* only, found .'rewards', 'seed'"):
        begun(origin, 1, str(file))
    file.write_text("rewards = []\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="rewards"):
        begun(origin, 1, str(file))


def test_a_setting_without_effect_is_a_mistake_if_the_fork_names_it(origin: Run) -> None:
    with pytest.raises(ConfigError, match=r"train\.ema_decay"):
        begun(origin, 1, overrides=("train.ema_decay=0.5",))


def test_a_fork_on_s3_refers_to_existing_artifacts(recipe: Any, s3_url: str) -> None:
    url = f"{s3_url}/forks"
    origin = Run(freeze(plan_of(Settings(recipe(), url, "hand")), url), url)
    make_all(origin)
    fork = begun(origin, 1, overrides=FASTER)
    make_all(fork)
    assert made(fork.slots.policy(1)).slot == origin.slots.policy(1)
    assert made(fork.slots.policy(2)).slot == fork.slots.policy(2)
    assert faults(fork) == faults(origin)


@pytest.mark.parametrize("run_id", ["a/b", "läuf", "runs"])
def test_a_fork_with_a_wrong_name_is_refused(origin: Run, run_id: str) -> None:
    with pytest.raises(ConfigError, match=f"run id '{run_id}' "):
        plan_of_fork(ForkOf(origin.plan.run_id, 1), Settings("", origin.store_url, run_id))
