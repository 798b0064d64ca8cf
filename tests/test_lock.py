"""The lock: every requirement of ``pyproject.toml`` is pinned, by digests, to the versions that are tested here."""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deployments" / "requirements.lock"
PIN = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<rest>.*)$")
OURS = "cosmos-rl-flows"
SYSTEMS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for python in ("3.11", "3.12")
]
TOOLS = {"pip", "uv"}
"""Tools that make an environment before the lock is read."""


@dataclass(frozen=True)
class Pin:
    """A line of the lock with the lines that belong to it."""

    requirement: Requirement
    hashes: tuple[str, ...]
    wanted_by: frozenset[str]

    @property
    def version(self) -> Version:
        (specifier,) = self.requirement.specifier
        return Version(specifier.version)

    def holds(self, system: dict[str, str] | None = None) -> bool:
        return self.requirement.marker is None or self.requirement.marker.evaluate(system)


def pins() -> Iterator[Pin]:
    for block in re.split(r"\n(?=[a-z])", LOCK.read_text(encoding="utf-8"))[1:]:
        line, *more = block.splitlines()
        yield Pin(
            Requirement(line.removesuffix("\\").strip()),
            tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", block)),
            frozenset(re.findall(r"#\s+(?:via )?([\w-]+)", "\n".join(more))) - {"via"},
        )


PINS = [*pins()]


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def test_the_lock_pins_what_pyproject_declares_within_its_bounds():
    disagree = [
        f"{requirement}: the lock has {', '.join(map(str, found)) or 'none'}"
        for requirement in declared()
        for system in SYSTEMS
        if requirement.marker is None or requirement.marker.evaluate(system)
        if len(
            found := [
                p.version for p in PINS if p.requirement.name == canonicalize_name(requirement.name) and p.holds(system)
            ]
        )
        != 1
        or found[0] not in requirement.specifier
    ]
    assert not disagree, "run `make lock`:\n" + "\n".join(disagree)
    asked = {canonicalize_name(requirement.name) for requirement in declared()}
    assert asked == {pin.requirement.name for pin in PINS if OURS in pin.wanted_by}, "run `make lock`"


def test_everything_in_the_lock_has_digests_but_torch_whose_builds_share_a_version():
    assert [pin.requirement.name for pin in PINS if not pin.hashes] == ["torch"]


def test_the_lock_names_no_index_and_no_path():
    text = LOCK.read_text(encoding="utf-8")
    assert not re.findall(r"^.*(?:://|--index|--find-links|--extra|@ ).*$", text, re.MULTILINE)


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="an environment that `make install` did not make")
def test_the_tested_environment_is_the_locks():
    locked = {pin.requirement.name: pin.version for pin in PINS if pin.holds()}
    installed = {canonicalize_name(found.name): Version(found.version) for found in distributions()}
    others = [
        f"{name} {version}, locked {locked.get(name)}"
        for name, version in sorted(installed.items())
        if name not in {*TOOLS, OURS} and Version(version.public) != locked.get(name)
    ]
    assert not others, "run `make install`; it found:\n" + "\n".join(others)
