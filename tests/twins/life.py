"""The life of a twin: run, export, audit; then its last iteration once more, with a kill, and the same bytes."""

import hashlib
import random
import resource
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.flow_process import Flows, current_manifests
from tests.twins.shrinking import Twin

LONGEST_S = 3600.0
"""Seconds that any command of a twin may take."""
LAST = ("iterations/0000", "exports/0001", "report", "heads")
"""What the last of its iterations made, and the heads, which name it."""
TRIES = 5
KILLABLE = ("rollout", "judge", "update", "finetune", "vlm_finetune", "evaluate", "validate", "vlm_evaluate")
"""Stages with ranks that an iteration can have."""


class TwinError(Exception):
    """A twin that did not do as its recipe should."""


@dataclass
class Outcome:
    """What became of a twin; one line of the results."""

    twin: str
    recipe: str
    cluster: str
    ranks: int
    ok: bool = False
    said: str = ""
    """Why it is not ok."""
    artifacts: int = 0
    """Artifacts that were compared."""
    exported: int = 0
    """Files that ``export`` wrote."""
    killed: str = ""
    """Place and moment of the kill."""
    digest: str = ""
    """Digest of the contents of all its artifacts."""
    cpu: str = ""
    """The CPU that made these bits."""
    cpu_s: float = 0.0
    seconds: float = 0.0
    overrides: list[str] = field(default_factory=list[str])

    def line(self) -> dict[str, Any]:
        """Return the values of its line."""
        return asdict(self) | {"cpu_s": round(self.cpu_s, 1), "seconds": round(self.seconds, 1)}


def live(twin: Twin, folder: Path, environment: dict[str, str], seed: int) -> Outcome:
    """Take a twin through its life in ``folder``, which is emptied first. Never raises what its commands did wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    outcome = Outcome(
        twin.name,
        twin.recipe,
        twin.cluster,
        twin.ranks,
        overrides=[one.replace(f"{folder.parent}/", "") for one in twin.overrides],
    )
    began_s, cpu_s = time.monotonic(), _cpu_s()
    # The devices of a profile, without which stages would neither count nor lock any.
    environment = environment | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(twin.ranks)))}
    flows = [Flows(folder / name, environment, twin.recipe) for name in ("run", "copy")]
    try:
        _live(twin, flows[0], flows[1], outcome, random.Random(f"{twin.name} {seed}"))
        outcome.ok = True
    except (TwinError, AssertionError, subprocess.TimeoutExpired) as error:
        outcome.said = str(error)[-6000:]
    finally:
        for one in flows:
            one.kill_all()
    outcome.seconds, outcome.cpu_s = time.monotonic() - began_s, _cpu_s() - cpu_s
    return outcome


def _live(twin: Twin, flows: Flows, copy: Flows, outcome: Outcome, dice: random.Random) -> None:
    options = ["--cluster", twin.cluster, *(word for one in twin.overrides for word in ("--set", one))]
    flows.start(*options).finish(timeout_s=LONGEST_S)
    flows.command("export", str(flows.folder / "exported"))
    outcome.exported = sum(path.is_file() for path in (flows.folder / "exported").rglob("*"))
    flows.command("audit")
    reference = contents(flows)
    outcome.artifacts, outcome.digest = len(reference), digest_of(reference)
    outcome.cpu = next(filter(None, (made.numerics.get("cpu") for made in current_manifests(flows).values())), "")

    stages = [stage for stage in _stages(flows) if stage in KILLABLE]
    for earlier in (0.5**n for n in range(TRIES)):
        shutil.rmtree(copy.store, ignore_errors=True)
        shutil.copytree(flows.store, copy.store)
        copy.forget(*(slot for slot in LAST if (copy.root / slot).exists()))
        if said := _interrupted(copy, options, dice, stages, earlier):
            outcome.killed = said
            break
    else:
        raise TwinError(f"nothing was killed in {TRIES} tries: the stages had ended")
    copy.command("audit")
    if different := sorted(slot for slot, made in contents(copy).items() if made != reference.get(slot)):
        raise TwinError(f"other contents after a kill {outcome.killed}: {', '.join(different)}")
    if missing := sorted(reference.keys() - contents(copy).keys()):
        raise TwinError(f"nothing at {', '.join(missing)} after a kill {outcome.killed}")


def _interrupted(flows: Flows, options: list[str], dice: random.Random, stages: list[str], earlier: float) -> str:
    """Make what is missing, with one kill; return where it was, "" if the stage had ended before it.

    ``earlier`` is a factor of the moment.
    """
    stage, delay_s = dice.choice(stages), dice.uniform(0.0, 2.0) * earlier
    victim = dice.choice(["rank", "rank", "launcher", "flow"])
    started = flows.start(*options)
    started.wait_until(lambda: _is_at(flows, stage), LONGEST_S)
    time.sleep(delay_s)
    ranks, stays = _ranks(flows, stage)
    # Processes that stay are the flow's own.
    victim = "flow" if stays and victim == "launcher" else victim
    moment = f"of {victim} {delay_s:.2f} s into {stage}"
    if not ranks or not _is_at(flows, stage):
        moment = ""
    elif victim == "flow":
        started.kill()
        flows.start(*options).finish(timeout_s=LONGEST_S)
        return moment
    else:
        with suppress(psutil.NoSuchProcess):
            (flows.torchrun() if victim == "launcher" else dice.choice(ranks)).kill()
    started.finish(timeout_s=LONGEST_S)
    return moment


def _is_at(flows: Flows, stage: str) -> bool:
    """Return whether a stage is at work: it has reported progress, and its ranks are running."""
    return any(flows.temporary.glob(f"cosmos-flows-{stage}-*/status.json")) and bool(_ranks(flows, stage)[0])


def _ranks(flows: Flows, stage: str) -> tuple[list[psutil.Process], bool]:
    """Return the ranks of a stage at work, and whether they are processes that stay."""
    if staying := flows.staying(stage):
        return staying, True
    return [*flows.ranks().values()], False


def _stages(flows: Flows) -> list[str]:
    """Return the stages of the last iteration."""
    found = current_manifests(flows)
    return sorted({made.stage for slot, made in found.items() if slot.startswith(LAST)})


def contents(flows: Flows) -> dict[str, str]:
    """Return the digest of the results of every artifact of the run, by its slot."""
    return {slot: made.content for slot, made in current_manifests(flows).items()}


def digest_of(found: dict[str, str]) -> str:
    """Return one digest of all contents."""
    return hashlib.sha256(
        "".join(f"{slot} {content}\n" for slot, content in sorted(found.items())).encode()
    ).hexdigest()


def _cpu_s() -> float:
    """Return the CPU seconds of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
