"""One case: processes of a command are killed at seeded moments, it is given again, and all is compared."""

import hashlib
import json
import os
import random
import re
import shutil
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from tests.e2e.flow_process import FORK_SERVER, RESIDENT, Flows, Started, eventually
from tests.faults.bases import Bases
from tests.faults.held import Hold
from tests.faults.scenes import SCENES, Scene

REACHED_S = 240.0
ENDED_S = 400.0
RANDOM = re.compile(r"\b[0-9a-f]{16,}\b")
"""Ids of attempts, digests and names of temporary files, which differ from case to case."""
SAME = "same bytes"
TRIES = 6
HELD = 0.6
"""Share of kills at the held moment itself; the others come a little later."""


@dataclass
class Kill:
    """What was killed, and when."""

    change: int
    """Number of the change of files before which the command was held; 0: none, the delay counts from its start."""
    of: int
    """Changes of an uninterrupted command."""
    delay_s: float
    """Time from the moment, or from the start, to the kill."""
    at: str = "the start"
    """Event and file of the moment."""
    killed: str = ""
    """What the process was."""
    codes: list[int] = field(default_factory=list[int])
    """Exit codes of the interrupted commands."""


@dataclass
class Case:
    """Kills of the same command, one after the other, and what came of them."""

    place: str
    seed: int
    kills: list[Kill] = field(default_factory=list[Kill])
    outcome: str = ""
    """``same bytes``, or what is wrong."""
    seconds: float = 0.0

    def line(self) -> str:
        """The case as a line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Reference:
    """The place without a kill."""

    changes: int
    seconds: float
    contents: str


def play(place: str, seed: int, bases: Bases, at_most: int = 3) -> Case:
    """Make one case. The folder of a case that went wrong stays."""
    reference = reference_of(place, bases)
    folder = bases.folder / "cases" / f"{place.replace(' ', '-')}-{seed}"
    began_s = time.monotonic()
    case = Case(place, seed)
    for earlier in (0.6**n for n in range(TRIES)):
        shutil.rmtree(folder, ignore_errors=True)
        scene = SCENES[place](bases, folder)
        try:
            _interrupt(scene, case, reference, at_most, earlier)
        finally:
            scene.ends.close()
            scene.flows.kill_all()
        # Where the command had ended before its first kill, another begins that is killed sooner.
        if case.kills or case.outcome != SAME:
            break
    case.seconds = round(time.monotonic() - began_s, 1)
    if case.outcome == SAME:
        shutil.rmtree(folder)
    return case


def _interrupt(scene: Scene, case: Case, reference: Reference, at_most: int, earlier: float) -> None:
    """Kill up to ``at_most`` times, then finish and compare. ``earlier`` is a factor of all moments."""
    dice = random.Random(f"{case.place} {case.seed}")
    before = {} if scene.deletes else scene.flows.manifests()
    case.outcome = ""
    for _ in range(at_most):
        kill = _kill(scene, dice, reference, earlier)
        if not kill.killed:
            # The command, or what earlier ones left of it, had ended.
            break
        case.kills.append(kill)
        if not scene.flows.nothing_is_left():
            left = [" ".join(process.cmdline()) for process in scene.flows.processes()]
            case.outcome = f"processes are left: {left}"
            return
    case.outcome = judge(scene, reference, before)


def reference_of(place: str, bases: Bases) -> Reference:
    """What an uninterrupted command does in a place, made once a work folder."""
    record = bases.folder / "references" / f"{place.replace(' ', '-')}.json"
    if record.exists():
        return Reference(**json.loads(record.read_bytes()))
    folder = bases.folder / "references" / place.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    scene = SCENES[place](bases, folder)
    try:
        hold = scene.hold(0)
        began_s = time.monotonic()
        for started in start(scene, hold):
            started.finish(timeout_s=ENDED_S)
        seconds = time.monotonic() - began_s
        if scene.again:
            for begin in scene.again:
                begin().finish(timeout_s=ENDED_S)
        reference = Reference(hold.count, seconds, digest(scene.contents()))
        assert (found := scene.faults()) == [], found
    finally:
        scene.ends.close()
        scene.flows.kill_all()
    record.write_text(json.dumps(asdict(reference)), encoding="utf-8")
    return reference


def digest(contents: Any) -> str:
    """The digest of what a scene leaves."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def start(scene: Scene, hold: Hold) -> list[Started]:
    """Begin the commands of a scene, held as ordered."""
    before = scene.flows.environment
    scene.flows.environment = before | hold.environment
    try:
        return [begin() for begin in scene.starts]
    finally:
        scene.flows.environment = before


