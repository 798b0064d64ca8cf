"""Runs whose code was upgraded since: nothing that was committed is ended unless somebody asked for it."""

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from flows.cli import app as cli
from flows.library.exports import export
from flows.library.states import states
from flows.operations.rerun import rerun
from flows.operations.upgrades import settled
from flows.planning import requests
from flows.planning.plan import PLAN, PLAN_FILE, Settings, freeze, plan_of, read_plan
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.planning.versions import newest
from stages import contracts
from stages.artifacts.slots import current_of
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.reporting.contracts import Report
from tests.flows.by_hand import MONITORED as MONITORED
from tests.flows.by_hand import make_all, planned_run

OLD = contracts.Update.version
NEW = OLD + 1
REFUSAL = f"""\
run hand has artifacts of other stage versions than this code has: update {OLD} -> {NEW}
of another version: 2 artifacts, 60 s to make again
  iteration-0000/update        30 s
  iteration-0001/update        30 s
stale if those come out differently: 10 artifacts, 51 s to make again
  iteration-0001/rollout       10 s
  iteration-0001/reward-jpeg   3 s
  iteration-0001/reward-ocr    3 s
  iteration-0001/fragment      0 s
  policy-0002/export           4 s
  policy-0002/evaluate         20 s
  policy-0002/evaluate-jpeg    3 s
  policy-0002/evaluate-ocr     3 s
  policy-0002/fragment         0 s
  report                       5 s
nothing was changed; continue with the code that made them, make all again with --remake, or end single ones, such as \
the first with `cosmos-flows rerun hand --stage update --iteration 0 --store STORE`"""


@pytest.fixture
def finished(recipe, tmp_path) -> Run:
    """A run that was made to its end by the version before."""
    run = planned_run(recipe, tmp_path)
    make_all(run)
    return run


@pytest.fixture
def upgrade(monkeypatch):
    """Raise the version of a stage, as whoever changes its bits does."""

    def raise_version(stage: type[contracts.StageConfig]) -> None:
        monkeypatch.setattr(stage, "version", stage.version + 1)

    return raise_version


def resumed(run: Run) -> Run:
    """The run as its command finds it."""
    path = run.store_url.removesuffix("store") + "tiny.toml"
    return Run(freeze(plan_of(Settings(path, run.store_url, run_id="hand")), run.store_url), run.store_url)


def ended(run: Run) -> list[str]:
    """Every generation that was ended."""
    return sorted(name for name in store.listed(run.store_url) if "/invalidated." in name)


def test_a_finished_run_is_not_made_again_by_a_newer_version_but_refused_with_the_cost(finished, upgrade):
    upgrade(contracts.Update)
    with pytest.raises(ConfigError) as caught:
        settled(resumed(finished), remake=False)
    assert str(caught.value) == REFUSAL.replace("STORE", finished.store_url)
    assert caught.value.exit_code == 64
    assert ended(finished) == []
    assert newest(finished.url, "hand") is None


def test_artifacts_of_the_pinned_versions_are_current_for_every_command(finished, upgrade, tmp_path):
    for stage in (contracts.Update, contracts.Embed, Report):
        upgrade(stage)
    assert {state.word for state in states(read_run(finished.store_url, "hand"))} == {"stands"}
    assert export(finished.store_url, "hand", str(tmp_path / "out")).copied[0].policy == 2
    assert CliRunner().invoke(cli.app, ["status", "hand", "--store", finished.store_url]).exit_code == 0


def test_with_remake_changed_stages_are_made_again_and_equal_results_stay_current(finished, upgrade):
    upgrade(contracts.Update)
    make_all(settled(resumed(finished), remake=True))
    slots = [f"iterations/000{k}/update/invalidated.1.json" for k in (0, 1)]
    assert ended(finished) == [f"runs/hand/{slot}" for slot in slots]
    _, manifest = current_of(finished.slots.policy(1))
    assert manifest is not None
    assert (manifest.version, manifest.generation) == (NEW, 2)
    # From now on it is a run of the new version: its command needs no flag, and everything is current.
    assert settled(resumed(finished), remake=False).plan.stage_versions["update"] == NEW
    assert {state.word for state in states(read_run(finished.store_url, "hand"))} == {"stands"}


def test_a_remake_that_was_killed_goes_on_without_being_asked_again(finished, upgrade):
    upgrade(contracts.Update)
    settled(resumed(finished), remake=True)
    words = {state.step.name: state.why for state in states(read_run(finished.store_url, "hand"))}
    assert words["iteration-0000/update"] == f"the settings of update changed (stage version {OLD} -> {NEW})"
    make_all(settled(resumed(finished), remake=False))
    assert len(ended(finished)) == 2


