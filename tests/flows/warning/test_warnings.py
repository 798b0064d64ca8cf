"""A run whose scores rise in one iteration: what becomes of it, and what people say to it. Stages are made by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.config.early_warning import DEFAULTS, DRIFT, STATISTICS
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.errors import ApprovalError, ArtifactError, ConfigError, WarningError
from cosmos_rl_core.rewards import ocr
from cosmos_rl_core.storage import store
from flows.explaining.explain import explain_plan
from flows.library import open_run
from flows.operations.upgrades import settled
from flows.planning.base import AnyRun
from flows.planning.plan import Settings, freeze, plan_of, read_plan
from flows.planning.run import Run
from flows.session.loop import make
from flows.warning.decisions import decisions_on
from flows.warning.gate import pass_gate
from flows.warning.warnings import Warned
from stages.artifacts.generations import current_generation, invalidate
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest, current_of
from stages.contracts import Reward
from tests import hand_made
from tests.flows.by_hand import FILES
from tests.stages.conftest import make as make_stage
from tests.stages.made_up import sample_set, score_files, score_table

LIMITS = """statistics = false
on_trip = "ON_TRIP"
limits = [{ reward = "ocr", rise = 4.0 }]
"""
CALM, HIGH = (0.0, 0.5), (4.0, 4.5)
"""Scores of all samples of the first and third prompt of an iteration, and of the second and fourth."""
FOUR_PROMPTS = "train.train_batch_per_replica=16", "train.train_policy.batch_size_per_optimize=8"
"""Settings of an iteration of four prompts. With fewer prompts, limits on drift are not judged."""


class Loop:
    """The run as `cosmos-flows run` makes it. Scores of iterations are given, warnings are judged by the real stage."""

    def __init__(self, path: str, folder: Path) -> None:
        self.path, self.folder, self.store = path, folder, str(folder / "store")
        self.scores: dict[int, tuple[float, float]] = {1: HIGH}
        self.lengths: dict[int, float] = {}
        """Another number that the reward gives for every sample of an iteration, by iteration."""
        self.served = ""
        """Digest of the scorer of a service, stored with every score."""
        self.notes: list[str] = []
        self.made: list[str] = []
        self.stop_before = ""
        """Step before which the process is ended."""

    def run(self, *overrides: str) -> AnyRun:
        """Go on to the end, or to where the run ends before it."""
        plan = plan_of(Settings(self.path, self.store, "hand", overrides=(*FOUR_PROMPTS, *overrides)))
        run = settled(Run(freeze(plan, self.store), self.store), remake=False)
        self.made.clear()

        def launch(name: str, *requests: Request) -> list[Manifest]:
            manifests = [current_manifest(request) or self.make(request, name) for request in requests]
            pass_gate(run, manifests, self.notes.append)
            return manifests

        make(run, launch)
        return run

    def make(self, request: Request, name: str) -> Manifest:
        if name == self.stop_before:
            raise KeyboardInterrupt
        self.made.append(name)
        if request.stage == "warn":
            return make_stage(request, self.folder)
        if request.stage not in ("rollout", "reward") or request.iteration is None:
            data = f"{request.stage} {request.iteration}".encode()
            return hand_made.make(request, dict.fromkeys(FILES.get(request.stage, ("current/w",)), data))
        prompts = read_plan(self.store, "hand").prompts_of(request.iteration)
        if request.stage == "rollout":
            return hand_made.make(request, sample_set(prompts, 2, 1, request.iteration))
        each = 2 * self.scores.get(request.iteration, CALM)
        scores = [score + noise for score in each for noise in (0.0, 0.125)]
        table = score_table(prompts, 2, scores)
        if self.lengths:
            table["details"] = json.dumps({"length": self.lengths.get(request.iteration, 2.0)})
        if self.served:
            table["scorer"] = f"{request.settings(Reward).scorer}, {self.served}"
        return hand_made.make(request, score_files(table), ocr=sum(scores) / len(scores))

    @property
    def warning(self) -> Manifest:
        """The warning of iteration 1."""
        _, manifest = current_of(f"{self.store}/runs/hand/iterations/0001/warn")
        assert manifest is not None
        return manifest

    def contents(self) -> dict[str, str]:
        """The content of every artifact, without warnings."""
        found = {state.step.name: state.manifest for state in open_run("hand", self.store).now().states}
        return {
            name: m.content
            for name, m in found.items()
            if m is not None and m.stage not in ("warn", "fragment", "report")
        }


@pytest.fixture
def loop(recipe, tmp_path: Path) -> Callable[[str], Loop]:
    """A run with a limit, and with what should follow when it trips."""
    return lambda on_trip: Loop(recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", on_trip))), tmp_path)


def test_marked_scores_are_noted_and_change_nothing_of_the_run(loop, recipe, tmp_path: Path):
    marked = loop("mark")
    marked.run()
    (decision,) = decisions_on(marked.warning)
    assert (decision.word, decision.by, decision.evidence) == ("marked", "the recipe", marked.warning.content)
    assert decision.tripped[0].startswith("ocr rose from 0.3125 to 4.312")
    assert "iteration 1 exceeds its limits" in marked.notes[0]
    # It is decided once.
    marked.run()
    assert (marked.made, len(decisions_on(marked.warning))) == ([], 1)
    plain = Loop(recipe(), tmp_path / "plain")
    plain.run()
    assert not any(name.endswith("/warn") for name in plain.made)
    assert marked.contents() == plain.contents()


def test_a_suspended_run_stops_at_the_same_place_until_somebody_approves(loop, main):
    suspended = loop("suspend")
    for made in (True, False):
        with pytest.raises(ApprovalError, match="cosmos-flows approve hand") as asked:
            suspended.run()
        assert asked.value.exit_code == 77
        assert asked.value.evidence == suspended.warning.content
        assert (suspended.made[-1:] == ["iteration-0001/warn"]) == made
    assert [decision.word for decision in decisions_on(suspended.warning)] == ["suspended"]
    code, out, _ = main("approve", "hand", "--store", suspended.store, "--note", "as the prompts ask for")
    assert (code, suspended.warning.content[:12] in out) == (0, True)
    last = decisions_on(suspended.warning)[-1]
    assert (last.word, last.note, last.number) == ("approved", "as the prompts ask for", 2)
    assert "@" in last.by
    suspended.run()
    assert suspended.made[0] == "iteration-0001/update+fragment"
    assert suspended.made[-1] == "report"
    code, out, _ = main("approve", "hand", "--store", suspended.store)
    assert (code, "was approved already" in out) == (0, True)


def test_an_approved_run_has_the_bits_of_one_without_limits(loop, recipe, main, tmp_path: Path):
    suspended = loop("suspend")
    with pytest.raises(ApprovalError):
        suspended.run()
    main("approve", "hand", "--store", suspended.store)
    suspended.run()
    plain = Loop(recipe(), tmp_path / "plain")
    plain.run()
    assert suspended.contents() == plain.contents()


def test_other_scores_ask_again_and_equal_ones_do_not(loop, main):
    suspended = loop("suspend")
    with pytest.raises(ApprovalError):
        suspended.run()
    first = suspended.warning
    main("approve", "hand", "--store", suspended.store)
    rewarded = f"{suspended.store}/runs/hand/iterations/0001/reward-ocr"
    invalidate(rewarded, 1, "scored again")
    suspended.run()
    assert suspended.warning == first
    invalidate(rewarded, 2, "scored again")
    suspended.scores[1] = (4.5, 5.0)
    with pytest.raises(ApprovalError, match=r"ocr rose from 0\.3125 to 4\.812"):
        suspended.run()
    assert suspended.warning.content != first.content
    main("approve", "hand", "--store", suspended.store)
    suspended.run()
    assert suspended.made[:1] == ["iteration-0001/update+fragment"]


def test_another_number_with_equal_scores_asks_again(loop, main, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ocr.Options, "facts", Facts(scores={"ocr": "in [0, 1]", "length": "characters"}))
    suspended = loop("suspend")
    suspended.scores.clear()
    suspended.lengths[1] = 3.0
    limits = 'early_warning.limits=[{ reward = "ocr", score = "length", above = 2.5 }]'
    with pytest.raises(ApprovalError, match="length of ocr is 3"):
        suspended.run(limits)
    main("approve", "hand", "--store", suspended.store)
    first, rewarded = suspended.warning, f"{suspended.store}/runs/hand/iterations/0001/reward-ocr"
    suspended.run(limits)
    # Calm for the limits, and yet other numbers than those that were approved.
    for generation, length in ((1, 3.25), (2, 2.25)):
        invalidate(rewarded, generation, "scored again")
        suspended.lengths[1] = length
        if length > 2.5:
            with pytest.raises(ApprovalError, match=r"length of ocr is 3\.25"):
                suspended.run(limits)
            assert suspended.warning.content != first.content
        else:
            suspended.run(limits)
            assert Warned.of(suspended.warning) is None
    # The scores that are trained on stayed, so what was made of them is current. The fragment shows the others too.
    assert [name for name in suspended.made if name.startswith("iteration-0001")] == [
        "iteration-0001/reward-ocr",
        "iteration-0001/warn",
        "iteration-0001/update+fragment",
    ]
    slots = (f"{suspended.store}/runs/hand/iterations/0001/{stage}" for stage in ("update", "fragment"))
    assert [current_generation(slot) for slot in slots] == [1, 2]


def test_a_marked_iteration_is_suspended_before_its_update_if_the_recipe_now_suspends(loop, main):
    marked = loop("mark")
    marked.stop_before = "iteration-0001/update+fragment"
    with pytest.raises(KeyboardInterrupt):
        marked.run()
    marked.stop_before = ""
    with pytest.raises(ApprovalError, match="the run is suspended"):
        marked.run("early_warning.on_trip=suspend")
    assert [decision.word for decision in decisions_on(marked.warning)] == ["marked", "suspended"]
    main("approve", "hand", "--store", marked.store)
    marked.run("early_warning.on_trip=suspend")
    assert marked.made[0] == "iteration-0001/update+fragment"


@pytest.mark.parametrize("on_trip", ["suspend", "stop"])
def test_a_marked_iteration_stays_decided_if_its_update_was_made(loop, on_trip: str):
    marked = loop("mark")
    marked.run()
    marked.run(f"early_warning.on_trip={on_trip}")
    assert marked.made == []
    assert [decision.word for decision in decisions_on(marked.warning)] == ["marked"]


def test_a_stopped_run_is_failed_until_its_recipe_says_otherwise(loop, main):
    stopped = loop("stop")
    for _ in range(2):
        with pytest.raises(WarningError, match="on_trip = 'stop'") as end:
            stopped.run()
        assert (end.value.exit_code, end.value.retryable) == (65, False)
    assert [decision.word for decision in decisions_on(stopped.warning)] == ["stopped"]
    code, _, err = main("approve", "hand", "--store", stopped.store)
    assert (code, "which no approval changes" in err) == (64, True)
    judged = stopped.warning
    with pytest.raises(ApprovalError):
        stopped.run("early_warning.on_trip=suspend")
    assert stopped.warning == judged
    # The run keeps what it went on with, also for commands that read its plan.
    kept = read_plan(stopped.store, "hand").early_warning
    assert kept is not None
    assert kept.on_trip == "suspend"
    main("approve", "hand", "--store", stopped.store)
    stopped.run("early_warning.on_trip=suspend")
    assert stopped.made[-1] == "report"


def test_an_approval_counts_for_one_iteration_and_a_suspended_one_may_be_marked(loop, main):
    suspended, longer = loop("suspend"), "train.num_iterations=3"
    suspended.scores[2] = HIGH

    def decided(k: int) -> list[str]:
        _, manifest = current_of(f"{suspended.store}/runs/hand/iterations/{k:04d}/warn")
        assert manifest is not None
        return [decision.word for decision in decisions_on(manifest)]

    with pytest.raises(ApprovalError):
        suspended.run(longer)
    main("approve", "hand", "--store", suspended.store)
    with pytest.raises(ApprovalError):
        suspended.run(longer)
    assert (decided(1), decided(2)) == (["suspended", "approved"], ["suspended"])
    suspended.run(longer, "early_warning.on_trip=mark")
    assert (decided(1), decided(2)) == (["suspended", "approved"], ["suspended", "marked"])
    assert suspended.made[-1] == "report"


def test_wider_limits_judge_again_and_let_the_run_go_on(loop):
    suspended = loop("suspend")
    with pytest.raises(ApprovalError):
        suspended.run()
    suspended.run("early_warning.limits=[{ reward = 'ocr', rise = 1e6 }]")
    assert Warned.of(suspended.warning) is None
    assert open_run("hand", suspended.store).now().current == len(open_run("hand", suspended.store).now().states)


def test_nothing_to_approve_is_said_in_a_sentence(loop, main):
    marked = loop("mark")
    code, _, err = main("approve", "hand", "--store", marked.store)
    assert (code, "there is no run 'hand'" in err or "does not exist" in err) == (64, True)
    marked.scores.clear()
    marked.run()
    code, _, err = main("approve", "hand", "--store", marked.store)
    assert (code, "no limit of early_warning tripped" in err) == (64, True)


def test_a_changed_decision_is_damage(loop):
    marked = loop("mark")
    marked.run()
    url = f"{marked.warning.slot}/decisions/{marked.warning.content}/0001.json"
    data = store.read(url)
    store.write(url, data.replace(b"marked", b"maoked"))
    with pytest.raises(ArtifactError, match="damaged"):
        decisions_on(marked.warning)
    store.remove(url)
    store.write(url.removesuffix("0001.json") + "0002.json", data)
    with pytest.raises(ArtifactError, match="is missing, but a later one is there"):
        decisions_on(marked.warning)


def test_status_says_what_tripped_and_what_to_do(loop, main):
    suspended = loop("suspend")
    with pytest.raises(ApprovalError):
        suspended.run()
    _, out, _ = main("status", "hand", "--store", suspended.store)
    assert "iteration 1: ocr rose from 0.3125 to 4.312" in out
    assert "the recipe suspended the run at " in out
    assert "/records/warning.html" in out
    assert "z-scores of policy 0, iteration 1: ocr +" in out
    _, out, _ = main("status", "hand", "--store", suspended.store, "--json")
    (warned,) = json.loads(out)["warnings"]
    assert (warned["iteration"], warned["evidence"]) == (1, suspended.warning.content)
    assert warned["decisions"][0]["word"] == "suspended"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("[{ reward = 'ocr' }]", "has no bound; give it below, above, fall or rise"),
        ("[{ reward = 'oar', rise = 1 }]", "there is no reward 'oar'; known: ocr"),
        (
            "[{ reward = 'pixel_statistics', score = 'lumma', rise = 1 }]",
            "no score 'lumma'; known: luma, contrast",
        ),
        ("[{ reward = 'ocr', score = 'ocr_reward', rise = 1 }]", "ocr gives no score 'ocr_reward'; known: ocr"),
        ("[{ reward = 'ocr', rise = 1 }, { reward = 'ocr', fall = 1 }]", "two limits on 'ocr' of 'ocr'"),
        ("[{ reward = 'ocr', rise = -1 }]", "greater than 0"),
    ],
)
def test_wrong_limits_are_mistakes_of_the_recipe(recipe, tmp_path: Path, limits: str, said: str):
    given = "early_warning.statistics=true", f"early_warning.limits={limits}"
    with pytest.raises(ConfigError, match=said):
        plan_of(Settings(recipe(), str(tmp_path), overrides=given))


def test_statistics_of_pixels_are_monitored_unless_the_recipe_says_otherwise(recipe, tmp_path: Path):
    def planned(*overrides: str) -> AnyRun:
        on = recipe(("statistics = false", 'on_trip = "mark"'))
        return Run(plan_of(Settings(on, str(tmp_path), overrides=overrides)), str(tmp_path))

    run = planned()
    assert [(reward.fn.label, reward.role) for reward in run.scored] == [("ocr", "train"), (STATISTICS, "monitor")]
    assert [reward.fn.label for reward in run.recipe.rewards] == ["ocr"]
    assert run.plan.early_warning is not None
    limits = {limit.name: limit for limit in run.plan.early_warning.limits}
    # A picture has no flicker.
    assert limits.keys() == DEFAULTS.keys() - {"flicker"}
    assert (limits["group_diversity"].fall, limits["group_diversity"].rise) == (DRIFT, None)
    own = planned(f"early_warning.limits=[{{ reward = '{STATISTICS}', score = 'luma', above = 0.9 }}]")
    assert own.plan.early_warning is not None
    (luma,) = [limit for limit in own.plan.early_warning.limits if limit.name == "luma"]
    assert (luma.above, luma.rise) == (0.9, None)
    assert len(own.plan.early_warning.limits) == len(limits)
    off = planned("early_warning.statistics=false")
    assert (off.warns, off.scored) == (False, off.recipe.rewards)
    assert {one.plan.identity()["recipe"]["rewards"][0]["fn"]["name"] for one in (run, own, off)} == {"ocr"}
    assert run.plan.run_id == off.plan.run_id


@pytest.mark.parametrize(("prompts", "told"), [(1, "1 prompt"), (3, "3 prompts"), (4, "")])
def test_the_plan_says_where_iterations_have_too_few_prompts_for_a_verdict(
    recipe, tmp_path: Path, prompts: int, told: str
):
    path = recipe(("[early_warning]\nstatistics = false\n\n", ""))
    plan = plan_of(Settings(path, str(tmp_path), overrides=(f"train.train_batch_per_replica={4 * prompts}",)))
    shown = explain_plan(plan, str(tmp_path))
    line = f"no verdict on drift (fall, rise): an iteration has {told}, which takes at least 4\n"
    assert (line in shown) == bool(told)
    assert ("no verdict" in shown) == bool(told)


def test_a_run_planned_earlier_goes_on_without_warnings_until_its_recipe_names_some(recipe, tmp_path: Path):
    url = str(tmp_path / "store")
    path = recipe(("[early_warning]\nstatistics = false\n\n", ""))
    plan = plan_of(Settings(path, url, "hand"))
    before = freeze(plan.model_copy(update={"early_warning": None}), url)
    assert read_plan(url, "hand").early_warning is None
    again = settled(Run(freeze(plan_of(Settings(path, url, "hand")), url), url), remake=False)
    assert before.early_warning is again.plan.early_warning is None
    named = plan_of(Settings(path, url, "hand", overrides=("early_warning.on_trip=suspend",)))
    run = settled(Run(freeze(named, url), url), remake=False)
    assert run.warns
    assert read_plan(url, "hand").early_warning == run.plan.early_warning
    # Without them in the recipe, the run keeps them.
    assert freeze(plan_of(Settings(path, url, "hand")), url).early_warning == run.plan.early_warning
