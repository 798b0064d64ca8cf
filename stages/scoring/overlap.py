"""Score the finished units of a rollout while it makes others: ``python -m stages.scoring.overlap FOLDER``.

The folder has the Requests of the rollout and of the reward. The scores go into the reward's slot as shards; the reward
stage takes a shard if its samples are the samples that the rollout committed. This process commits nothing, and no run
depends on it: if it fails or is killed, the reward stage scores more itself. It ends when the rollout is committed.

A reward with torch is scored under ``torch.distributed.run``, with the ranks and the ``execution.json`` of the reward
stage, so that scores have the same bits as there.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.processes import die_with_parent
from cosmos_rl_core.rewards._base import NamedReward, WindowReward
from cosmos_rl_core.rewards._batches.exact import ONE_BY_ONE
from cosmos_rl_core.storage import store
from stages.artifacts.files import read_stored
from stages.artifacts.generations import current_generation, is_committed
from stages.artifacts.records import FileEntry, Layout, Marker
from stages.artifacts.request import REQUEST, ROLLOUT, Request
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome, failure_of
from stages.execution.runner import joined, own_rank, require_own_version
from stages.generating.plans import planned
from stages.scoring.portions import Portion, portions_of
from stages.scoring.processes import side_by_side
from stages.scoring.scorer import Scorer
from stages.scoring.shards import Shards

SUMMARY = "Score the finished units of a rollout while it makes others."
LOOK_S = 0.5
"""Seconds between two looks for finished units."""


class Growing:
    """A rollout that is being made, and its finished units."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._entries: dict[str, FileEntry] = {}
        self.layout: Layout | None = None
        """The rollout's layout, which says how its samples are divided; None before that is decided."""
        self.finished: set[int] = set()
        """Numbers of the rollout's finished units."""

    def entry(self, name: str) -> FileEntry:
        """Return the size and digest of a file of a finished unit."""
        return self._entries[name]

    def read(self, name: str) -> bytes:
        """Read a file of a finished unit. Raises :class:`ArtifactError` unless its bytes match the entry."""
        return read_stored(self._request.slot, self._entries[name])

    def json(self, name: str) -> Any:
        """Read a JSON file of a finished unit."""
        return json.loads(self.read(name))

    def look(self) -> bool:
        """Look for finished units. Return False once the rollout is committed.

        Units of an earlier generation do not count: other settings made it, or it did not fit into memory.
        """
        slot = self._request.slot
        generation = current_generation(slot)
        if self.layout is None or self.layout.generation != generation:
            self._begin(Layout.read(slot, generation))
        if is_committed(slot, generation):
            return False
        if self.layout is not None:
            self._read_markers(self.layout)
        return True

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per sample of all units, finished or not: its id, its prompt's and the number of its unit."""
        assert self.layout is not None
        prompts = {plan.sample_id: plan.prompt.id for plan in planned(self._request)}
        units = enumerate(self.layout.layout["units"])
        return [{"sample_id": i, "prompt_id": prompts[i], "unit": number} for number, ids in units for i in ids]

    def _begin(self, layout: Layout | None) -> None:
        asked = self._request.recipe, self._request.input_contents
        self.layout = layout if layout is not None and (layout.recipe, layout.inputs) == asked else None
        self._entries, self.finished = {}, set()

    def _read_markers(self, layout: Layout) -> None:
        slot = self._request.slot
        folder = store.join(slot, layout.shards)
        there = {int(name[:5]) for name in store.names(folder) if name[:5].isdecimal()}
        for number in sorted(there - self.finished):
            url = store.join(folder, f"{number:05d}.json")
            marker = Marker.unsealed(store.read(url), url, slot, layout.generation)
            if (marker.layout, marker.index) != (layout.shards, number):
                raise ArtifactError(f"{url} was written for shard {marker.index} of {marker.layout}")
            self._entries |= marker.files
            self.finished.add(number)


