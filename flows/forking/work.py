"""The work that is left of a run: numbers of samples to generate, score and train on."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, fields

from cosmos_rl_core.errors import counted
from flows.forking.references import found_in_origin
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.run import run_of
from flows.post_train import post_train
from stages.artifacts.slots import current_of
from stages.registry import trains


@dataclass(frozen=True)
class Work:
    """Numbers of samples in the stages that have no artifact yet."""

    stages: int = 0
    generated: int = 0
    """Training samples."""
    held_out: int = 0
    """Samples of evaluations."""
    scored: int = 0
    """Scores of training samples and of evaluations, one for each reward."""
    trained: int = 0
    """Samples that an optimizer step reads, each pass counted."""

    def __add__(self, other: "Work") -> "Work":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Work(**sums)

    @property
    def words(self) -> str:
        """Return the work for people."""
        numbers = {
            "generated": self.generated,
            "generated for evaluations": self.held_out,
            "scored": self.scored,
            "trained on": self.trained,
        }
        told = ", ".join(f"{count:,} {what}" for what, count in numbers.items() if count)
        return f"{counted(self.stages, 'stage')}; samples: {told or 'none'}"


@dataclass(frozen=True)
class PlannedFork:
    """The references and the work of a fork that is not made yet."""

    run: str
    """Id of the fork."""
    origin: str
    at: int
    """The policy version that it begins with."""
    references: int
    """Number of artifacts of other runs that it refers to."""
    work: Work

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        yield f"{'fork':<11}of {self.origin} at policy {self.at}"
        yield f"{'refers to':<11}{counted(self.references, 'artifact')}, no file is copied"
        yield f"{'makes':<11}{self.work.words}"


def planned_fork(plan: AnyPlan, store_url: str) -> PlannedFork:
    """Return the references and the work of a fork. Writes nothing."""
    run, begins = run_of(plan, store_url), plan.origin
    assert begins is not None
    found = found_in_origin(run)
    return PlannedFork(plan.run_id, begins.run, begins.at, len(found), work_of(run, found))


def work_of(run: AnyRun, there: Container[str]) -> Work:
    """Return the work of a run in slots that have no artifact and are not in ``there``."""
    every = (step for wave in post_train(run) for step in wave.steps if step.slot not in there)
    left = [step for step in every if current_of(step.slot)[1] is None]
    train, validation = run.recipe.train, run.recipe.validation
    held_out = len(run.plan.validation_prompts) * getattr(validation, "n_generation", 0)
    batch = train.train_batch_per_replica
    per_pass = getattr(train.train_policy, "steps_per_iteration", 1) * getattr(train.train_policy, "mu_iterations", 1)
    kinds = [step.kind for step in left]
    scored = [held_out if step.stage.startswith("evaluate-") else batch for step in left if step.kind in _SCORES]
    return Work(
        stages=len(left),
        generated=kinds.count("rollout") * batch,
        held_out=kinds.count("evaluate") * held_out,
        scored=sum(scored),
        trained=sum(map(trains, kinds)) * batch * per_pass,
    )


_SCORES = ("reward", "judge")
