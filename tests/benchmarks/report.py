"""Measure the page of a long run: ``python -m tests.benchmarks.report --iterations 100 --samples 1000 FOLDER``.

Fragments and page are made by the real code, from imagined samples whose pictures are 512 pixels wide. Prints the
largest fragment, the size of the page, and the seconds that a fragment and the page took.
"""

import argparse
import sys
import time
from pathlib import Path

from cosmos_rl_core.storage import store
from flows.library import open_run
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.reporting.report import write_report
from flows.session import loop
from tests.flows.imagined import Imagined

RECIPE = "configs/tiny/nft.toml"
PER_PROMPT = 20


def settings(folder: Path, iterations: int, samples: int) -> Settings:
    """The settings of a run of that size, which keeps the pictures of one rollout."""
    changes = {
        "train.train_batch_per_replica": samples,
        "train.train_policy.batch_size_per_optimize": samples // 4,
        "train.train_policy.mini_batch": samples // 4,
        "rollout.n_generation": PER_PROMPT,
        "rollout.n_generation_mini_batch": PER_PROMPT,
        "rollout.keep.media": 1,
        "validation.n_generation": 5,
        "validation.freq": 10,
    }
    overrides = [f"{name}={value}" for name, value in changes.items()]
    return Settings(RECIPE, str(folder / "store"), "large", iterations=iterations, overrides=overrides)


def main(argv: list[str]) -> int:
    """Make the run, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--samples", type=int, default=1000)
    asked = parser.parse_args(argv)
    wanted = settings(asked.folder, asked.iterations, asked.samples)
    run = Run(freeze(plan_of(wanted), wanted.store), wanted.store)
    imagined = Imagined(run, asked.folder, size=512)
    seconds: list[float] = []

    def launch(name: str, *requests):
        began_s = time.perf_counter()
        found = imagined.launch(name, *requests)
        if name.endswith("/update+fragment"):
            seconds.append(time.perf_counter() - began_s)
        return found

    loop.make(run, launch)
    sizes = [entry.size for name, entry in store.listed(run.url).items() if name.endswith("/fragment.json")]
    began_s = time.perf_counter()
    page = write_report(open_run("large", run.store_url))
    took_s = time.perf_counter() - began_s
    print(f"{len(sizes)} fragments, the largest {max(sizes) / 1e6:.2f} MB, {max(seconds):.2f} s at most")
    print(f"page {(store.size(page) or 0) / 1e6:.1f} MB in {took_s:.1f} s: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
