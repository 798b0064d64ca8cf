"""Finished runs whose updates an earlier version made: their numbers are compared with what that version wrote."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cosmos_rl_core.rewards import ocr
from flows.auditing.audit import audit
from flows.planning import requests
from flows.planning.plan import METRICS_FILE
from flows.planning.versions import go_on_with
from flows.watching.metrics import lines_of
from stages import contracts, registry
from stages.artifacts.generations import invalidate
from stages.formats.tables import to_parquet
from tests.flows.by_hand import make_all
from tests.flows.proved import KEPT, RUN_ID, Forger, Proved, body_of, seal_anew, told
from tests.hand_made import make, planned

REWARD = "iterations/0001/reward-ocr"
UPDATES = [f"iterations/{k:04d}/update" for k in range(3)]
Line = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rewards were normalised before they were summed."""
    proved = Proved(tmp_path_factory.mktemp("proved"))
    proved.run(keep=(*KEPT, "train.train_policy.mixing=gdpo", "train.train_policy.global_std=false"))
    assert audit(str(proved.store), RUN_ID).faults == []
    return proved.store


def of_version_1(forger: Forger) -> None:
    """Let version 1 have made the updates, and have written their lines: rewards as they are stored, and no floor."""
    for slot in UPDATES:
        forger.manifest(slot, lambda body: body.update(version=1))
    forger.seal(metrics=False)

    def then(line: Line) -> Line:
        table = pd.read_parquet(forger.file(UPDATES[line["iteration"]], contracts.Update.ADVANTAGES))
        known = table["reward"].dropna()
        numbers = {"mean": known.mean(), "std": known.std(ddof=0), "max": known.max(), "min": known.min()}
        line |= {f"train/reward_{name}": float(number) for name, number in numbers.items()}
        later = ("train/normalized_", "train/lost_to_floor", "train/prompts_held_back")
        return {name: value for name, value in line.items() if not name.startswith(later)}

    _lines(forger, lambda line: then(line) if "train/reward_mean" in line else line)


