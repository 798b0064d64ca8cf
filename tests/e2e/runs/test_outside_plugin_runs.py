"""`cosmos-flows run` with a plugin of every kind that lies outside the package: warm, cold, on two ranks, installed."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from flows.planning import requests
from tests.e2e.flow_process import COLD, Flows
from tests.environments import make_environment
from tests.outside import write_plugins, write_recipe

ENTRY_POINTS = {"algorithms": "nft2", "rewards": "bright", "datasets": "signs", "models": "tiny2"}
MADE = ["iterations/0000/rollout", "iterations/0000/reward-bright", "iterations/0000/update"]
NAMES = ["nft2.py", "bright.py", "signs.py", "tiny2"]


def require_an_iteration(flows: Flows, *options: str) -> None:
    """The run trained by the outside algorithm on what the others made, and pinned all four."""
    # Cold starts of eight stages, on a machine that may be busy.
    flows.start(*options).finish(timeout_s=900)
    plan = json.loads((flows.root / "plan.json").read_bytes())["body"]
    assert sorted(pin["name"] for pin in plan["plugins"]) == sorted(ENTRY_POINTS.values())
    manifests = flows.manifests()
    assert all(f"{slot}/manifest.1.json" in manifests for slot in MADE)
    assert "bright" in flows.command("status")


def require_refused(flows: Flows, edited: Path) -> None:
    """An edited file ends the run that goes on, and one stage of it by hand, with 64 and the file's name."""
    with edited.open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    assert f"{edited}: found sha256" in flows.run("--iterations", "2", expect=64)
    request = flows.folder / "request.json"
    request.write_text(requests.rollout(flows.planned, 0).model_dump_json(), encoding="utf-8")
    assert f"{edited}: found sha256" in flows.start_command("stages.execution.runner", str(request)).finish(expect=64)


@pytest.mark.slow
def test_warm_then_cold_with_an_update_on_two_ranks(tmp_path: Path, prefect_environment: dict[str, str]) -> None:
    write_plugins(tmp_path / "mine")
    recipe = write_recipe(tmp_path, [f"mine/{name}" for name in NAMES], "warm")
    flows = Flows(tmp_path / "run", prefect_environment, recipe)
    require_an_iteration(flows)
    flows.forget(*MADE[1:], "numerics/update.json", "exports/0001", "report")
    require_an_iteration(flows, *COLD, "--set", "launch.stage_processes.update=2")
    require_refused(flows, tmp_path / "mine" / "nft2.py")


@pytest.mark.slow
def test_cold(tmp_path: Path, prefect_environment: dict[str, str]) -> None:
    write_plugins(tmp_path / "mine")
    recipe = write_recipe(tmp_path, [str(tmp_path / "mine" / name) for name in NAMES], "cold")
    flows = Flows(tmp_path / "run", prefect_environment, recipe)
    require_an_iteration(flows)
    require_refused(flows, tmp_path / "mine" / "tiny2" / "model.py")


def installed(folder: Path) -> tuple[Path, Path]:
    """A Python that has a package with the plugins installed as entry points, and the package's folder."""
    write_plugins(folder / "my_plugins")
    (folder / "my_plugins" / "__init__.py").touch()
    groups = [f"[cosmos_rl_flows.{kind}]\n{name} = my_plugins.{name}\n" for kind, name in ENTRY_POINTS.items()]
    about = "my_plugins-1.0.dist-info"
    with zipfile.ZipFile(wheel := folder / "my_plugins-1.0-py3-none-any.whl", "w") as archive:
        for file in sorted((folder / "my_plugins").rglob("*.py")):
            archive.write(file, file.relative_to(folder))
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/entry_points.txt", "\n".join(groups))
        archive.writestr(f"{about}/RECORD", "")
    shutil.rmtree(folder / "my_plugins")
    programs, packages = make_environment(folder / "venv", wheel)
    return programs / "python", packages / "my_plugins"


@pytest.mark.slow
def test_installed_with_entry_points(tmp_path: Path, prefect_environment: dict[str, str]) -> None:
    python, package = installed(tmp_path)
    recipe = write_recipe(tmp_path, [], "warm")
    flows = Flows(tmp_path / "run", prefect_environment, recipe, str(python))
    require_an_iteration(flows)
    said = flows.run("--set", 'rewards=[{ fn = { name = "brigth" } }]', expect=64)
    assert "did you mean 'bright'? known: aesthetic, bright, clip_score, " in said
    edited = package / "signs.py"
    with edited.open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    assert f"{edited}: found sha256" in flows.run("--iterations", "2", expect=64)
