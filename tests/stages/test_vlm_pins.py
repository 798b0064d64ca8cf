"""The bits of each stage that trains a VLM, pinned like those of the others in :mod:`tests.stages.test_pins`.

``COSMOS_PIN=1 pytest tests/stages/test_vlm_pins.py`` adds those of this machine.
"""

from pathlib import Path

from stages.artifacts.manifest import Manifest
from stages.vlm.settings import VLM_STAGES
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.test_pins import check_pins
from tests.stages.vlm_data import Talks, talk

PINS = Path(__file__).with_name("vlm_pins.json")


def all_stages(tmp_path: Path) -> dict[str, Manifest]:
    """Every stage once, by its name."""
    (tmp_path / "model").mkdir()
    talks = Talks(tmp_path / "data", tiny.save_model(tmp_path / "model", QWEN3))
    gif = bytes.fromhex("47494638376101000100800000000000ffffff2c00000000010001000002024401003b")
    (talks.folder / "media" / "b.gif").write_bytes(gif)
    talks.rows += [talk("<image>\nWhat?", "Black.", image="b.gif"), talk("Hello", "Hi.")]
    return {
        "vlm_index": talks.index("index"),
        "vlm_tokenize": talks.tokenize("tokens", "index"),
        "vlm_policy": talks.policy("policy"),
        "vlm_finetune": talks.finetune("trained", "policy", range(1), batch_size=2),
        "vlm_evaluate": talks.evaluate("evaluated", "trained"),
        "vlm_export": talks.export("exported", "trained"),
    }


def test_every_stage_of_vlms_makes_the_bytes_that_are_pinned(tmp_path: Path):
    made = all_stages(tmp_path)
    assert made.keys() == {stage.name for stage in VLM_STAGES}
    check_pins(made, PINS)