def _lines(forger: Forger, change: Callable[[Line], Line]) -> None:
    path = forger.root / METRICS_FILE
    lines = [change(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


@pytest.fixture
def forger(finished: Path, tmp_path: Path) -> Forger:
    return Forger(shutil.copytree(finished, tmp_path / "store"))


def test_updates_by_an_earlier_version_keep_the_lines_that_it_wrote(forger: Forger):
    assert "train/normalized_reward_std" in (forger.root / METRICS_FILE).read_text(encoding="utf-8")
    of_version_1(forger)
    assert [line for line in told(forger) if line.startswith(METRICS_FILE)] == []
    _lines(forger, lambda line: line | ({"train/reward_max": 9.0} if "train/reward_max" in line else {}))
    (fault,) = (line for line in told(forger) if line.startswith(METRICS_FILE))
    assert "train/reward_max is 9.0, the artifacts give " in fault


EARLIER = {"rollout": 3, "reward-ocr": 1, "update": 2, "fragment": 2}


def of_earlier_versions(forger: Forger) -> None:
    for name, version in EARLIER.items():
        forger.manifest(f"iterations/0001/{name}", lambda body, version=version: body.update(version=version))


def of_smaller_groups(body: dict[str, Any]) -> None:
    body["config"].update(n_generation=3)


def other_metadata(rows: list[dict[str, Any]]) -> None:
    rows[0]["metadata"] = {"reference": "ZZ"}


def test_a_version_that_no_record_names_is_a_fault(forger: Forger):
    of_earlier_versions(forger)
    forger.manifest("iterations/0001/rollout", of_smaller_groups)
    forger.rows("iterations/0001/rollout", other_metadata)
    forger.seal()
    found = told(forger)
    for name, version in EARLIER.items():
        said = f"{version} of {name.removesuffix('-ocr')}, expected {version + 1} as the run was planned"
        assert f"iterations/0001/{name}/manifest.1.json version: {said}" in found


def test_artifacts_from_before_an_upgrade_are_compared_with_their_own_requests(forger: Forger):
    """Until the run goes on, it is current; nothing that its version does not explain is excused."""
    versions = {name.removesuffix("-ocr"): version for name, version in EARLIER.items()}
    seal_anew(forger.root / "plan.json", lambda body: body["stage_versions"].update(versions))
    newer = {name: stage.version for name, stage in registry.STAGES.items()}
    go_on_with(str(forger.root), RUN_ID, newer, None, None)
    of_earlier_versions(forger)
    forger.seal()
    found = audit(str(forger.store), RUN_ID)
    assert found.faults == []
    place = f"runs/{RUN_ID}/iterations/0001"
    for name, version in EARLIER.items():
        said = f"version {version} of {name.removesuffix('-ocr')} made it, before versions.1.json"
        assert f"{place}/{name}: {said}" in found.unchecked
    assert f"{place}/fragment: version 2 of fragment made it, this is version 3" in found.unchecked
    forger.rows("iterations/0001/rollout", other_metadata)
    forger.seal()
    assert any("samples[0].metadata: {'reference': 'ZZ'}, expected " in line for line in told(forger))
    forger.manifest("iterations/0001/rollout", of_smaller_groups)
    forger.seal()
    (fault,) = (line for line in told(forger) if line.startswith("iterations/0001/rollout/manifest.1.json recipe"))
    assert fault.endswith("recipe: the settings of rollout changed (n_generation)")


def test_an_ended_input_does_not_excuse_other_settings(forger: Forger):
    """What was made from an ended generation is made again; until then its settings are the plan's."""
    slot = str(forger.root / "iterations/0001/rollout")
    forger.manifest(REWARD, lambda body: body["config"]["reward"].update(line_width=12))
    forger.seal()
    invalidate(slot, 1, "asked for")
    shutil.copy(f"{slot}/manifest.1.json", f"{slot}/manifest.2.json")
    seal_anew(Path(slot, "manifest.2.json"), lambda body: body.update(generation=2))
    assert any(line.startswith(f"{REWARD}/manifest.1.json recipe: the settings of reward") for line in told(forger))


GATE = '[[rewards]]\nrole = "gate"\nmin = 0.1\nfn = { name = "jpeg" }\n\n[[rewards]]'
LATER = {"train/prompts_held_back", "train/lost_to_floor"}


def test_lines_of_an_earlier_version_lack_numbers_that_it_did_not_count(recipe, tmp_path: Path):
    run = planned(recipe(("[[rewards]]", GATE)), tmp_path, run_id="hand", iterations=1)
    make_all(run)
    update = requests.update(run, 0).model_copy(update={"slot": str(tmp_path / "update")})
    # A deviation of 1e-4 is as large as the floor, which takes half of the advantages.
    rewards = [0.5, 0.5002]
    table = pd.DataFrame({"prompt_id": ["p", "p"], "reward": rewards, "advantage": [-0.5, 0.5], "used": [True, True]})
    steps = to_parquet(pd.DataFrame({"step": [0, 1], "loss": [0.5, 0.25]}))
    made = make(update, {"current/w": b"w", contracts.METRICS: steps, contracts.Update.ADVANTAGES: to_parquet(table)})

    def names(version: int) -> set[str]:
        *_, line = lines_of(update, made.model_copy(update={"version": version}), 0, "ocr")
        return {*line.values}

    assert names(2) - names(1) == LATER
    assert names(1) <= names(2)


def test_scores_by_an_earlier_version_of_a_scorer_are_noted_and_no_fault(forger: Forger, monkeypatch):
    """A new version of a scorer, or of a package that it needs, scores a run again only if that goes on."""
    before = body_of(forger.root / REWARD / "manifest.1.json")["config"]["scorer"]
    monkeypatch.setattr(ocr.Reward, "version", "3")
    found = audit(str(forger.store), RUN_ID)
    assert found.faults == []
    assert f"runs/{RUN_ID}/{REWARD}: scored by version {before!r} of ocr, today's is '3'" in found.unchecked
    forger.table(REWARD, contracts.Reward.SCORES, lambda table: table.assign(scorer="9"))
    forger.seal()
    assert any("scored by 9" in line for line in told(forger))
    forger.manifest(REWARD, lambda body: body["config"]["reward"].update(line_width=12))
    forger.seal()
    assert any(line.startswith(f"{REWARD}/manifest.1.json recipe: the settings of reward") for line in told(forger))
