"""The bits of each stage that trains a VLM, pinned like the others in :mod:`tests.stages.artifacts.test_pins`.

``COSMOS_PIN=1 pytest tests/stages/vlm/test_vlm_pins.py`` adds this machine's.
"""

from pathlib import Path

import pytest

from stages.vlm.contracts import CONTRACTS
from tests.stages.artifacts.test_pins import check_pins, manifests_of
from tests.stages.every_stage import made_once

PINS = Path(__file__).with_name("vlm_pins.json")


def test_every_stage_of_vlms_makes_its_pinned_bytes(tmp_path_factory: pytest.TempPathFactory):
    found, of_vlms = made_once(tmp_path_factory), {stage.name for stage in CONTRACTS}
    assert of_vlms <= found.keys()
    made = manifests_of({name: request for name, request in found.items() if name in of_vlms})
    check_pins(made, PINS)
