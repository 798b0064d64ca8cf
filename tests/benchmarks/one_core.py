"""Commands of this project on one core with one thread, what their ledgers say, and the memory of their processes."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from cosmos_rl_core.storage import store
from flows.devices.work_folders import PREFIX
from flows.ledger.pages import iteration_of, pages
from flows.library.opened_run import open_run
from tests.benchmarks.peak import peak_bytes

RECIPE = Path(__file__).parents[2] / "configs" / "tiny" / "nft.toml"
COMMAND = (sys.executable, "-c", "from cosmos_rl_core.command import main; main()")
CORE = max(os.sched_getaffinity(0))
"""Where everything that is measured runs. What measures runs on another one, where there is one."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
LOOK_S = 0.1


def start(
    words: Sequence[str], output: int | IO[Any], errors: int = subprocess.DEVNULL, **environment: str
) -> subprocess.Popen[str]:
    """A process on that core. Its standard input is a pipe."""
    return start_on({CORE}, words, output, errors, **environment)


def start_on(
    cores: set[int], words: Sequence[str], output: int | IO[Any], errors: int = subprocess.DEVNULL, **environment: str
) -> subprocess.Popen[str]:
    """A process on these cores. Its standard input is a pipe."""
    return subprocess.Popen(
        [*words],
        env=os.environ | ONE_THREAD | environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=errors,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


@dataclass
class Ended:
    """A command that has ended well."""

    seconds: float
    output: str
    began: float
    """Seconds since 1970."""
    peaks: dict[str, int] = field(default_factory=dict[str, int])
    """Most resident bytes of a process of each stage."""


def run(log: Path, *words: str, **environment: str) -> Ended:
    """Run a command of this project to its end, on that core. Ends this program with its output if it fails."""
    return run_on({CORE}, log, *words, **environment)


def run_on(cores: set[int], log: Path, *words: str, **environment: str) -> Ended:
    """Run a command of this project to its end, on these cores. Ends this program with its output if it fails."""
    began, began_s = time.time(), time.perf_counter()
    with (
        log.open("w", encoding="utf-8") as file,
        start_on(cores, [*COMMAND, *words], file, subprocess.STDOUT, **environment) as process,
    ):
        watched = _Peaks(process.pid)
        watched.start()
        code = process.wait()
        seconds = time.perf_counter() - began_s
        watched.stopped.set()
        watched.join()
    output = log.read_text(encoding="utf-8")
    if code:
        raise SystemExit(output)
    return Ended(seconds, output, began, dict(watched.found))


class _Peaks(threading.Thread):
    """Looks at the processes of stages below a command: their logs lie in folders with the names of their stages."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root, self.stopped = psutil.Process(pid), threading.Event()
        self.found: dict[str, int] = defaultdict(int)

    def run(self) -> None:
        """Look until somebody stops it."""
        while not self.stopped.wait(LOOK_S):
            with suppress(psutil.NoSuchProcess):
                for process in self._root.children(recursive=True):
                    self._look(process.pid)

    def _look(self, pid: int) -> None:
        with suppress(OSError, ValueError):
            log = os.readlink(f"/proc/{pid}/fd/1")
            if (named := re.search(rf"/{PREFIX}([a-z_]+)-[^/]*/", log)) is not None:
                self.found[named[1]] = max(self.found[named[1]], peak_bytes(pid))


def recipe_without_validation(folder: Path) -> str:
    """Path of the recipe as it ships, without its held-out evaluation."""
    text = re.sub(r"\[validation\]\n(?:.+\n)+", "", RECIPE.read_text(encoding="utf-8"))
    assert "[validation]" not in text
    path = folder / "nft.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def sizes_of(samples: int) -> list[str]:
    """Overrides for an iteration of so many samples."""
    # There are 128 prompts.
    group = 12 if samples <= 1200 else 120
    if samples % group:
        raise SystemExit(f"{samples} samples are no multiple of the {group} of a prompt")
    per_step = 32 if samples % 32 == 0 else samples
    return [
        f"train.train_batch_per_replica={samples}",
        f"rollout.n_generation={group}",
        f"train.train_policy.batch_size_per_optimize={per_step}",
    ]


def sets(overrides: Sequence[str]) -> list[str]:
    """Words of a command."""
    return [word for one in overrides for word in ("--set", one)]


def iteration(store_url: str, run_id: str, k: int) -> dict[str, Any]:
    """What iteration k of a run took, in seconds by its ledger; ``between_s`` is what is in no wave.

    It ends when the next wave is asked for, so that the flow's own work after its last wave counts.
    """
    opened = open_run(run_id, store_url)
    every = list(pages(opened.url))
    places = [place for place, page in enumerate(every) if iteration_of(page.wave) == k]
    here = [every[place] for place in places]
    waves = {page.wave.partition("/")[2].partition("-")[0].partition("+")[0]: page.wall_s for page in here}
    whole_s = every[places[-1] + 1].began - here[0].began
    samples = opened.samples(k)
    folder = store.join(opened.url, "iterations", f"{k:04d}")
    return {
        "iteration_s": whole_s,
        **{f"{wave}_s": seconds for wave, seconds in waves.items()},
        "between_s": whole_s - sum(waves.values()),
        "samples": len(samples.query("used")),
        "store_bytes": sum(entry.size for entry in store.listed(folder).values()),
    }