def _kill(scene: Scene, dice: random.Random, reference: Reference, earlier: float) -> Kill:
    """Kill one process of the scene's commands, and wait for their end. If they ended too soon, none was."""
    number = max(1, int(dice.randint(1, reference.changes) * earlier)) if reference.changes else 0
    held = number > 0 and dice.random() < HELD
    late_s = reference.seconds if not number else min(2.0, reference.seconds / 8)
    kill = Kill(number, reference.changes, 0.0 if held else round(dice.uniform(0, late_s) * earlier, 3))
    hold = scene.hold(number)
    started = start(scene, hold)
    if number:
        eventually(lambda: hold.reached() or all(one.process.poll() is not None for one in started), REACHED_S)
        if (moment := hold.reached()) is not None:
            path = moment.path.removeprefix(str(scene.flows.folder.resolve()))
            kill.at = f"{moment.event} {RANDOM.sub('*', path)}"
    if not held:
        hold.release()
        time.sleep(kill.delay_s)
    roles = _roles(scene.flows, started, hold)
    if roles:
        kill.killed = dice.choice(sorted(roles))
        dice.choice(sorted(roles[kill.killed], key=lambda process: process.pid)).kill()
    hold.release()
    for one in started:
        one.process.wait(ENDED_S)
    kill.codes = [one.process.returncode for one in started]
    return kill


def _roles(flows: Flows, started: list[Started], hold: Hold) -> dict[str, list[psutil.Process]]:
    """The processes at work, by what they are."""
    moment, own = hold.reached(), {one.process.pid for one in started}
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in flows.processes():
        try:
            words, environment = process.cmdline(), process.environ()
            stays = RESIDENT in words
            # Between stages it writes nowhere.
            is_idle = stays and os.readlink(f"/proc/{process.pid}/fd/1") == os.devnull
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            continue
        names = {
            "the one at that file": moment is not None and process.pid == moment.pid,
            "the command": process.pid in own,
            "a rank": "RANK" in environment and "stages.execution.runner" in words,
            "an idle rank that stays": is_idle,
            "a rank that stays": stays,
            "torchrun": "torch.distributed.run" in words,
            "a process that scores": "--multiprocessing-fork" in words,
            "the fork server or a fork": FORK_SERVER in words,
            "a stage": "stages.execution.runner" in words,
            "Prefect's server": any("prefect" in word and "server" in word for word in words),
        }
        name = next((name for name, is_it in names.items() if is_it), "another")
        found[name].append(process)
    return found


def judge(scene: Scene, reference: Reference, before: dict[str, bytes]) -> str:
    """Give the same commands again and say what is wrong."""
    wrong: list[str] = []
    for one in [begin() for begin in scene.again or scene.starts]:
        one.process.wait(ENDED_S)
        if one.process.returncode != 0:
            wrong.append(f"the same command ended with {one.process.returncode}: {one.said[-2000:]}")
    if not wrong and digest(scene.contents()) != reference.contents:
        wrong.append("other contents")
    after = scene.flows.manifests()
    wrong += [f"{path} was changed" for path, data in before.items() if after.get(path) != data]
    if not wrong:
        wrong += scene.faults()
    if not scene.flows.nothing_is_left():
        wrong.append("processes are left in the end")
    return "; ".join(wrong) or SAME
