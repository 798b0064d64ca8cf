"""Facts of plugins are imported: neither a plan nor a stage parses Python sources."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stages.test_reward import RIGHT, scoring, write_samples

COUNTS = """
import ast, inspect, json, sys

parsed, parse = [], ast.parse

def counted(source, *args, **kwargs):
    # Signatures of functions in C are no sources; libraries read some when they are imported.
    if sys._getframe(1).f_code is not inspect._signature_fromstr.__code__:
        parsed.append(source)
    return parse(source, *args, **kwargs)

ast.parse = counted
from flows.planning.plan import Settings, plan_of
from stages.execution import runner

ocr = plan_of(Settings("configs/tiny/nft.toml")).recipe.rewards
ended = runner.main(sys.argv[1:])
print(json.dumps({"ended": ended, "torch": "torch" in sys.modules, "parsed": parsed}))
"""


@pytest.mark.processes
def test_a_plan_and_a_light_stage_parse_no_source(tmp_path: Path):
    request = tmp_path / "request.json"
    samples = write_samples(str(tmp_path / "rollout"), [RIGHT])
    request.write_text(scoring(str(tmp_path / "reward"), samples).model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-c", COUNTS, str(request)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == {"ended": 0, "torch": False, "parsed": []}
