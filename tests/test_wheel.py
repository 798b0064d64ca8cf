"""The wheel in a virtual environment of its own, used from folders that know nothing of the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_rl_core import command, shipped
from cosmos_rl_core.errors import ConfigError
from flows.cli import app as cli
from tests.environments import ROOT, build_wheel, make_environment
from tests.pages import examples, write

DOCKERFILE = ROOT / "deployments" / "Dockerfile"

pytestmark = [pytest.mark.xdist_group("wheel"), pytest.mark.processes]
Said = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Programs and packages of a virtual environment with the wheel."""
    return make_environment(tmp_path_factory.mktemp("installed") / "venv", wheel)


@pytest.fixture
def cosmos_flows(environment: tuple[Path, Path], tmp_path: Path) -> Said:
    """The installed command, given in an empty folder; returns what it wrote: to stderr if it was refused."""

    def run(*arguments: str, expect: int = 0, **variables: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            [environment[0] / "cosmos-flows", *arguments],
            cwd=tmp_path,
            env=inherited | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == expect, ended.stdout + ended.stderr
        return ended.stderr if expect == 64 else ended.stdout

    return run


def make_package(folder: Path, name: str) -> None:
    """Write a package of another project."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")


def test_a_shipped_recipe_and_profile_are_planned_in_an_empty_folder(cosmos_flows: Said, tmp_path: Path):
    said = cosmos_flows("plan", "package:tiny/nft", "--cluster", "package:eight-gpus")
    files = [str(ROOT / name) for name in ("configs/tiny/nft.toml", "deployments/clusters/eight-gpus.toml")]
    expected = CliRunner().invoke(cli.app, ["plan", files[0], "--cluster", files[1]]).stdout
    assert len(expected.splitlines()) > 20

    def lines(printed: str) -> list[str]:
        return [line for line in printed.splitlines() if not line.startswith("store ")]

    assert lines(said) == lines(expected)
    assert [line.split() for line in lines(said) if line.startswith("ranks")] == [["ranks", "8", "1", "8", "8", "8"]]
    assert list(tmp_path.iterdir()) == []


def test_the_command_of_the_page_starts_stages_as_the_demo_does(cosmos_flows: Said):
    """Forked from a warm process: cold starts would take most of the time of the tiny recipes."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^cosmos-flows run (package:tiny/nft.*)$", page, re.MULTILINE)
    demo = CliRunner().invoke(cli.app, ["plan", str(ROOT / "configs/tiny/nft.toml")]).stdout
    (launch,) = re.findall(r"^launch .*$", demo, re.MULTILINE)
    assert "warm" in launch
    assert launch in cosmos_flows("plan", *arguments.split()).splitlines()


def test_the_lock_is_in_the_wheel_under_its_name(cosmos_flows: Said):
    path = Path(cosmos_flows("shipped", "requirements.lock").strip())
    assert path.read_bytes() == (ROOT / "deployments" / "requirements.lock").read_bytes()


def test_every_recipe_profile_and_deployment_is_in_the_wheel(cosmos_flows: Said, environment: tuple[Path, Path]):
    rows = json.loads(cosmos_flows("shipped", "--json"))
    found = {row["name"]: Path(row["path"]) for row in rows if row["kind"] != "pipeline"}
    expected = {row["name"]: Path(row["path"]) for row in shipped.listed() if row["kind"] != "pipeline"}
    assert all(environment[1] in path.parents for path in found.values())
    assert {name: path.read_bytes() for name, path in found.items()} == {
        name: path.read_bytes() for name, path in expected.items()
    }
    folders = (ROOT / "configs", ROOT / "deployments")
    files = [path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".toml", ".yaml", ".lock")]
    assert sorted(expected.values()) == sorted(files)


def test_names_of_shipped_files_are_suggested_and_their_paths_printed(cosmos_flows: Said):
    path = Path(cosmos_flows("shipped", "tiny/nft").strip())
    assert path.read_bytes() == (ROOT / "configs" / "tiny" / "nft.toml").read_bytes()
    assert "no recipe 'tiny/ntf' ships with this project; did you mean package:tiny/nft? known: ddrl/14b" in (
        cosmos_flows("plan", "package:tiny/ntf", expect=64)
    )
    with pytest.raises(
        ConfigError, match="nothing named 'tiny' ships with this project; did you mean 'tiny/sft'\\? known: ddrl/14b"
    ):
        shipped.listed("tiny")
    with pytest.raises(ConfigError, match="no cluster profile 'eight' ships"):
        shipped.path_of("package:eight", "cluster profile")


