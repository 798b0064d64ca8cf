"""The samples that a run has, and which of their parts are left to score."""

from dataclasses import dataclass
from functools import cached_property

from cosmos_rl_core.storage import store
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of, input_of, is_dropped
from stages.contracts import INDEX, MEDIA, TENSORS
from stages.formats.samples import all_rows, has_media


@dataclass(frozen=True)
class Stock:
    """The samples of a rollout, or of the evaluation of a policy version."""

    run: Run
    k: int
    """The iteration, or the policy version."""
    held_out: bool = False

    @property
    def slot(self) -> str:
        """Return the slot of the samples."""
        slots = self.run.slots
        return slots.version(self.k, "evaluate") if self.held_out else slots.iteration(self.k, "rollout")

    def scores(self, label: str) -> str:
        """Return the slot of the run's own scores of these samples by a reward."""
        slots = self.run.slots
        if self.held_out:
            return slots.version(self.k, f"evaluate-{label}")
        return slots.iteration(self.k, f"reward-{label}")

    @property
    def parent(self) -> str:
        """Return the beginning of the names of steps, before the slash, such as ``iteration-0003``."""
        return f"{'policy' if self.held_out else 'iteration'}-{self.k:04d}"

    @property
    def words(self) -> str:
        """Return the place of the samples in words, such as ``iteration 3``."""
        return f"policy {self.k}" if self.held_out else f"iteration {self.k}"

    @property
    def made(self) -> Manifest | None:
        """Return the manifest of the samples; None while there are none."""
        return current_of(self.slot)[1]

    def there(self, part: str) -> bool:
        """Return whether the samples have this part and it was not deleted."""
        made = self.made
        return made is not None and made.has_part(part) and not is_dropped(made, part)

    @cached_property
    def counts(self) -> "Counts":
        """Return the counts of the samples."""
        rows = [*all_rows(Artifact(input_of(self.slot, INDEX)))]
        finite = [row for row in rows if row["finite"]]
        return Counts(len(rows), len(finite), sum(not has_media(row) for row in finite))

    @cached_property
    def undecoded(self) -> int:
        """Return the number of its samples whose pictures are not there."""
        return self.counts.undecoded if self.there(MEDIA) else self.counts.finite

    @cached_property
    def has_latents(self) -> bool:
        """Return whether its final latents are there."""
        return self.there(TENSORS)

    def moved(self, url: str, stage: str) -> str:
        """Return the slot of a stage on these samples in the folder ``url`` of a re-score."""
        return store.join(url, "exports" if self.held_out else "iterations", f"{self.k:04d}", stage)


@dataclass(frozen=True)
class Counts:
    """Numbers of samples."""

    samples: int
    finite: int
    undecoded: int
    """Finite samples that the rollout did not decode."""


def rollouts_of(run: Run) -> list[Stock]:
    """Return the rollouts that a run has."""
    last = run.recipe.train.num_iterations if run.trains_on_rewards else 0
    return [stock for stock in (Stock(run, k) for k in range(last)) if stock.made is not None]


def evaluations_of(run: Run) -> list[Stock]:
    """Return the evaluations that a run has."""
    there = store.names(store.join(run.url, "exports"))
    judged = (Stock(run, int(name), held_out=True) for name in sorted(there) if name.isdecimal())
    return [stock for stock in judged if stock.made is not None]
