"""The bundle of wheels: what it packs in addition to an image, and that it is refused where it is too large."""

import zipfile
from pathlib import Path

import pytest

from tests.gpu import wheels

LOCK = """
# a comment
av==18.1.0 \\
    --hash=sha256:1
    # via cosmos-rl-flows (pyproject.toml)
diffusers==0.42.1 \\
    --hash=sha256:2
    # via cosmos-rl-flows (pyproject.toml)
importlib-metadata==10.2.0
    # via
    #   diffusers
    #   prefect
prefect==3.8.8
    # via cosmos-rl-flows (pyproject.toml)
torch==2.13.0
    # via
    #   cosmos-rl-flows (pyproject.toml)
    #   diffusers
triton==3.7.1 ; sys_platform == 'linux'
    # via torch
zipp==4.1.2
    # via importlib-metadata
"""


def test_what_a_package_needs_is_packed_unless_only_the_image_needs_it():
    versions, needed_by = wheels.locked(LOCK)
    assert versions["triton"] == "3.7.1"
    assert wheels.needed(["av", "diffusers", "torch"], {"torch"}, needed_by) == {
        "av",
        "diffusers",
        "importlib-metadata",
        "zipp",
    }


def test_an_image_is_read_from_the_output_of_pip():
    assert wheels.image_of("# of a machine\nPyYAML==6.0\nhuggingface_hub\n\ntorch @ file:///torch.whl\n") == {
        "pyyaml",
        "huggingface-hub",
        "torch",
    }


def test_the_lane_imports_only_what_the_lock_has():
    versions, _ = wheels.locked(wheels.LOCK.read_text(encoding="utf-8"))
    assert {*wheels.NEEDED} <= versions.keys()


def test_a_bundle_that_is_too_large_is_refused_with_its_largest_wheels(tmp_path: Path):
    for name, size in (("large", 3), ("small", 1)):
        (tmp_path / f"{name}.whl").write_bytes(bytes(size * 2**20))
    found = [tmp_path / "large.whl", tmp_path / "small.whl"]
    assert wheels.refused(found, 4) is None
    said = wheels.refused(found, 3)
    assert said is not None
    assert "4.0 MiB, at most 3" in said
    assert "large.whl (3.0 MiB), small.whl (1.0 MiB)" in said


def test_wheels_are_installed_into_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "packed-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("packed.py", "here = 1\n")
        wheel.writestr("packed-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: packed\nVersion: 1.0\n")
        wheel.writestr("packed-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("packed-1.0.dist-info/RECORD", "")
    assert (wheels.installed(folder) / "packed.py").read_text(encoding="utf-8") == "here = 1\n"


def test_without_wheels_it_says_how_to_make_them(tmp_path: Path):
    with pytest.raises(SystemExit, match="make gpu-bundle"):
        wheels.installed(tmp_path)
