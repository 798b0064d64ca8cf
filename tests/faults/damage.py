"""Cases of changed bytes: in a finished run, and between a kill and the command that goes on.

Damage is *believed* if an audit finds nothing, or if a command ends with 0 and another result than without the damage.
"""

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cosmos_rl_core.canonical import canonical_json, digest, sha256
from flows.auditing.audit import audit
from flows.cli.app import app
from tests.e2e.flow_process import RUN_ID, Flows, current_manifests, eventually
from tests.faults.bases import Bases, end, plain
from tests.faults.kill import ENDED_S, RANDOM, REACHED_S, SAME, reference_of, start
from tests.faults.scenes import ITERATION, Scene

OUTSIDE = {"logs", "lease", ".probe", "attempt.json", "progress.json"}
"""Names of files and folders that decide nothing."""
SLOT = re.compile(r"(.*?)/(attempts|shards|manifest\.|layout\.|invalidated\.|dropped\.)")


@dataclass
class Case:
    """Damage of one file, and what came of it."""

    place: str
    seed: int
    what: str = ""
    """What was done to which file."""
    found: str = ""
    """What found it."""
    outcome: str = ""
    """``same bytes`` if nobody believed it, or what is wrong."""
    seconds: float = 0.0

    def line(self) -> str:
        """The case as a line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class Damage:
    """Files that were changed, and their bytes before: None for those that were not there."""

    what: str
    before: dict[Path, bytes | None] = field(default_factory=dict[Path, bytes | None])

    def write(self, path: Path, data: bytes | None) -> None:
        """Write a file, or remove it, and keep what was there."""
        self.before.setdefault(path, path.read_bytes() if path.is_file() else None)
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)

    def undo(self) -> None:
        """Put everything back."""
        for path, data in self.before.items():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)


def files_that_count(store: Path) -> list[Path]:
    """The files of a store that decide something: results, sealed records and what is derived from them."""
    paths = sorted(path for path in store.rglob("*") if path.is_file())
    return [path for path in paths if not {*path.parts} & OUTSIDE]


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "emptied": lambda _, __: b"",
    "cut": lambda data, _: data[: len(data) // 2],
    "longer": lambda data, _: data + b"\n",
    "twice": lambda data, _: data * 2,
    "zeros": lambda data, _: bytes(len(data)),
    "noise": lambda data, dice: dice.randbytes(len(data)),
    "backwards": lambda data, _: data[::-1],
}
"""Changes of a file that need its bytes alone."""


@dataclass(frozen=True)
class Tampering:
    """A file, and the others of its store."""

    path: Path
    files: list[Path]
    dice: random.Random
    damage: Damage

    @property
    def data(self) -> bytes:
        """The bytes of the file."""
        return self.path.read_bytes()

    def other(self, alike: str) -> Path | None:
        """Another file with the same ``name`` or ``suffix`` and other bytes; None without one."""
        fits = [one for one in self.files if getattr(one, alike) == getattr(self.path, alike)]
        others = [one for one in fits if one.read_bytes() != self.data]
        return self.dice.choice(others) if others else None


def _gone(at: Tampering) -> bool:
    at.damage.write(at.path, None)
    return True


def _a_folder(at: Tampering) -> bool:
    at.damage.write(at.path, None)
    at.path.mkdir()
    return True


def _a_link(at: Tampering) -> bool:
    if (other := at.other("suffix")) is None:
        return False
    at.damage.write(at.path, None)
    at.path.symlink_to(other)
    return True


def _swapped(at: Tampering) -> bool:
    if (other := at.other("suffix")) is None:
        return False
    mine, theirs = at.data, other.read_bytes()
    at.damage.write(at.path, theirs)
    at.damage.write(other, mine)
    return True


def _namesake(at: Tampering) -> bool:
    """The bytes of the file of this name in another slot."""
    if (other := at.other("name")) is None:
        return False
    at.damage.write(at.path, other.read_bytes())
    return True


def _renamed(at: Tampering) -> bool:
    data = at.data
    at.damage.write(at.path, None)
    at.damage.write(at.path.with_name(f"{at.path.stem}-{at.path.suffix}"), data)
    return True


def _sealed_anew(at: Tampering) -> bool:
    """One digit of a sealed record, under a right seal."""
    if (body := _body(at.path)) is None:
        return False
    text = canonical_json(body).decode()
    places = [found.start() for found in re.finditer("[1-9]", text)]
    if not places:
        return False
    place = at.dice.choice(places)
    digit = at.dice.choice([digit for digit in "123456789" if digit != text[place]])
    body = json.loads(f"{text[:place]}{digit}{text[place + 1 :]}")
    at.damage.write(at.path, canonical_json({"body": body, "sha256": digest(body)}))
    return True


def _spaced(at: Tampering) -> bool:
    """The same JSON in other bytes."""
    if _body(at.path) is None:
        return False
    at.damage.write(at.path, json.dumps(json.loads(at.data), indent=1).encode())
    return True


def _next_generation(at: Tampering) -> bool:
    """A copy of a manifest as the next one."""
    if not at.path.name.startswith("manifest."):
        return False
    copy = at.path.with_name(f"manifest.{int(at.path.name.split('.')[1]) + 1}.json")
    if copy.exists():
        return False
    at.damage.write(copy, at.data)
    return True


FILES: dict[str, Callable[[Tampering], bool]] = {
    "gone": _gone,
    "a folder": _a_folder,
    "a link": _a_link,
    "swapped": _swapped,
    "namesake": _namesake,
    "renamed": _renamed,
    "sealed anew": _sealed_anew,
    "spaced": _spaced,
    "next generation": _next_generation,
}
"""Changes that need more than the bytes. They return whether the file is one that they can change."""
KINDS = (*BYTES, *FILES)


def tamper(kind: str, files: list[Path], dice: random.Random) -> Damage:
    """Change a whole file that the dice choose among those for which the change is one."""
    while True:
        path = dice.choice(files)
        damage = Damage(f"{kind}: {RANDOM.sub('*', path.name)}")
        if kind in FILES:
            changed = FILES[kind](Tampering(path, files, dice, damage))
        elif changed := (made := BYTES[kind](data := path.read_bytes(), dice)) != data:
            damage.write(path, made)
        if changed:
            return damage


def flip(files: list[Path], dice: random.Random) -> Damage:
    """Flip one bit."""
    path = dice.choice([one for one in files if one.stat().st_size])
    data = bytearray(path.read_bytes())
    place, bit = dice.randrange(len(data)), dice.randrange(8)
    data[place] ^= 1 << bit
    damage = Damage(f"bit {bit} of byte {place} of {RANDOM.sub('*', path.name)}")
    damage.write(path, bytes(data))
    return damage


def _body(path: Path) -> Any | None:
    """The body of a sealed record; None for another file."""
    try:
        found = json.loads(path.read_bytes()) if path.suffix == ".json" else None
    except ValueError:
        return None
    return found["body"] if isinstance(found, dict) and found.keys() == {"body", "sha256"} else None


def _asked(flows: Flows, *words: str) -> tuple[int, Any]:
    """The exit code of a command, and what it said."""
    said = CliRunner().invoke(app, [*words, "--store", flows.store])
    return said.exit_code, said.output


def _exported(flows: Flows) -> tuple[int, Any]:
    target = flows.folder / "exported"
    shutil.rmtree(target, ignore_errors=True)
    code, _ = _asked(flows, "export", RUN_ID, str(target))
    return code, {str(path.relative_to(target)): sha256(path.read_bytes()) for path in _files(target)}


def _resumed(flows: Flows) -> tuple[int, dict[str, str]]:
    run = flows.start()
    run.process.wait(ENDED_S)
    return run.process.returncode, contents(flows) if run.process.returncode == 0 else {}


def contents(flows: Flows) -> dict[str, str]:
    """The content of every slot of the run with a current artifact, as manifests say."""
    return {slot: one.content for slot, one in current_manifests(flows).items()}


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _status(flows: Flows) -> tuple[int, Any]:
    """The numbers of stages that ``status`` says are current. It ends with 0 when it shows damage."""
    code, said = _asked(flows, "status", RUN_ID, "--json")
    if code:
        return code, {}
    found = json.loads(said)
    numbers: dict[str, Any] = {
        one["name"]: (one["reward"], one["loss"]) for one in found["stages"] if one["state"] == "stands"
    }
    if (change := found["outlook"]["change"]) is not None:
        numbers[f"change up to {change['after']['k']}"] = json.dumps(change)
    return 0, numbers


COMMANDS: dict[str, Callable[[Flows], tuple[int, Any]]] = {
    "status": _status,
    "export": _exported,
    "run": _resumed,
}
"""Commands on a finished run, and what they give."""


def tampered(place: str, seed: int, bases: Bases) -> Case:
    """Change a file of a finished run in one of the sixteen ways."""
    return _damaged(place, seed, bases, lambda files, dice: tamper(place, files, dice))


def flipped(place: str, seed: int, bases: Bases) -> Case:
    """Flip a bit in a finished run. ``place`` is the command that is asked then."""
    return _damaged(place, seed, bases, flip)


def _damaged(place: str, seed: int, bases: Bases, harm: Callable[[list[Path], random.Random], Damage]) -> Case:
    began_s, dice, case = time.monotonic(), random.Random(f"{place} {seed}"), Case(place, seed)
    folder = bases.folder / "cases" / f"damage-{place.replace(' ', '-')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    flows = bases.copy("tiny", folder)
    command = place if place in COMMANDS else dice.choice([*COMMANDS])
    expected = COMMANDS[command](flows)
    assert expected[0] == 0, expected
    damage = harm(files_that_count(Path(flows.store)), dice)
    case.what = damage.what
    faults = audit(flows.store, RUN_ID).faults
    code, result = COMMANDS[command](flows)
    case.found = f"audit, {command}" if code else "audit"
    wrong = [] if faults else ["the audit found nothing"]
    # Where a file is missing, its stage is to be made again, and `status` says so.
    both = expected[1].keys() & result.keys()
    says_less = command == "status" and all(expected[1][name] == result[name] for name in both)
    if code == 0 and result != expected[1] and not says_less:
        wrong.append(f"{command} ended with 0 and another result")
    case.outcome = "; ".join(wrong) or SAME
    flows.kill_all()
    case.seconds = round(time.monotonic() - began_s, 1)
    if case.outcome == SAME:
        shutil.rmtree(folder)
    return case


def flipped_after_a_kill(place: str, seed: int, bases: Bases) -> Case:
    """Kill a run at a seeded moment of its last iteration, flip a bit of what it left, and go on."""
    began_s, dice, case = time.monotonic(), random.Random(f"{place} {seed}"), Case(place, seed)
    folder = bases.folder / "cases" / f"{place.replace(' ', '-')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    flows = bases.copy("tiny", folder)
    reference_of(place, bases)
    expected = contents(plain(bases.folder / "references" / place.replace(" ", "-")))
    end(flows, *ITERATION)
    _kill(Scene(flows, "/store/", [flows.start], dict), dice)
    damage = flip(_committed(Path(flows.store)), dice)
    case.what = damage.what
    (path,) = damage.before
    wrong = path.read_bytes()
    code, result = _resumed(flows)
    if code:
        case.found = f"run: {code}"
        damage.undo()
        code, result = _resumed(flows)
        case.outcome = _same(code, result, expected, flows)
    else:
        faults = audit(flows.store, RUN_ID).faults
        stays = path.is_file() and path.read_bytes() == wrong
        case.found = "audit" if faults else "made again" if not stays else ""
        clean = [] if case.found else ["the bit stays and the audit found nothing"]
        case.outcome = "; ".join(["other contents"] * (result != expected) + clean) or SAME
    flows.kill_all()
    case.seconds = round(time.monotonic() - began_s, 1)
    if case.outcome == SAME:
        shutil.rmtree(folder)
    return case


def _same(code: int, result: dict[str, str], expected: dict[str, str], flows: Flows) -> str:
    if code:
        return f"with the right bytes the same command ended with {code}"
    if result != expected:
        return "other contents"
    return SAME if not (faults := audit(flows.store, RUN_ID).faults) else f"faults in the end: {faults[0]}"


def _kill(scene: Scene, dice: random.Random) -> None:
    """Kill everything at a seeded change of files."""
    hold = scene.hold(dice.randint(1, 400))
    (started,) = start(scene, hold)
    eventually(lambda: hold.reached() or started.process.poll() is not None, REACHED_S)
    scene.flows.kill_all()
    hold.release()
    started.process.wait(ENDED_S)
    assert scene.flows.nothing_is_left()


def _committed(store: Path) -> list[Path]:
    """The files that count and that something sealed in their slot names, or that are sealed themselves."""
    chosen, texts = list[Path](), dict[str, str]()
    for path in files_that_count(store):
        if _body(path) is not None:
            chosen.append(path)
            continue
        slot = SLOT.match(str(path))
        if slot is None:
            continue
        if slot[1] not in texts:
            records = (one for one in _files(Path(slot[1])) if one.suffix == ".json")
            texts[slot[1]] = "".join(one.read_text(encoding="utf-8", errors="replace") for one in records)
        if str(path.relative_to(slot[1])) in texts[slot[1]]:
            chosen.append(path)
    return chosen
