"""Artifacts of two runs by stage: how many are equal, and where the runs part."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flows.comparing.side import Side
from flows.planning.steps import Step
from flows.post_train import steps_before
from stages.artifacts.slots import current_of

AT_ONCE = 16
"""Manifests that are read in parallel."""
DERIVED = ("report", "fragment")
"""Stages that show other artifacts to people. Theirs differ only if the shown ones or the names of the runs do."""


@dataclass
class StageCount:
    """The artifacts of one stage in both runs."""

    stage: str
    equal: int = 0
    different: int = 0
    only_a: int = 0
    only_b: int = 0
    first: str = ""
    """The step of the first one that differs."""

    def add(self, name: str, a: str | None, b: str | None) -> None:
        """Count one artifact of each run, by the digests of their files; None for one that is not current."""
        if a is None or b is None:
            self.only_a += a is not None
            self.only_b += b is not None
        elif a == b:
            self.equal += 1
        else:
            self.different += 1
            self.first = self.first or name


@dataclass(frozen=True)
class Artifacts:
    """All artifacts of both runs."""

    stages: Sequence[StageCount]
    first: str
    """The first step in the order of A whose artifacts differ; "" if all that both have are equal."""
    before: int
    """Number of equal artifacts before the first that differs."""

    @property
    def equal(self) -> bool:
        """Return whether both runs have the same artifacts, byte for byte."""
        return not self.first and not any(one.only_a or one.only_b for one in self.stages)

    @property
    def words(self) -> str:
        """Return in one sentence where the runs part."""
        total = sum(one.equal for one in self.stages)
        if self.first and not self.before:
            return f"the runs part at their first artifact, {self.first}"
        if self.first:
            return f"the runs part at {self.first}: {self.before} artifacts before it are equal byte for byte"
        if self.equal:
            return f"all {total} artifacts are equal byte for byte"
        return f"all {total} artifacts that both have are equal byte for byte; one run went further"


def artifacts(a: Side, b: Side) -> Artifacts:
    """Compare the current artifacts of both runs by the digests of their files. Reads manifests only."""
    both = ((*steps_before(one.run), *one.opened.steps) for one in (a, b))
    sides = [{step.name: step for step in every if step.kind not in DERIVED} for every in both]
    contents = [_contents(list(one.values())) for one in sides]
    stages: dict[str, StageCount] = {}
    first, before = "", 0
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [one.get(name) for one in contents]
        step = sides[0].get(name) or sides[1][name]
        stages.setdefault(step.stage, StageCount(step.stage)).add(name, *pair)
        if not first and None not in pair:
            first, before = (name, before) if pair[0] != pair[1] else ("", before + 1)
    return Artifacts([one for one in stages.values() if one.equal or one.different or one.only_a or one.only_b],
                     first, before)  # fmt: skip


def _contents(every: Sequence[Step]) -> dict[str, str]:
    """Return the digests of the files of each step with a current artifact."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda step: current_of(step.slot)[1], every)
        return {step.name: made.part_content() for step, made in zip(every, found, strict=True) if made is not None}
