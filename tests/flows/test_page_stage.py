"""The stage of the page, added to a copy of the tree as the page says: it is in the loop, and it runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT, examples, write, write_examples

RUN = """
import json, sys
from pathlib import Path

from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.post_train import steps
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from tests.stages.test_reward import CLOSE, RIGHT, write_samples

folder = Path(sys.argv[1])
store = str(folder / "store")
run = Run(freeze(plan_of(Settings(str(folder / "my_recipe.toml"), store, run_id="pages")), store), store)
write_samples(run.slots.iteration(0, "rollout"), [RIGHT, CLOSE])
made = execute(requests.diversity(run, 0), Execution(), Outcome(folder / "outcome", 0))
print(json.dumps([[step.name for step in steps(run)], made.summary["diversity"]]))
"""
CONTRACTS = "CONTRACTS: tuple[type[StageConfig], ...] = (\n"
PLACES = {
    "stages/contracts.py": (CONTRACTS, "{}\n\n{anchor}    Diversity,\n"),
    "flows/planning/requests.py": ("def update(run: Run, k: int) -> Request:", "{}\n\n{anchor}"),
    "flows/post_train.py": ("    # A stale rollout reads nothing", "{}\n{anchor}"),
}
"""The text at a place and the text that replaces it, by the file that the page edits."""


def add_stage(tree: Path) -> None:
    """Make what the page says in a copy of the packages."""
    shown = examples("stage.md")
    for package in ("stages", "flows"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    write(tree, {"stages/diversity.py": shown.pop("stages/diversity.py")})
    assert shown.keys() == PLACES.keys()
    for file, (anchor, then) in PLACES.items():
        text = (tree / file).read_text(encoding="utf-8")
        assert text.count(anchor) == 1, f"{file} has no single {anchor!r} any more"
        (tree / file).write_text(text.replace(anchor, then.format(shown[file], anchor=anchor)), encoding="utf-8")


def test_the_stage_of_the_page_is_in_the_loop_and_runs(tmp_path: Path):
    add_stage(tmp_path / "tree")
    write_examples(tmp_path)
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    environment = {"PYTHONPATH": f"{tmp_path / 'tree'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    names, diversity = json.loads(ended.stdout.splitlines()[-1])
    assert {"iteration-0000/diversity", "iteration-0001/diversity"} <= {*names}
    # One sample a prompt.
    assert diversity == 0
