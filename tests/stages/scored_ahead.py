"""A rollout and its scoring, part by part, as a launcher overlaps them."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards import jpeg
from stages import contracts
from stages.artifacts.layouts import cut
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import MediaShape, ModelRef
from stages.execution.outcome import Outcome
from stages.formats.samples import StoredSample, unit_files
from stages.generating.encoding import with_media
from stages.generating.plans import planned
from stages.scoring.overlap import Ahead
from tests.hand_made import begin, commit, make, report
from tests.stages.test_reward import run, scoring, table_of

PER_UNIT, UNITS = 3, 4
JPEG: RewardOptions = jpeg.Options(name="jpeg")
LEFT_S = 60.0


class Rollout:
    """A rollout of three prompts of four samples, in four units, which a test finishes one after the other."""

    def __init__(self, folder: Path, texts: tuple[str, ...] = ("x",) * 3) -> None:
        prompts = tuple(Prompt(id=f"p{number}", text=text) for number, text in enumerate(texts))
        make(report(str(folder / "made")))
        source = input_of(str(folder / "made"))
        config = contracts.Rollout(
            model=ModelRef(path="none", adapter="none", digest="none"),
            lora=None,
            prompts=prompts,
            n_generation=4,
            media=MediaShape(size=(16, 16), frames=1),
            sample=SolverConfig(num_steps=2),
            batch_size=3,
            samples_per_shard=PER_UNIT,
        )
        inputs = {"policy": (source,), "embeddings": (source,)}
        self.slot = str(folder / "rollout")
        self.request = Request(stage="rollout", slot=self.slot, iteration=0, seed=0, config=config, inputs=inputs)
        self.begin()

    def begin(self, pictures: int = 0) -> None:
        """Begin an attempt. Samples have other pixels for other ``pictures``."""
        rng = np.random.default_rng(pictures)
        plans = planned(self.request)
        stored = [with_media(p, rng.integers(0, 256, (1, 16, 16, 3), np.uint8), None, {"policy": "c"}) for p in plans]
        self.units: list[list[StoredSample]] = cut(stored, PER_UNIT)
        layout = {"units": [[one.sample_id for one in unit] for unit in self.units], "tile": 3}
        self.attempt = begin(self.request, layout=layout)

    def finish(self, number: int) -> None:
        self.attempt.finish(number, unit_files(number, self.units[number]))

    def commit(self) -> None:
        commit(self.attempt)

    def rest(self) -> None:
        """Finish all units, and commit."""
        for number in range(UNITS):
            if not self.attempt.adopt(number):
                self.finish(number)
        self.commit()


class Turns(Outcome):
    """What the scoring says, after which the rollout each time goes on."""

    def __init__(self, folder: Path, *turns: Callable[[], None]) -> None:
        super().__init__(folder, 0)
        self.turns = [*turns]

    def progress(self, phase: str, step: int, total: int) -> None:
        super().progress(phase, step, total)
        self.turns.pop(0)()


class Both:
    """A rollout and its scoring by one reward; ``plain`` scores the same rollout without any shard."""

    def __init__(
        self, folder: Path, options: RewardOptions, texts: tuple[str, ...] = ("x",) * 3, **settings: Any
    ) -> None:
        self.folder, self.rollout = folder, Rollout(folder, texts)
        self.options, self.settings = options, settings

    def request(self, slot: str = "reward", *, expected: bool = False) -> Request:
        source = self.rollout.request.expected("index", "media") if expected else self.source
        return scoring(str(self.folder / slot), source, options=self.options, **self.settings)

    @property
    def source(self) -> Any:
        return input_of(self.rollout.slot, "index", "media")

    @property
    def ahead(self) -> Ahead:
        return Ahead(self.rollout.request, self.request(expected=True))

    @property
    def shards(self) -> list[Path]:
        return sorted((self.folder / "reward" / "ahead").glob("*.json"))

    def score_ahead(self, *numbers: int) -> None:
        """Score while the rollout finishes these units, then let it end."""
        first, *others = (partial(self.rollout.finish, number) for number in numbers)
        self.ahead.run(Turns(self.folder / "ahead", first, *others, self.rollout.rest))

    def score(self, slot: str = "reward") -> tuple[dict[str, str], list[str]]:
        """Return the digests of all files but of the calls, which have seconds, and what people were told."""
        manifest, notes = run(self.request(slot), self.folder)
        return {name: entry.sha256 for name, entry in manifest.files.items() if "calls" not in name}, notes

    def require_equal(self, taken: int, of: int, *others: str) -> None:
        """Require the bytes of a scoring without shards, of which so many were taken."""
        found, notes = self.score()
        said = [f"{taken} of {of} shards were scored while the rollout ran"] if taken else []
        assert [note for note in notes if not any(word in note for word in others)] == said
        assert found == self.score("plain")[0]
        assert len(table_of(str(self.folder / "plain"), contracts.Reward.SCORES)["score"]) == PER_UNIT * UNITS


def flipped(shard: Path, _: Path) -> None:
    shard.write_bytes(shard.read_bytes().replace(b'"score":', b'"score": ', 1))


def eventually(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LEFT_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