@pytest.mark.parametrize("name", command.PACKAGES)
def test_a_package_of_another_project_is_named(name: str, cosmos_flows: Said, tmp_path: Path):
    make_package(tmp_path, name)
    assert "recipe" in cosmos_flows("shipped"), "a package in the working directory is not imported"
    said = cosmos_flows("shipped", PYTHONPATH=str(tmp_path), expect=64)
    assert f"the package '{name}' of cosmos-rl-flows must lie in " in said
    assert f"found {tmp_path / name / '__init__.py'}: another project has a package of this name" in said
    assert "RuntimeError" not in said


def test_a_package_that_was_installed_over_ours_is_named(cosmos_flows: Said, environment: tuple[Path, Path]):
    file = environment[1] / "flows" / "__init__.py"
    ours = file.read_bytes()
    file.write_text("", encoding="utf-8")
    try:
        assert f"found {file}: another project has a package" in cosmos_flows("shipped", expect=64)
    finally:
        file.write_bytes(ours)


def test_plugins_are_checked_by_the_suite_in_the_wheel(
    cosmos_flows: Said, environment: tuple[Path, Path], tmp_path: Path
):
    write(tmp_path, examples("reward.md", "solver.md"))
    found = json.loads(cosmos_flows("check-plugin", "redness.py", "half_sde.py", "--json"))
    assert (found["passed"] >= 14, found["failed"]) == (True, 0)
    file = environment[1] / "cosmos_rl_core" / "conformance" / "kinds" / "test_rewards.py"
    text = (tmp_path / "redness.py").read_text(encoding="utf-8")
    (tmp_path / "redness.py").write_text(text.replace("float(red -", "float('nan') * float(red -"), encoding="utf-8")
    said = cosmos_flows("check-plugin", "redness.py", expect=1)
    assert f"FAILED {tmp_path / 'redness.py'}: every sample has a score" in said
    assert f"    {file}:" in said


@pytest.mark.slow
def test_a_shipped_model_passes_the_suite_in_the_wheel_as_a_plugin(
    cosmos_flows: Said, environment: tuple[Path, Path], tmp_path: Path
):
    shutil.copytree(environment[1] / "cosmos_rl_core" / "models" / "z_image", tmp_path / "my_image")
    found = json.loads(cosmos_flows("check-plugin", "my_image", "--json"))
    assert (found["passed"] > 70, found["failed"]) == (True, 0)


def instructions(name: str) -> list[str]:
    """Return the arguments of every instruction of one name in the Dockerfile."""
    lines = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def test_the_image_is_made_of_the_wheel(wheel: Path, environment: tuple[Path, Path], tmp_path: Path):
    """Without a daemon: the instructions that need none are carried out in a virtual environment."""
    ((pattern, lock, target),) = (line.split() for line in instructions("COPY"))
    assert wheel.match(Path(pattern).name)
    for file in (wheel, ROOT / lock):
        shutil.copy(file, tmp_path)
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{lock}", "!dist/*.whl"} <= {*sent}
    (install,) = (line.replace(target, f"{tmp_path}/") for line in instructions("RUN") if line.startswith("uv "))
    here = install.replace("--system", f"--python {environment[0] / 'python'} --no-deps --offline")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", here], env=os.environ | {"PATH": path}, check=True)
    assert list(tmp_path.iterdir()) == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"\[([\w,]+)\]", install)[0].split(",")) <= extras.keys()
    (program, *arguments) = json.loads(instructions("CMD")[0])
    subprocess.run([environment[0] / program, *arguments], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert instructions("USER") == ["cosmos"]


def test_the_profile_of_pods_names_the_image_that_the_dockerfile_makes():
    profile = tomllib.loads((ROOT / "deployments" / "clusters" / "ray.toml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    image = profile["launch"]["kubernetes"]["image"]
    assert image.endswith(f"/{project['name']}:{project['version']}")
    assert f"docker build --file deployments/Dockerfile --tag {image} ." in DOCKERFILE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_shipped_recipe_trains_next_to_packages_of_other_projects(cosmos_flows: Said, tmp_path: Path):
    for name in command.PACKAGES:
        make_package(tmp_path, name)
    cold = ("--set", "launch.mode=cold", "--set", "launch.processes=2")
    short = ("--iterations", "1", "--set", "validation.n_generation=1", "--run-id", "short")
    cosmos_flows("run", "package:tiny/nft", *short)
    assert (tmp_path / "outputs" / "runs" / "short" / "report").is_dir()
    cosmos_flows("run", "package:tiny/nft", *short[:-1], "cold", *cold)
