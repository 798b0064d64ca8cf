"""Deployments of an installed wheel, from a directory that knows nothing of the repository."""

from pathlib import Path

import pytest

from tests.e2e.deployed import Deployed
from tests.environments import build_wheel, make_environment


@pytest.mark.slow
def test_a_deployment_of_the_wheel_trains_in_an_empty_directory(
    prefect_environment: dict[str, str], tmp_path: Path
) -> None:
    for name in ("sources", "empty"):
        (tmp_path / name).mkdir()
    programs, packages = make_environment(tmp_path / "venv", build_wheel(tmp_path / "sources"))
    place = {"python": str(programs / "python"), "directory": tmp_path / "empty"}
    deployed = Deployed(tmp_path / "deployed", prefect_environment | {"PYTHONPATH": ""}, **place)
    try:
        deployed.set_up(2, str(packages / "cosmos_rl_core" / "shipped" / "deployments" / "prefect.yaml"))
        assert [schedule["active"] for schedule in deployed.deployment("infra/check")["schedules"]] == [True]
        short = {"iterations": 1, "overrides": ["validation.n_generation=1"], "run_id": "installed"}
        deployed.wait(deployed.schedule("nft/tiny-nft", short), "COMPLETED")
        # Its store is relative, and begins where the deployments were made.
        assert (tmp_path / "empty" / "outputs" / "runs" / "installed" / "report").is_dir()
    finally:
        deployed.close()
