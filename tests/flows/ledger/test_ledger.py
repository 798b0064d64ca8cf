"""The ledger: what attempts cost, also killed ones, in sums, limits and estimates."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from cosmos_rl_core.config.clusters import PricesConfig
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ArtifactError, BudgetError, StageError, StoppedError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from cosmos_rl_core.weights import counting
from flows.auditing.audit import audit
from flows.heads.heads import Heads, read_heads
from flows.ledger import pages
from flows.ledger.budget import Budget
from flows.ledger.estimates import estimate
from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry
from flows.ledger.shape import shape_of
from flows.library import open_run
from flows.planning import requests
from flows.planning.run import Run
from flows.post_train import post_train
from flows.running.display import Display
from flows.running.progress import Reporter
from flows.running.wave import Waves
from flows.sizes import costs
from stages.artifacts.records import place_of
from stages.execution.spending import Spent
from tests.flows.allocated import Work
from tests.flows.by_hand import SECONDS, SFT, SMALL_SFT, make_all
from tests.hand_made import planned

SPENT = Spent(interpreter_s=0.5, imports_s=0.25, load_s=0.125, first_step_s=0.125, busy_s=0.5, waiting_s=0.25)
HOUR_S = 3600.0


def entry(
    stage: str,
    slot: str,
    seconds: float,
    outcome: str = "made",
    devices: int = 1,
    read_bytes: int = 0,
    written_bytes: int = 0,
) -> Entry:
    found = SPENT.model_copy(update={"read_bytes": read_bytes, "written_bytes": written_bytes})
    return Entry(stage=stage, slot=slot, devices=devices, queued_s=1.0, seconds=seconds, outcome=outcome, spent=found)


def written(run: Run, seconds: dict[str, float], until: str = "") -> Ledger:
    """The ledger of a run whose waves took so many seconds by kind, up to a wave."""
    ledger = Ledger(run.url, shape_of(run.plan), [].append)
    for wave in post_train(run):
        if wave.name == until:
            break
        found = [
            entry(step.kind, place_of(step.slot), seconds[step.kind], devices=int(step.kind != "reward"))
            for step in wave.steps
        ]
        page = ledger.page(wave.name, time.monotonic() - max(seconds[step.kind] for step in wave.steps))
        page.turn(lambda found=found: found)
        page.close(found)
    return ledger


def test_costs_add_up_by_stage_iteration_and_sample(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    written(run, SECONDS)
    found = open_run("hand", run.store_url).cost()
    assert [(one.name, len(one.entries), one.device_s) for one in found.stages] == [
        ("policy", 1, 1.0),
        ("embed", 1, 2.0),
        ("export", 2, 8.0),
        ("rollout", 2, 20.0),
        ("reward-ocr", 2, 0.0),
        ("update", 2, 60.0),
        ("fragment", 2, 0.0),
        ("report", 1, 5.0),
    ]
    assert [(one.name, one.device_s) for one in found.iterations] == [("0", 40.0), ("1", 40.0)]
    assert found.iterations[0].wall_s == pytest.approx(43.0, abs=0.1)
    assert found.total.device_s == 96.0
    said = found.as_json()
    assert said["per_iteration"]["device_s"] == 40.0
    assert said["per_sample"]["device_s"] == 5.0
    assert (said["total"]["busy_s"], said["total"]["load_s"]) == (0.5 * 13, 0.125 * 13)
    newest = pages.newest_page(run.url)
    assert newest is not None
    assert (newest.totals.device_s, newest.totals.iterations_device_s, newest.totals.attempts) == (96.0, 80.0, 13)


def test_samples_of_supervised_training_are_counted_by_optimizer_steps(tmp_path):
    run = planned(SFT, tmp_path, run_id="hand", overrides=(*SMALL_SFT, "train.train_batch_per_replica=8"))
    written(run, SECONDS)
    said = open_run("hand", run.store_url).cost().as_json()
    # Two steps of 8 samples, by one process on one device.
    assert (said["samples_per_iteration"], said["per_sample"]["device_s"]) == (16, SECONDS["finetune"] / 16)


def test_prices_count_devices_processes_and_bytes(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    ledger = Ledger(run.url, "", [].append)
    page = ledger.page("iteration-0000/rollout", time.monotonic())
    found = [entry("rollout", "runs/hand/iterations/0000/rollout", HOUR_S, "made", 4, 3 * 10**9, 10**9)]
    found += [entry("update", "runs/hand/iterations/0000/update", HOUR_S / 2, "killed")]
    page.turn(lambda: found)
    prices = PricesConfig(
        currency="EUR",
        device_hour=2.0,
        stage_device_hour={"rollout": 1.0},
        process_hour=0.5,
        read_gb=0.1,
        written_gb=0.2,
    )
    said = open_run("hand", run.store_url).cost(prices).as_json()
    assert [one["price"] for one in said["stages"]] == [4 * 1.0 + 0.5 + 0.3 + 0.2, 0.5 * 2.0 + 0.25]
    assert (said["currency"], said["total"]["price"], said["total"]["lost_s"]) == ("EUR", 6.25, HOUR_S / 2)
    assert said["total"]["retries"] == 1


def test_the_command_reads_prices_and_names_a_wrong_field(recipe, tmp_path, main):
    run = planned(recipe(), tmp_path, run_id="hand")
    words = ("cost", "hand", "--store", run.store_url)
    code, _, error = main(*words)
    assert (code, "has no pages" in error) == (64, True)
    written(run, SECONDS)
    prices = tmp_path / "prices.toml"
    prices.write_text("device_hour = 36", encoding="utf-8")
    code, out, _ = main(*words, "--prices", str(prices), "--json")
    assert (code, json.loads(out)["total"]["price"]) == (0, 0.96)
    code, out, _ = main(*words, "--prices", str(prices))
    assert out.splitlines()[0].split()[-1] == "USD"
    assert out.splitlines()[9].split()[0] == "all"
    assert out.splitlines()[9].split()[-1] == "0.96"
    prices.write_text("device_hours = 36", encoding="utf-8")
    code, _, error = main(*words, "--prices", str(prices))
    assert (code, "did you mean 'device_hour'?" in error) == (64, True)


def test_attempts_of_a_killed_flow_count_with_their_seconds(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    page = Ledger(run.url, "", [].append).page("iteration-0000/rollout", time.monotonic() - 7.0)
    page.turn(lambda: [entry("rollout", "runs/hand/iterations/0000/rollout", 7.0, "open")])
    after = Ledger(run.url, "", [].append)
    assert (after.totals.device_s, after.totals.failed, after.iterations) == (7.0, 1, {0: 7.0})
    again = after.page("iteration-0000/rollout", time.monotonic())
    again.turn(lambda: [entry("rollout", "runs/hand/iterations/0000/rollout", 2.0)])
    assert [(page.number, page.state, page.before.device_s) for page in pages.pages(run.url)] == [
        (0, "open", 0.0),
        (1, "open", 7.0),
    ]
    assert after.iterations == {0: 9.0}


def test_start_up_is_the_time_before_the_first_step_and_counts_in_device_hours(recipe, tmp_path, main):
    run = planned(recipe(), tmp_path, run_id="hand")
    page = Ledger(run.url, "", [].append).page("iteration-0000/rollout", time.monotonic())
    page.turn(lambda: [entry("rollout", "runs/hand/iterations/0000/rollout", 1800.0, devices=4)])
    found = open_run("hand", run.store_url).cost()
    said = found.as_json()["total"]
    # Interpreter, imports and load; the first step is work.
    assert (said["startup_s"], said["startup_device_s"], said["startup_unknown"]) == (0.875, 3.5, 0)
    assert said["device_s"] == 7200.0
    assert found.as_json()["per_iteration"]["startup_device_s"] == 3.5
    code, out, _ = main("cost", "hand", "--store", run.store_url)
    assert code == 0
    assert "2 h of device time, of which start-up 3.5 s" in out
    assert "of device time, of which start-up 3.5 s\na sample, of" in out
    start_up = out[out.index("\nstart-up") :].splitlines()
    assert start_up[1].split() == ["start-up", "interpreter", "imports", "load", "devices"]
    assert start_up[2].split() == ["rollout", "0.5", "s", "0.2", "s", "0.1", "s", "3.5", "s"]
    first, rollout = out.splitlines()[:2]
    assert re.sub(" +", " ", first) == (
        "stage tries queued start-up first step busy waiting other devices read written"
    )
    assert rollout.split()[4:10] == ["0.9", "s", "0.1", "s", "0.5", "s"]


def test_an_attempt_at_work_is_not_lost(recipe, tmp_path, main):
    run = planned(recipe(), tmp_path, run_id="hand")
    wave = "iteration-0000/rollout"
    page = Ledger(run.url, "", [].append).page(wave, time.monotonic())
    page.turn(lambda: [entry("rollout", "runs/hand/iterations/0000/rollout", 5.0, "open")])
    with run.lease(), Reporter(run.url) as reporter:
        reporter.working(wave, [])
        said = open_run("hand", run.store_url).cost().as_json()["total"]
        assert (said["retries"], said["lost_s"], said["at_work"], said["attempts"]) == (0, 0, 1, 1)
        _, out, _ = main("cost", "hand", "--store", run.store_url)
        assert out.endswith("1 attempt is at work\n")
        assert " lost " not in out
    said = open_run("hand", run.store_url).cost().as_json()["total"]  # its flow was killed
    assert (said["retries"], said["lost_s"], said["at_work"]) == (1, 5.0, 0)


def test_an_unknown_start_up_is_absent(recipe, tmp_path, main):
    run = planned(recipe(), tmp_path, run_id="hand")
    ledger = Ledger(run.url, "", [].append)
    page = ledger.page("iteration-0000/rollout", time.monotonic())
    # As a process that was killed before it reported anything, and as one of a ledger from before that was recorded.
    killed = {"stage": "rollout", "slot": "runs/hand/iterations/0000/rollout", "devices": 1, "seconds": 60.0}
    page.turn(lambda: [Entry.model_validate(killed | {"outcome": "killed"})])
    found = open_run("hand", run.store_url).cost()
    assert found.total.entries[0].startup_s is None
    said = found.as_json()
    assert not {"startup_s", "startup_device_s"} & (said["total"].keys() | said["per_iteration"].keys())
    assert said["total"]["startup_unknown"] == 1
    _, out, _ = main("cost", "hand", "--store", run.store_url)
    assert "60 s of device time, their start-up is not known" in out
    again = ledger.page("iteration-0000/rollout", time.monotonic())
    # Without a device it has no part in device time.
    others = [Entry.model_validate(killed | {"devices": 0})]
    again.turn(lambda: [entry("rollout", "runs/hand/iterations/0000/rollout", 60.0), *others])
    said = open_run("hand", run.store_url).cost().as_json()["total"]
    assert (said["startup_device_s"], said["startup_unknown"], said["device_s"]) == (0.875, 2, 120.0)
    _, out, _ = main("cost", "hand", "--store", run.store_url)
    assert "2 min of device time, of which start-up 0.875 s; unknown for 1 attempt" in out


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (StoppedError("stopped by ann; its command continues it"), "stopped by ann; its command continues it"),
    ],
)
def test_an_attempt_that_its_flow_stopped_says_what_stopped_the_flow(recipe, tmp_path, error, why):
    run = planned(recipe(), tmp_path, run_id="hand")
    page = Ledger(run.url, "", [].append).page("iteration-0000/rollout+more", time.monotonic())
    slots = [f"runs/hand/iterations/0000/{name}" for name in ("rollout", "more")]
    page.turn(lambda: [entry("rollout", slot, 1.0, "open") for slot in slots])

    def end() -> None:
        try:
            raise error
        finally:
            page.close([entry("rollout", slots[0], 2.0, "stopped"), entry("rollout", slots[1], 2.0)])

    with pytest.raises(type(error)):
        end()
    (found,) = pages.pages(run.url)
    assert [(one.outcome, one.why) for one in found.entries] == [("stopped", why), ("made", "")]


@pytest.mark.processes
def test_a_killed_attempt_and_the_next_one_both_count(tmp_path, monkeypatch):
    work = Work(tmp_path, monkeypatch)
    ledger = Ledger(work.run_url, "", [].append)
    waves = Waves(work.run_url, LaunchConfig(), Display(), ledger=ledger)
    killed: list[int] = []

    def kill() -> None:
        if not killed and (ran := work.ran()):
            killed.append(int(ran[0][-1]))
            os.kill(killed[0], signal.SIGKILL)
            work.go()

    waves.check = kill
    with pytest.raises(StageError, match="killed"):
        waves.make("report", [work.request("report")])
    waves.make("report", [work.request("report")])
    waves.close()
    first, second = (page.entries[0] for page in pages.pages(work.run_url))
    assert (first.outcome, second.outcome) == ("killed", "made")
    assert (first.devices, first.slot) == (0, place_of(work.request("report").slot))
    assert 0 < first.seconds < 60
    assert 0 < second.spent.interpreter_s < second.seconds
    assert second.spent.written_bytes > 0
    assert second.spent.seconds == pytest.approx(second.seconds - second.outside_s, abs=0.02)
    assert ledger.totals.process_s == pytest.approx(first.seconds + second.seconds, abs=0.002)


@pytest.mark.processes
def test_an_attempt_that_ends_with_its_flow_counts_and_names_the_cause(tmp_path, monkeypatch):
    work = Work(tmp_path, monkeypatch)
    waves = Waves(work.run_url, LaunchConfig(), Display(), ledger=Ledger(work.run_url, "", [].append))

    def stop() -> None:
        if work.ran():
            raise StoppedError("stopped by ann")

    waves.check = stop
    with pytest.raises(StoppedError):
        waves.make("report", [work.request("report")])
    waves.close()
    ((only,),) = (page.entries for page in pages.pages(work.run_url))
    assert (only.outcome, only.why) == ("stopped", "stopped by ann")


def with_limit(run: Run, hours: float | None) -> Run:
    train = run.recipe.train.model_copy(update={"max_gpu_hours": hours})
    recipe = run.recipe.model_copy(update={"train": train})
    return Run(run.plan.model_copy(update={"recipe": recipe}), run.store_url)


def test_a_run_stops_before_the_iteration_that_would_exceed_its_device_hours(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    ledger = written(run, SECONDS, until="iteration-0001/rollout")
    # 47 s are spent, and iteration 0 took 40 s.
    rollout = requests.policy(run)
    with pytest.raises(BudgetError, match=r"iteration 1 would exceed train\.max_gpu_hours = 0\.024") as stopped:
        Budget(with_limit(run, 0.024), ledger).check("iteration-0001/rollout", [rollout])
    assert (stopped.value.exit_code, stopped.value.retryable) == (76, False)
    Budget(with_limit(run, 0.0242), ledger).check("iteration-0001/rollout", [rollout])
    Budget(with_limit(run, None), ledger).check("iteration-0001/rollout", [rollout])
    Budget(with_limit(run, 0.001), ledger).check("policy-0000/export", [rollout])


def test_a_limit_names_no_cost_of_an_iteration_before_one_is_known(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    ledger = written(run, SECONDS, until="iteration-0000/rollout")
    with pytest.raises(BudgetError, match=r"iteration 0 would exceed .* device hours are spent; everything made stays"):
        Budget(with_limit(run, 0.0001), ledger).check("iteration-0000/rollout", [requests.policy(run)])


def test_the_rest_of_a_begun_iteration_has_to_fit_into_the_limit(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    ledger = written(run, SECONDS, until="iteration-0001/update+fragment")
    # 57 s are spent, 10 of them in iteration 1, whose other 30 have room in 87 s, but not in 86.
    Budget(with_limit(run, 87.01 / HOUR_S), ledger).check("iteration-0001/update+fragment", [requests.policy(run)])
    with pytest.raises(BudgetError):
        Budget(with_limit(run, 86.0 / HOUR_S), ledger).check("iteration-0001/update+fragment", [requests.policy(run)])


def test_current_artifacts_need_no_device_hours(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    asked = make_all(run)
    ledger = written(run, SECONDS)
    current = asked[run.slots.iteration(1, "rollout")]
    Budget(with_limit(run, 0.001), ledger).check("iteration-0001/rollout", [current])


def test_an_earlier_run_of_the_same_shape_predicts_the_time_and_cost_of_a_run(recipe, tmp_path, main):
    written(planned(recipe(), tmp_path, run_id="first"), SECONDS)
    words = ("--store", str(tmp_path / "store"))
    longer = planned(recipe(), tmp_path, run_id="longer", overrides=("train.num_iterations=4", "train.optm_lr=0.01"))
    found = estimate(longer.plan, longer.store_url)
    assert found is not None
    assert (found.like, found.iteration_device_s, found.total_device_s) == ("first", 40.0, 1 + 2 + 8 + 4 * 40 + 5)
    assert (found.iteration_s, found.unknown) == (pytest.approx(43.0, abs=0.1), ())
    code, out, _ = main("plan", recipe(), *words)
    assert code == 0
    # With what writing its pages takes on a busy machine.
    assert re.search(r"an iteration like first's: 43\.\d s, 40 s of device time", out)
    larger = planned(recipe(), tmp_path, run_id="larger", overrides=("train.train_batch_per_replica=16",))
    assert estimate(larger.plan, larger.store_url) is None
    # Without iterations of its own, the limit asks the other run too.
    with pytest.raises(BudgetError, match=r"0 device hours are spent, and an iteration takes 0\.0111"):
        Budget(with_limit(longer, 0.011), Ledger(longer.url, shape_of(longer.plan), [].append)).check(
            "iteration-0000/rollout", [requests.policy(longer)]
        )


def test_a_shape_follows_from_the_architecture_without_another_process(recipe, tmp_path):
    plan = planned(recipe(), tmp_path, run_id="hand").plan
    base = shutil.copytree(costs.base_path(plan.recipe), tmp_path / "base", ignore=shutil.ignore_patterns("*.safe*"))
    policy = plan.recipe.policy.model_copy(update={"model_name_or_path": str(base)})
    elsewhere = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"policy": policy})})
    counted = counting.forward_flops.cache_info().misses
    assert shape_of(elsewhere) == shape_of(plan)
    for component, changed in (("transformer", {"num_layers": 9}), ("vae", {"latent_channels": 9})):
        config = base / component / "config.json"
        before = config.read_bytes()
        config.write_text(json.dumps(json.loads(before) | changed), encoding="utf-8")
        assert shape_of(elsewhere) != shape_of(plan)
        config.write_bytes(before)
    assert counting.forward_flops.cache_info().misses == counted


def test_heads_name_pages_of_the_ledger_and_an_audit_compares_them(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    written(run, SECONDS)
    Heads(run).write(None)
    named = {path for head, _ in read_heads(run.url) for path in head.records}
    assert {f"runs/hand/ledger/{number:05d}.json" for number in range(11)} <= named

    def faults() -> set[tuple[str, str]]:
        return {(fault.file, fault.field) for fault in audit(run.store_url, "hand").faults}

    before = faults()
    # Every stage of a real run pins its numerics; what runs share was made by another run.
    assert {file for file, _ in before if file.startswith("runs/hand/numerics")} == set()
    url = pages.url_of(run.url, 3)
    data = store.read(url)
    body = unseal(data, "ledger", url)
    body["entries"][0]["seconds"] += 1
    store.write(url, seal("ledger", body))
    assert faults() - before == {("runs/hand/ledger/00003.json", "bytes"), ("runs/hand/ledger/00004.json", "before")}
    store.remove(url)
    assert faults() - before == {("runs/hand/ledger/00003.json", "file")}
    with pytest.raises(ArtifactError, match="was written as page 3 of runs/hand"):
        pages.Page.unsealed(data, run.url, 4)
    assert Path(run.url, "ledger").is_dir()
