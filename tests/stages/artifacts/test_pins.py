"""The bits of each stage, pinned per (stage, version, numerics): a change of results without a new version fails here.

Contents are comparable only under equal numerics. On a machine whose numerics are not in ``pins.json`` the pins cannot
be checked; ``COSMOS_PIN=1 pytest tests/stages/artifacts/test_pins.py`` adds that machine's.
"""

import json
import os
from pathlib import Path

import pytest

from cosmos_rl_core.canonical import digest
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.registry import STAGES
from stages.vlm.contracts import CONTRACTS
from tests.stages.every_stage import made_once, stages_of_diffusion

pytestmark = pytest.mark.xdist_group("pins")  # one worker makes what both tests need
PINS = Path(__file__).with_name("pins.json")
LATER = {"references"}
"""Stages that came after the first pins. They share their numerics with others, so pins of known machines stay."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Every stage, made once for both tests."""
    of_vlms = {stage.name for stage in CONTRACTS}
    found = made_once(tmp_path_factory)
    return manifests_of({name: request for name, request in found.items() if name not in of_vlms})


def manifests_of(made: dict[str, Request]) -> dict[str, Manifest]:
    """Current artifacts, by the name of the stage."""
    return {name: Artifact(input_of(request.slot)).manifest for name, request in made.items()}


def test_every_stage_makes_the_bytes_pinned_for_its_version(made: dict[str, Manifest]):
    of_vlms = {stage.name for stage in CONTRACTS}
    assert made.keys() == STAGES.keys() - of_vlms, "VLMs are in test_vlm_pins.py"
    check_pins(made, PINS)


def check_pins(made: dict[str, Manifest], file: Path) -> None:
    """The contents are those that are pinned, or are pinned now."""
    # Of all stages: one without torch records no CPU, but reads what the others made on it.
    machine = digest({name: manifest.numerics for name, manifest in made.items() if name not in LATER})[:16]
    found = {f"{name} {m.version} {machine}": m.content for name, m in sorted(made.items())}
    pins: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    if os.environ.get("COSMOS_PIN"):
        file.write_text(json.dumps(pins | found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    changed = [key for key, content in found.items() if pins.get(key, content) != content]
    assert not changed, f"other bytes than pinned: {changed}; raise the version of these stages, then pin again"
    # A version that was raised on another machine has the pin of that machine.
    absent, pinned = sorted(found.keys() - pins.keys()), {key.rpartition(" ")[0] for key in pins}
    forgotten = [key for key in absent if key.rpartition(" ")[0] not in pinned]
    assert not forgotten, f"versions that were raised and not pinned: {forgotten}"
    if absent:
        pytest.skip(f"no pins for this machine's numerics: {absent}; add them with COSMOS_PIN=1")


@pytest.mark.slow
def test_the_same_requests_make_the_same_bytes_again(made: dict[str, Manifest], tmp_path: Path):
    again = manifests_of(stages_of_diffusion(tmp_path))
    assert {name: m.content for name, m in again.items()} == {name: m.content for name, m in made.items()}
