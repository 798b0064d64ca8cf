"""The bits of each stage that trains a VLM, pinned like the others in :mod:`tests.stages.artifacts.test_pins`.

``COSMOS_PIN=1 pytest tests/stages/vlm/test_vlm_pins.py`` adds this machine's.
"""

from pathlib import Path

from stages.vlm.contracts import CONTRACTS
from tests.stages.artifacts.test_pins import check_pins, manifests_of
from tests.stages.every_stage import stages_of_vlms

PINS = Path(__file__).with_name("vlm_pins.json")


def test_every_stage_of_vlms_makes_the_bytes_that_are_pinned(tmp_path: Path):
    made = manifests_of(stages_of_vlms(tmp_path))
    assert made.keys() == {stage.name for stage in CONTRACTS}
    check_pins(made, PINS)
