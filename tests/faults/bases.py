"""Stores that cases start from, each made once in a work folder, and copies of them."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from flows.operations.rerun import rerun
from tests.e2e.flow_process import COLD, ITERATIONS, NO_PREFECT, RUN_ID, Flows
from tests.faults import kinds
from tests.twins.inputs import Inputs

LAST = ITERATIONS - 1
ON_TWO = ("--set", "launch.stage_processes.rollout=2", "--set", "launch.stage_processes.update=2")
ON_TWO += ("--allow-numerics-change",)
TWO_RANKS = (*COLD, *ON_TWO)
STAYING = ("launch.mode=warm", "launch.device=cpu", "launch.resident_gb=1")
STAYING = tuple(word for one in STAYING for word in ("--set", one))
"""Options by which ranks stay between the stages of a run."""
MEDIA = 67
"""Pictures of the dataset: captions of one shard, and three more."""


class Bases:
    """Makes a store when it is first asked for; other processes with the same folder wait for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.inputs = Inputs(self.folder / "inputs")
        """Weights and data, at the same paths for every case."""

    def copy(self, name: str, to: Path) -> Flows:
        """A store of its own with what the base of this name has."""
        base = self.folder / "bases" / name
        base.mkdir(parents=True, exist_ok=True)
        with (base / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (base / "made").exists():
                shutil.rmtree(base / "flows", ignore_errors=True)
                made = plain(base / "flows")
                parent, make = MAKERS[name]
                if parent is not None:
                    self.copy(parent, made.folder)
                make(made, self.inputs)
                assert made.nothing_is_left()
                (base / "made").touch()
        flows = plain(to)
        copy_store(base / "flows", flows)
        return flows


def plain(folder: Path) -> Flows:
    """Commands on a store in a folder, without Prefect."""
    flows = Flows(folder, {})
    flows.program = NO_PREFECT
    return flows


def copy_store(folder: Path, flows: Flows) -> None:
    """Copy a store and the media next to it, with the times of files, by which datasets know them."""
    for name in ("store", "media"):
        if (folder / name).exists():
            shutil.copytree(folder / name, flows.folder / name, dirs_exist_ok=True)


def write_media(folder: Path) -> None:
    """Write small pictures, all different, each with a caption."""
    folder.mkdir(parents=True)
    for number in range(MEDIA):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")


def _empty(flows: Flows, _: Inputs) -> None:
    Path(flows.store).mkdir()


def end(flows: Flows, *stages: str) -> None:
    """End artifacts of the last iteration, so that the next run makes them again."""
    for stage in stages:
        of_policy = stage in ("export", "evaluate", "report")
        rerun(flows.store, RUN_ID, stage, None if stage == "report" else LAST + of_policy)


def _tiny(flows: Flows, _: Inputs) -> None:
    flows.run()


def _two_ranks(flows: Flows, _: Inputs) -> None:
    """The last iteration by two ranks."""
    end(flows, "report", "export", "fragment", "update", "rollout")
    flows.run(*TWO_RANKS)


def _garbage(flows: Flows, _: Inputs) -> None:
    """The run with files of attempts that were killed, and of generations that were made again."""
    for stage, slot in (("rollout", "rollout"), ("reward-ocr", "reward-ocr")):
        end(flows, stage)
        run = flows.start()
        run.wait_until(lambda slot=slot: flows.markers(f"iterations/{LAST:04d}/{slot}", 1))
        run.kill()
        assert flows.nothing_is_left()
    flows.run()


def _pool(flows: Flows, _: Inputs) -> None:
    """Two runs of one iteration that share embeddings, and of which one has more."""
    for run, more in (("first", "1"), ("second", "2")):
        command = ("run", flows.recipe, "--store", flows.store, "--run-id", run, "--iterations", more)
        flows.start_command(flows.program, *command).finish()


def _media(flows: Flows, _: Inputs) -> None:
    Path(flows.store).mkdir()
    write_media(flows.folder / "media")


def _every_kind(base: str) -> Callable[[Flows, Inputs], None]:
    """A whole run with the stages that the tiny NFT run has not."""

    def make(flows: Flows, inputs: Inputs) -> None:
        flows.run(*kinds.prepare(flows, base, inputs))

    return make


MAKERS: dict[str, tuple[str | None, Callable[[Flows, Inputs], None]]] = {
    "empty": (None, _empty),
    "tiny": (None, _tiny),
    "two-ranks": ("tiny", _two_ranks),
    "garbage": ("tiny", _garbage),
    "pool": (None, _pool),
    "media": (None, _media),
    **{base: (None, _every_kind(base)) for base in kinds.KINDS},
}
"""The base that each begins as a copy of, and what is done then."""
