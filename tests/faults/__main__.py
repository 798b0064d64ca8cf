"""``python -m tests.faults``: seeded faults in many places. A case whose line is in the file is not made again."""

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

from tests.faults import audits, damage, disk, kill
from tests.faults.bases import Bases
from tests.faults.kill import SAME
from tests.faults.scenes import SCENES

RESULTS = Path(__file__).with_name("results")
PLAYS = {
    "kills": (kill.play, tuple(SCENES)),
    # To score changes no file, and `gc` may be refused while its run is at work.
    "full-disks": (disk.play, tuple(place for place in SCENES if place not in ("score", "gc beside its run"))),
    "tampers": (damage.tampered, damage.KINDS),
    "flips": (damage.flipped, tuple(damage.COMMANDS)),
    "audits": (audits.play, tuple(audits.PLACES)),
    "flips-after-kills": (damage.flipped_after_a_kill, ("an iteration",)),
}
"""What makes a case, and the places in which it can."""


def main() -> int:
    """Make the cases that are missing, place by place, and print each. Returns 1 if one went wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--fault", choices=PLAYS, default="kills")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=4, help="seeds of each place; a case has up to three kills")
    parser.add_argument("--only", action="append", help="places; default: all")
    parser.add_argument("--results", type=Path, help="a file with a line of JSON a case; default: results/FAULT.jsonl")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / f"faults-{os.getuid()}")
    asked = parser.parse_args()
    results = asked.results or RESULTS / f"{asked.fault}.jsonl"
    results.touch()
    known = {(case["place"], case["seed"]) for case in map(json.loads, results.read_text().splitlines())}
    play, places = PLAYS[asked.fault]
    if unknown := set(asked.only or ()) - {*places}:
        parser.error(f"no such place: {', '.join(unknown)}; known: {', '.join(places)}")
    places = asked.only or places
    wrong = False
    for place, seed in ((place, asked.seed + i) for i in range(asked.count) for place in places):
        if (place, seed) in known:
            continue
        try:
            case = play(place, seed, Bases(asked.work))
        except Exception:
            # The scene could not be played; the next one may.
            print(f"{place}, seed {seed}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            wrong = True
            continue
        with results.open("a", encoding="utf-8") as file:
            file.write(case.line() + "\n")
        print(case.line(), flush=True)
        wrong |= case.outcome != SAME
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
