"""Run twins: ``python -m tests.twins [--part 1/3] [--only ddrl/14b] [--results FILE]``.

Each writes a JSON line to the file of results. Twins that are ok there are not run again.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.twins import services
from tests.twins.inputs import Inputs
from tests.twins.life import live
from tests.twins.shrinking import MOST_RANKS, profiled, twin_of


def part(text: str) -> slice:
    """Parse ``i/k``: every k-th twin, beginning with the i-th."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/k with 1 <= i <= k, such as 1/3")
    return slice(int(number) - 1, None, int(count))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Ends with a message for a twin that there is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.twins", description=__doc__)
    parser.add_argument("--part", type=part, default=slice(None), help="i/k: every k-th twin, from the i-th")
    parser.add_argument("--only", action="append", choices=sorted(profiled()), help="one twin; can be repeated")
    parser.add_argument("--results", type=Path, default=Path("outputs/twins.jsonl"), help="file of JSON lines")
    parser.add_argument("--folder", type=Path, help="new folder to keep them in; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0, help="seed of places and moments of kills")
    return parser.parse_args(given)


def undone(options: argparse.Namespace) -> Iterator[str]:
    """Yield the names of the twins that are asked for and that the results do not have."""
    done = set[str]()
    if options.results.exists():
        lines = map(json.loads, options.results.read_text(encoding="utf-8").splitlines())
        done = {line["twin"] for line in lines if line["ok"]}
    for name in sorted(profiled())[options.part]:
        if name not in done and name in (options.only or [name]):
            yield name


def main() -> int:
    """Run the twins, one after the other; return how many failed, at most 1."""
    options, failed = arguments(), 0
    names = [*undone(options)]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        folder = options.folder or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="twins-")))
        folder.mkdir(parents=True, exist_ok=options.folder is None)
        inputs = Inputs(folder.absolute() / "inputs")
        twins = [twin_of(name, inputs) for name in names]
        environment = held.enter_context(services.prefect_server(folder / "prefect", MOST_RANKS))
        held.enter_context(services.judge(inputs.judge_port))
        if any(twin.asks_service for twin in twins):
            environment |= held.enter_context(services.reward_service(folder / "rewards", inputs))
        for number, twin in enumerate(twins, 1):
            print(f"{number}/{len(twins)} {twin.name}: ", end="", flush=True)
            outcome = live(twin, folder.absolute() / twin.name.replace("/", "-"), environment, options.seed)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome.line()) + "\n")
            spent = f"{outcome.cpu_s:.0f} CPU seconds, {outcome.seconds:.0f} s"
            print(f"ok, {outcome.artifacts} artifacts, {spent}" if outcome.ok else f"FAILED, {spent}\n{outcome.said}")
            failed += not outcome.ok
    return min(failed, 1)


if __name__ == "__main__":
    # So that servers and twins end with the command.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
