"""Measure ``overlap = true``: iterations of a run whose reward waits, with scoring during the rollout and after it.

``python -m tests.benchmarks.overlap`` writes what came out into ``results/``. Set ``OMP_NUM_THREADS=1``.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks import laborious, record

COMMAND = "from cosmos_rl_core.command import main; main()"
RECIPE = Path(__file__).parents[2] / "configs" / "tiny" / "nft.toml"
REWARD = "{{ weight = 1.0, role = 'train', overlap = {overlap}, fn = {{ name = 'laborious', wait_s = {wait_s} }} }}"


def iterations_s(store: Path, settings: argparse.Namespace, *, overlap: bool) -> tuple[list[float], str]:
    """Seconds from one update to the next, and the digest of the last policy. Iteration 0 also loads the model."""
    options = (
        f"plugins=['{laborious.__file__}']",
        f"rewards=[{REWARD.format(overlap=str(overlap).lower(), wait_s=settings.wait_s)}]",
        f"policy.diffusers.sample.num_steps={settings.num_steps}",
        "rollout.n_generation_mini_batch=12",
        "rollout.samples_per_shard=12",
        "validation.n_generation=1",
        "early_warning.statistics=false",
    )
    command = [sys.executable, "-c", COMMAND, "run", str(RECIPE), "--store", str(store), "--run-id", "measured"]
    command += ["--iterations", str(settings.iterations + 1), *(word for one in options for word in ("--set", one))]
    ended = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(ended.stdout)
    updates = sorted(store.glob("runs/measured/iterations/*/update/manifest.*.json"))
    ends_s = [path.stat().st_mtime for path in updates]
    weights = b"".join(path.read_bytes() for path in sorted(updates[-1].parent.glob("attempts/*/current/*")))
    return [after - before for before, after in pairwise(ends_s)], sha256(weights).hexdigest()


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    settings = _parser().parse_args(argv)
    measured = record.Measured(settings)
    found: dict[bool, list[float]] = {False: [], True: []}
    policies = set[str]()
    for repeat in range(settings.repeats):
        for overlap in (False, True) if repeat % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                seconds, policy = iterations_s(Path(folder), settings, overlap=overlap)
            found[overlap] += seconds
            policies.add(policy)
    if len(policies) != 1:
        raise SystemExit("overlap changed the bits of the policy")
    after_s, during_s = (statistics.median(found[overlap]) for overlap in (False, True))
    row: dict[str, Any] = {"after_s": after_s, "beside_s": during_s, "ratio": during_s / after_s}
    measured.write("overlap", [row])
    print(row)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overlap", description=__doc__)
    parser.add_argument("--wait-s", type=float, default=0.1, help="seconds that the reward waits for a sample")
    parser.add_argument("--num-steps", type=int, default=40, help="solver steps of a sample")
    parser.add_argument("--iterations", type=int, default=4, help="iterations that are timed, after one that is not")
    parser.add_argument("--repeats", type=int, default=3, help="runs with overlap, and without")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