def test_rerun_of_all_artifacts_of_a_changed_stage_works_like_remake(finished, upgrade):
    upgrade(contracts.Update)
    rerun(finished.store_url, "hand", "update", 1)
    with pytest.raises(ConfigError, match="of another version: 1 artifact, 30 s"):
        settled(resumed(finished), remake=False)
    rerun(finished.store_url, "hand", "update", 0)
    make_all(settled(resumed(finished), remake=False))
    assert len(ended(finished)) == 2


def test_a_stage_without_artifacts_takes_the_new_version(recipe, tmp_path, upgrade):
    run = planned_run(recipe, tmp_path)
    upgrade(contracts.Update)
    found = settled(resumed(run), remake=False)
    assert found.plan.stage_versions["update"] == NEW
    make_all(found)
    assert ended(run) == []
    assert {state.word for state in states(read_run(run.store_url, "hand"))} == {"stands"}


def test_shared_embeddings_of_a_newer_version_are_not_made_unasked(finished, upgrade):
    before = finished.prepared.embed.slot
    upgrade(contracts.Embed)
    run = resumed(finished)
    assert run.prepared.embed.slot == before
    with pytest.raises(ConfigError, match=r"embed \d -> \d\nof another version: 1 artifact, 2 s"):
        settled(run, remake=False)
    again = settled(run, remake=True)
    assert isinstance(again, Run)
    assert again.prepared.embed.slot != before


def test_older_code_is_refused_like_newer_code(finished, monkeypatch):
    monkeypatch.setattr(Report, "version", Report.version - 1)
    with pytest.raises(ConfigError, match=rf"report {Report.version + 1} -> {Report.version}"):
        settled(resumed(finished), remake=False)


def test_a_process_of_another_version_refuses_the_request(finished, upgrade, tmp_path):
    request = requests.update(finished, 0)
    upgrade(contracts.Update)
    with pytest.raises(ConfigError, match=f"this code has version {NEW} of update, the request needs version {OLD}"):
        execute(request, Execution(), Outcome(tmp_path, 0))


def test_the_record_of_versions_is_sealed_and_in_order(finished, upgrade):
    for _ in range(2):
        upgrade(contracts.Update)
        settled(resumed(finished), remake=True)
    url, second = (store.join(finished.url, f"versions.{n}.json") for n in (1, 2))
    data = store.read(url)
    found = newest(finished.url, "hand")
    assert found is not None
    assert (found.number, found.versions["update"]) == (2, OLD + 2)
    for damaged in (data.replace(b'"update":', b'"updata":'), store.read(second), b"{"):
        store.write(url, damaged)
        with pytest.raises(ArtifactError, match=r"versions\.1\.json"):
            read_plan(finished.store_url, "hand")
    store.remove(url)
    with pytest.raises(ArtifactError, match=r"versions\.1\.json is missing, but there is .*versions\.2\.json"):
        read_plan(finished.store_url, "hand")


def test_a_plan_of_a_newer_form_is_refused_in_plain_words(finished):
    url = store.join(finished.url, "plan.json")
    body = unseal(store.read(url), "plan", url)
    store.write(url, seal("plan", body | {"a setting of tomorrow": 1}))
    asked = CliRunner().invoke(cli.app, ["status", "hand", "--store", finished.store_url])
    assert asked.exit_code == 65
    assert asked.stderr.startswith(f"{url} does not hold the record that this version expects")
    assert "a setting of tomorrow" in asked.stderr


def test_a_run_of_a_removed_launcher_is_read_and_shown(finished):
    """Its plan has fields that this version has not: machines decide no result."""
    url = store.join(finished.url, PLAN_FILE)
    body = unseal(store.read(url), PLAN, url)
    held = {"hold": False, "idle_s": 600.0, "query_s": 10.0, "stages": {"update": {"nodes": 2, "time_limit_min": 9}}}
    gone = {"launcher": "kubernetes", "slurm": held, "kubernetes": {"image": "x", "nodes": 2} | held}
    body["recipe"]["launch"] |= gone
    store.remove(url)
    store.write(url, seal(PLAN, body))
    launch = read_plan(finished.store_url, "hand").recipe.launch
    assert (launch.launcher, launch.kubernetes.image) == ("local", "x")
    assert launch.slurm.stages["update"].nodes == 2
    assert CliRunner().invoke(cli.app, ["status", "hand", "--store", finished.store_url]).exit_code == 0
