"""What is made of stored rollouts, and studies, by deployments and a worker."""

import json
from pathlib import Path

import pytest

from tests.e2e.deployed import Deployed
from tests.e2e.flow_process import NO_PREFECT, RUN_ID, Flows
from tests.e2e.forks.test_forked_runs import SMALL


@pytest.mark.slow
def test_a_what_if_a_rescore_and_a_study_are_deployed(prefect_environment: dict[str, str], tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, prefect_environment)
    deployed.set_up(gpus=2)
    try:
        origin = Flows(tmp_path, {}, "configs/tiny/nft.toml")
        origin.program = NO_PREFECT
        origin.start(*(word for one in SMALL for word in ("--set", one)), "--iterations", "2").finish()
        before = origin.manifests()
        options = [f"-pstore={origin.store}", f"-prun={RUN_ID}"]
        changes = ["-pcontrols=0", "-pname=deployed", '-poverrides=["train.optm_lr=3e-4"]']
        deployed.prefect("deployment", "run", "what-if/runs", *options, *changes, "--watch")
        numbers = json.loads(Path(origin.store, "studies/deployed/numbers.json").read_text(encoding="utf-8"))
        assert [row["setting"] for row in numbers["settings"]] == ["as it was", "optm_lr=3e-4"]
        assert origin.manifests() == before
        deployed.prefect("deployment", "run", "rescore/runs", *options, "-preward=jpeg", "--watch")
        (agreement,) = origin.root.glob("rescore/*/agreement.json")
        assert json.loads(agreement.read_text(encoding="utf-8"))
        words = ["-precipe=configs/tiny/nft.toml", '-pseeds="0-1"', "-piterations=1", "-pname=seeds"]
        words.append("-poverrides=" + json.dumps(SMALL))
        deployed.prefect("deployment", "run", "study/recipes", f"-pstore={origin.store}", *words, "--watch")
        numbers = json.loads(Path(origin.store, "studies/seeds/numbers.json").read_text(encoding="utf-8"))
        assert [len(row["runs"]) for row in numbers["settings"]] == [2]
    finally:
        deployed.close()
