"""What an audit finds where every byte has its digest: decisions, scorers and advantages that do not follow."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.errors import ApprovalError
from cosmos_rl_core.storage.sealed import seal
from flows.auditing.audit import audit
from flows.auditing.checks.faults import Fault
from flows.auditing.contents import input_of
from flows.auditing.flow import audit as audit_flow
from flows.heads.heads import read_heads
from flows.planning.plan import read_plan
from flows.warning.decisions import DECISIONS, decide
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.formats.tables import to_parquet
from stages.scoring.advantages import advantages
from stages.scoring.rewards import held_back_prompts
from tests import hand_made
from tests.flows.warning.test_warnings import LIMITS, Loop
from tests.stages.made_up import score_files, score_table

GATE = '[[rewards]]\nrole = "gate"\nmin = 0.1\non_fail = "ON_FAIL"\nfn = { name = "jpeg" }\n\n[[rewards]]'


def faults(loop: Loop, *words: str) -> list[Fault]:
    """Those in files with one of the words in their names: most artifacts of the run are made up."""
    return [fault for fault in audit(loop.store, "hand").faults if any(word in fault.file for word in words)]


def of_warnings(loop: Loop) -> list[Fault]:
    return faults(loop, "/warn/", "heads", "scorers")


@pytest.fixture
def warned(recipe, tmp_path: Path) -> Loop:
    """A finished run whose second iteration was marked."""
    loop = Loop(recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", "mark"))), tmp_path)
    loop.run()
    return loop


def reseal(path: Path, change: Callable[[dict[str, Any]], None], kind: str) -> None:
    body = {k: v for k, v in json.loads(path.read_bytes())["body"].items() if k not in ("format", "kind")}
    change(body)
    path.write_bytes(seal(kind, body))


def decision_files(loop: Loop) -> list[Path]:
    return sorted((Path(loop.warning.slot) / DECISIONS).rglob("*.json"))


def test_heads_name_decisions_on_warnings(warned):
    named = {name.split("/", 2)[2] for head, _ in read_heads(f"{warned.store}/runs/hand") for name in head.records}
    (decision,) = decision_files(warned)
    assert str(decision.relative_to(Path(warned.store) / "runs/hand")) in named
    assert of_warnings(warned) == []


def test_a_decision_that_was_edited_and_sealed_anew_is_found(warned):
    (decision,) = decision_files(warned)
    reseal(decision, lambda body: body.update(word="approved", by="anna", tripped=[]), "decision")
    found = {fault.field: fault.what for fault in of_warnings(warned)}
    assert set(found) == {"tripped", "bytes"}
    assert "the evidence says ['ocr rose from 0.3125" in found["tripped"]
    assert "a head names" in found["bytes"]


def test_an_update_of_tripped_scores_that_nobody_let_pass_is_found(warned):
    (decision,) = decision_files(warned)
    decision.unlink()
    told = {fault.what for fault in of_warnings(warned)}
    assert "limits tripped and nothing was decided, but there is an update after it" in told
    assert "missing; a head names it" in told
    decide(warned.warning, "suspended", ("other words",), "the recipe")
    assert any("the last decision: the recipe suspended the run" in fault.what for fault in of_warnings(warned))


def test_decisions_on_other_evidence_are_found(warned):
    (decision,) = decision_files(warned)
    shutil.copytree(decision.parent, decision.parent.with_name("0" * 64))
    (fault,) = of_warnings(warned)
    assert (fault.field, fault.what) == ("evidence", "no warning of this slot has this content")


def test_a_run_that_waits_for_approval_has_no_fault(recipe, tmp_path: Path):
    loop = Loop(recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", "suspend"))), tmp_path)
    with pytest.raises(ApprovalError):
        loop.run()
    assert of_warnings(loop) == []


def test_evidence_that_does_not_follow_from_the_scores_is_found(recipe, tmp_path: Path):
    class Softened(Loop):
        def make(self, request: Request, name: str) -> Manifest:
            if request.stage != "warn" or request.iteration != 1:
                return super().make(request, name)
            made = super().make(request.model_copy(update={"slot": f"{self.store}/aside"}), name)
            evidence = Artifact(input_of(made)).json(contracts.Warn.EVIDENCE) | {"tripped": []}
            summary = {"tripped": 0, "undecided": 1, "other_z": 0.5}
            return hand_made.make(request, {contracts.Warn.EVIDENCE: json.dumps(evidence).encode()}, **summary)

    loop = Softened(recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", "stop"))), tmp_path)
    loop.run()
    found = {fault.field: fault.what for fault in of_warnings(loop)}
    assert found.pop("summary.ocr_z").startswith("None, its evidence gives 14.519")
    assert found == {
        "tripped": "not what the scores give",
        "summary.tripped": "0, its evidence gives 1",
        "summary.undecided": "1, its evidence gives None",
        "summary.other_z": "0.5, its evidence gives None",
    }


def test_a_warning_that_another_version_judged_is_said_not_to_be_compared(warned, monkeypatch):
    newer = contracts.Warn.version + 1
    monkeypatch.setattr(contracts.Warn, "version", newer)
    found = audit(warned.store, "hand")
    told = [line for line in found.unchecked if "/warn" in line]
    slots = [f"runs/hand/iterations/{k:04d}/warn" for k in range(len(told))]
    assert told == [f"{slot}: version {newer - 1} of warn made it, this is version {newer}" for slot in slots]
    assert len(told) > 1


def test_scores_by_another_scorer_than_the_run_pinned_are_found(recipe, tmp_path: Path):
    loop = Loop(recipe(), tmp_path)
    loop.served = "d" * 64
    loop.run()

    def told() -> list[str]:
        return [fault.what.partition("; ")[2] for fault in faults(loop, "/reward-ocr/") if fault.field == "scorer"]

    assert told() == ["scorers that the run pinned: none"] * 2
    folder = Path(loop.store) / "runs/hand/scorers"
    folder.mkdir()
    for digest, expected in (("d" * 64, []), ("e" * 64, [f"scorers that the run pinned: {'e' * 64}"] * 2)):
        named = {"name": "ocr", "version": "1", "digest": digest}
        (folder / "ocr.1.json").write_bytes(seal("scorer", {"reward": "ocr", "number": 1, "scorer": named}))
        assert told() == expected
    (folder / "ocr.1.json").rename(folder / "ocr.2.json")
    (fault,) = faults(loop, "scorers")
    assert (fault.field, "ocr.1.json is missing, but there is" in fault.what) == ("ocr", True)


SUM, GDPO = "mixing=sum", "mixing=gdpo"


@pytest.mark.parametrize(("mixing", "gated"), [(SUM, ""), (GDPO, ""), (SUM, "exclude"), (GDPO, "worst")])
def test_advantages_follow_from_scores(recipe, tmp_path: Path, mixing: str, gated: str):
    class Trained(Loop):
        """Its updates have the true advantages, but for two numbers of iteration 1."""

        def make(self, request: Request, name: str) -> Manifest:
            if request.stage != "update":
                return super().make(request, name)
            algorithm = algorithm_of(request.settings(contracts.Update).algorithm)
            table = advantages(request, [*map(Artifact, request.inputs["rollouts"])], algorithm).drop(columns="key")
            if request.iteration == 1:
                table.loc[1, "advantage"] += 1e-6
                table.loc[2, "used"] = False
            files = {"current/w": b"1", "old/w": b"2", contracts.Update.ADVANTAGES: to_parquet(table)}
            held_back = held_back_prompts(table)
            return hand_made.make(request, files, excluded=len(table[~table["used"]]), prompts_held_back=held_back)

    loop = Trained(recipe(*[("[[rewards]]", GATE.replace("ON_FAIL", gated))] * bool(gated)), tmp_path)
    loop.run(f"train.train_policy.{mixing}", "train.train_policy.global_std=false")
    first, second = faults(loop, "/update/")
    assert "iterations/0001/update" in first.file
    assert first.field.startswith("advantage, ")
    found, expected = (float(word.rpartition(" ")[2]) for word in first.what.split(", its scores"))
    assert found - expected == pytest.approx(1e-6, rel=1e-3)
    assert (second.field.partition(",")[0], second.what) == ("used", "False, its scores give True")


def test_the_flow_audits_every_run_of_a_store_and_fails_with_the_faults(warned, tmp_path: Path):
    ended = audit_flow.fn(store=str(tmp_path / "empty"))
    assert ended.is_failed()
    assert f"the store {tmp_path / 'empty'} has no runs" in str(ended.message)
    ended = audit_flow.fn(head="0" * 64, store=warned.store)
    assert "name that run in run_id" in str(ended.message)
    (decision,) = decision_files(warned)
    decision.unlink()
    ended = audit_flow.fn(store=warned.store)
    assert ended.is_failed()
    assert ended.message is not None
    assert ended.message.partition(" faults in 1 run")[0] == str(len(audit(warned.store, "hand").faults))
    assert "limits tripped and nothing was decided" in ended.message
    assert ended.message == audit_flow.fn(run_id="hand", store=warned.store).message


def test_prompts_without_a_passing_sample_were_not_counted_by_an_earlier_version(recipe, tmp_path: Path, monkeypatch):
    """Made by version 1 of the stage, whose summary has no number for them."""
    monkeypatch.setattr(contracts.Update, "version", 1)

    class Trained(Loop):
        """Nothing that its first prompt was drawn for passes the gate."""

        def make(self, request: Request, name: str) -> Manifest:
            if request.stage == "reward" and request.slot.endswith("jpeg"):
                prompts = read_plan(self.store, "hand").prompts_of(request.iteration or 0)
                scores = [0.0] * 2 + [1.0] * (2 * len(prompts) - 2)
                return hand_made.make(request, score_files(score_table(prompts, 2, scores)), jpeg=0.75)
            if request.stage != "update":
                return super().make(request, name)
            algorithm = algorithm_of(request.settings(contracts.Update).algorithm)
            table = advantages(request, [*map(Artifact, request.inputs["rollouts"])], algorithm).drop(columns="key")
            assert held_back_prompts(table) == 1
            files = {"current/w": b"1", "old/w": b"2", contracts.Update.ADVANTAGES: to_parquet(table)}
            return hand_made.make(request, files, excluded=len(table[~table["used"]]))

    loop = Trained(recipe(("[[rewards]]", GATE.replace("ON_FAIL", "exclude"))), tmp_path)
    loop.run("train.train_policy.mixing=sum")
    assert faults(loop, "/update/") == []
