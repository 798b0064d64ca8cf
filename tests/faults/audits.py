"""Audits of a run at work: what is not there yet is no fault."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cosmos_rl_core.errors import ConfigError
from flows.auditing.audit import audit
from tests.e2e.flow_process import RUN_ID, Flows
from tests.faults import kinds
from tests.faults.bases import TWO_RANKS, Bases, plain
from tests.faults.kill import SAME

ENDED_S = 1800.0
PAUSE_S = 0.05
SUPERVISED = ("--iterations", "1", "--set", "train.train_policy.steps_per_iteration=2")
OTHER_RUN = "other"
PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "nft in an empty store": ("tests/e2e/tiny.toml", ()),
    "nft with shared embeddings": ("tests/e2e/tiny.toml", ()),
    "nft with staleness": ("tests/e2e/tiny.toml", ("--set", "train.staleness=1")),
    "ddrl": ("configs/tiny/ddrl.toml", ("--iterations", "1")),
    "grpo": ("configs/tiny/grpo.toml", ("--iterations", "1")),
    "sft": ("configs/tiny/sft.toml", SUPERVISED),
    "nft on 2 ranks": ("tests/e2e/tiny.toml", ("--iterations", "1", *TWO_RANKS)),
    # Its recipe names what is made for it.
    "vlm": ("", ()),
}
"""Recipes and the options of their commands."""


@dataclass
class Case:
    """Audits from the command's start to its end, and once more after it."""

    place: str
    seed: int
    audits: int = 0
    """Audits that saw the run, whole or not."""
    before: int = 0
    """Audits before there was a plan: `no such run`."""
    artifacts: list[int] = field(default_factory=list[int])
    """Numbers of artifacts that they saw, each once."""
    outcome: str = ""
    """``same bytes`` if none found a fault, or the first faults."""
    seconds: float = 0.0

    def line(self) -> str:
        """The case as a line of JSON."""
        return json.dumps(asdict(self))


def play(place: str, seed: int, bases: Bases) -> Case:
    """Audit a run without a pause while it is made."""
    began_s, case = time.monotonic(), Case(place, seed)
    recipe, options = PLACES[place]
    folder = bases.folder / "cases" / f"audits-{place.replace(' ', '-')}-{seed}"
    flows = plain(folder)
    flows.recipe = recipe
    if place == "vlm":
        options = kinds.prepare(flows, place, bases.inputs)
    Path(flows.store).mkdir(parents=True, exist_ok=True)
    try:
        if "shared" in place:
            command = ("run", recipe, "--store", flows.store, "--run-id", OTHER_RUN, "--iterations", "1", *options)
            flows.start_command(flows.program, *command).finish(timeout_s=ENDED_S)
        run = flows.start(*options)
        while run.process.poll() is None:
            _look(flows, case)
            time.sleep(PAUSE_S)
        if run.process.returncode:
            case.outcome = f"the command ended with {run.process.returncode}: {run.said[-2000:]}"
        _look(flows, case)
    finally:
        flows.kill_all()
    case.outcome = case.outcome or SAME
    case.seconds = round(time.monotonic() - began_s, 1)
    return case


def _look(flows: Flows, case: Case) -> None:
    planned = (flows.root / "plan.json").exists()
    try:
        found = audit(flows.store, RUN_ID)
    except ConfigError as error:
        case.before += 1
        if planned:
            case.outcome = case.outcome or f"there was a plan, and the audit said: {error}"
        return
    case.audits += 1
    if found.artifacts not in case.artifacts:
        case.artifacts.append(found.artifacts)
    if found.faults and not case.outcome:
        case.outcome = f"audit {case.audits}: {'; '.join(map(str, found.faults[:5]))}"