class Ahead:
    """Scoring of one rollout by one reward, by this process alone or as number ``share`` of ``count`` processes.

    For a reward with torch, its ranks share the samples instead. They communicate here, and never after.
    """

    def __init__(
        self,
        rollout: Request,
        reward: Request,
        share: int = 0,
        count: int = 1,
        execution: Execution | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        require_own_version(reward)
        ranks, self._numerics = joined(reward, execution or Execution())
        self._request = reward
        self._share, self._count = (ranks.rank, ranks.world_size) if reward.config.torch else (share, count)
        self._samples = Growing(rollout)
        self._made_by: dict[str, str] = {}
        self._scorer = self._new_scorer()
        if self._scorer.make_exact(ranks.gather, note):
            self._made_by["batches"] = ONE_BY_ONE
        self._generation = current_generation(reward.slot)
        self._layout: Layout | None = None
        self._waiting: list[Portion] = []
        self._num_portions = 0

    def _new_scorer(self) -> Scorer:
        """Return a scorer that has read no samples. Of a service it accepts only scores by the present scorer.

        The reward stage decides which scorer the run keeps to, and each shard names the scorer that scored it.
        """
        scorer = Scorer(self._request, self._samples)
        if isinstance(scorer.reward, NamedReward) and (served := scorer.reward.scorer()) is not None:
            scorer.hold_to(served)
            self._made_by = {"served": served.digest}
        return scorer

    def run(self, outcome: Outcome) -> None:
        """Score each portion once all its units are finished, until the rollout is committed or all are scored.

        A slot with scores is left alone: they may be current for the new rollout too.
        """
        if is_committed(self._request.slot, self._generation):
            return
        outcome.progress("waiting for samples", 0, 1)
        while self._samples.look():
            self._divide()
            if ready := [one for one in self._waiting if one.units.keys() <= self._samples.finished]:
                self._score(ready, outcome)
            elif self._layout is not None and not self._waiting:
                return
            else:
                time.sleep(LOOK_S)

    def _divide(self) -> None:
        """Divide the samples into portions again if the rollout has another layout now."""
        if self._samples.layout is self._layout:
            return
        if self._layout is not None:
            self._scorer.forget_units()
        self._layout, self._waiting = self._samples.layout, []
        if self._layout is not None:
            groupwise = self._scorer.groupwise
            portions = portions_of(self._samples.rows(), self._scorer.part, groupwise=groupwise)
            self._waiting = portions.all[self._share :: self._count]
            self._num_portions = len(self._waiting)

    def _score(self, ready: Sequence[Portion], outcome: Outcome) -> None:
        shards = Shards(self._request, self._scorer, self._generation, self._numerics, self._made_by)
        there = shards.names
        left = [portion for portion in ready if shards.name(portion) not in there]
        for portion in ready:
            if portion not in left:
                self._ended(portion, outcome)
        # A service gets all portions at once, without a pause between two.
        windows = isinstance(self._scorer.reward, WindowReward)
        with closing(side_by_side(self._scorer, self._request, left, 1, None)) as scored:
            for portion, made in scored:
                shards.write(portion, made)
                self._ended(portion, outcome)
                if not windows and not (self._samples.look() and self._samples.layout is self._layout):
                    return

    def _ended(self, portion: Portion, outcome: Outcome) -> None:
        self._waiting.remove(portion)
        outcome.progress("scoring ahead", self._num_portions - len(self._waiting), self._num_portions)


def main(argv: Sequence[str] | None = None) -> int:
    """Score by as many processes as the arguments say, and return the exit code: 0 if none failed."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m stages.scoring.overlap", description=SUMMARY)
    parser.add_argument("folder", type=Path, help=f"folder of {REQUEST} (of the reward) and {ROLLOUT}")
    parser.add_argument("--processes", type=int, default=1, help="number of processes that share the samples")
    args = parser.parse_args(argv)
    # Spawned, because a fork would copy the threads' locks of whatever the reward has loaded.
    spawn = get_context("spawn")
    count = args.processes
    others = [spawn.Process(target=_share, args=(args.folder, share, count)) for share in range(1, count)]
    for other in others:
        other.start()
    code = _run(args.folder, 0, count)
    for other in others:
        other.join()
    return code or next((70 for other in others if other.exitcode), 0)


def _share(folder: Path, share: int, count: int) -> None:
    die_with_parent()
    sys.exit(_run(folder, share, count))


def _run(folder: Path, share: int, count: int) -> int:
    outcome = Outcome(folder, share or own_rank())
    try:
        data = (folder / REQUEST).read_bytes()
        outside_plugins.use(outside_plugins.named_in(data), verify=True)
        rollout, reward = (Request.model_validate_json((folder / name).read_bytes()) for name in (ROLLOUT, REQUEST))
        Ahead(rollout, reward, share, count, Execution.read(folder / REQUEST), outcome.note).run(outcome)
    except Exception as error:
        failure = failure_of(error)
        outcome.failed(failure)
        print(failure.traceback, file=sys.stderr, flush=True)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    # Threads that still wait for a service must not keep the process alive.
    returned = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(returned)
