"""Plans and runs: the fields and methods that runs of every kind have."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

from pydantic import ConfigDict, Field

from cosmos_rl_core import plugins
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.early_warning import STATISTICS, EarlyWarningConfig
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.recipe import CkptConfig, LoggingConfig
from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.datasets._shares import Share
from cosmos_rl_core.outside_plugins import Pin
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease, holder_of
from cosmos_rl_core.weights.parts import TRAINING_ONLY
from flows.lineage.forks import is_held
from flows.lineage.origin import Origin
from flows.planning.datasets import Pinned
from stages.artifacts.request import FORMAT, Input, Request
from stages.artifacts.slots import current_of, drop
from stages.contracts import Init, ModelRef, StageConfig


class Changeable(Protocol):
    """A section of a recipe, which can be copied with other values."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return the section with other values."""
        ...


class Training(Changeable, Protocol):
    """The length of a run, its algorithm, and what it keeps."""

    @property
    def seed(self) -> int:
        """Return the seed of every random draw."""
        ...

    @property
    def num_iterations(self) -> int:
        """Return the number of iterations."""
        ...

    @property
    def train_batch_per_replica(self) -> int:
        """Return the number of samples of an iteration, or of a step of supervised training."""
        ...

    @property
    def max_gpu_hours(self) -> float | None:
        """Return the limit of device hours, if there is one."""
        ...

    @property
    def ckpt(self) -> CkptConfig:
        """Return the retention and exports of policies."""
        ...

    @property
    def ema_enable(self) -> bool:
        """Return whether policies have a moving average."""
        ...

    @property
    def train_policy(self) -> Any:
        """Return the options of the algorithm, with ``type`` and ``rewarded``."""
        ...


class Ranking(Changeable, Protocol):
    """The held-out evaluation of policies."""

    @property
    def freq(self) -> int:
        """Return the number of iterations between evaluations; 0 evaluates only the first and the last policy."""
        ...

    @property
    def best_by(self) -> str | None:
        """Return the name of the number that ranks policies; None for the default."""
        ...


@runtime_checkable
class AnyRecipe(Changeable, Protocol):
    """A recipe of any kind of run."""

    @property
    def train(self) -> Training:
        """Return the training of the run."""
        ...

    @property
    def validation(self) -> Ranking | None:
        """Return the held-out evaluation of the run, if it has one."""
        ...

    @property
    def launch(self) -> LaunchConfig:
        """Return the processes and machines of the run."""
        ...

    @property
    def logging(self) -> LoggingConfig:
        """Return the destinations of the run's numbers."""
        ...

    @property
    def early_warning(self) -> EarlyWarningConfig | None:
        """Return the limits on scores of the run, if it has any."""
        ...

    @property
    def rewards(self) -> tuple[RewardConfig, ...]:
        """Return the rewards of the run."""
        ...

    @property
    def evaluates(self) -> bool:
        """Return whether policies generate samples from held-out prompts."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the result, as plain JSON data."""
        ...

    def model_dump(self, *, mode: str = "python", exclude_defaults: bool = False) -> dict[str, Any]:
        """Return all settings."""
        ...


OfKind = TypeVar("OfKind", bound=AnyRecipe, covariant=True)


class BasePlan(Section, Generic[OfKind]):
    """A recipe, and everything that was resolved for it. Fields that a kind of run does not use keep their defaults."""

    # For the type of the recipe, until a kind names its class.
    model_config = ConfigDict(arbitrary_types_allowed=True)
    format: Literal[1] = FORMAT
    run_id: str
    recipe: OfKind
    model: ModelRef
    prompts: tuple[Prompt, ...]
    """Training prompts; for supervised training the captions of the media, unless these stay in the store."""
    shares: tuple[Share, ...] = Field(default=(), json_schema_extra={"neutral": []})
    """The sets of a mixture, in the order of their prompts; empty if all prompts are one set."""
    validation_prompts: tuple[Prompt, ...] = ()
    data_prompts: tuple[Prompt, ...] = Field(default=(), json_schema_extra={"neutral": []})
    """Captions of the media that an algorithm with rewards reads in addition to its prompts."""
    data_digest: str = Field(default="", json_schema_extra={"neutral": ""})
    """Digest of the files of the media that are trained on; ``""`` for media that are generated, and for no media."""
    held_out_prompts: tuple[Prompt, ...] = Field(default=(), json_schema_extra={"neutral": []})
    """Captions of the held-out media."""
    held_out_digest: str = Field(default="", json_schema_extra={"neutral": ""})
    """Digest of the files of the held-out media."""
    init: Init | None = Field(default=None, json_schema_extra={"neutral": None})
    """The trained weights that policy version 0 begins with; None for the base model's or fresh weights."""
    init_inputs: tuple[Input, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """The policy of another run that ``init`` names, and the frozen adapter below it, if there is one."""
    origin: Origin | None = Field(default=None, json_schema_extra={"neutral": None})
    """The run that this run is a fork of; None for a run that begins with policy version 0."""
    data_snapshot: Pinned | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """The snapshot that is trained on. A run keeps it, so a newer snapshot does not change the default run id."""
    held_out_snapshot: Pinned | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """The snapshot whose media are held out."""
    prefixed: bool = Field(default=False, json_schema_extra=NOT_IDENTITY)
    """Whether stored embeddings are outputs of the transformer's frozen first module. Pinned: a run has one format."""
    checkpointing: bool | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Pinned decision of ``policy.model_gradient_checkpointing = "auto"``; None if the recipe decides."""
    buckets: tuple[tuple[int, int], ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Heights and widths in pixels. Each medium is cut to the nearest pair; empty if all are cut to one size."""
    plugins: tuple[Pin, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Plugins from outside the package, with the digests of their files: an edited file is refused."""
    early_warning: EarlyWarningConfig | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Limits on the scores of rollouts: from the run's newest recipe that sets limits, else the defaults at the time
    of planning. None in plans written before limits existed."""
    stage_versions: dict[str, int] = Field(json_schema_extra=NOT_IDENTITY)
    """Version of each stage in the Requests: from the code that planned the run, or last took ``--remake``."""
    races_decided: bool
    """Whether the store lets only the first of several writers create a file. If not, one process may write a run."""

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts, or of conversations, that are trained on."""
        return len(self.prompts)

    @property
    def lineage(self) -> str:
        """Return in words what the run begins with; "" for the base model, and for fresh weights."""
        return self.origin.words if self.origin else ""

    @property
    def first(self) -> int:
        """Return the policy version that the run begins with: 0, or the version at which it forked."""
        return self.origin.at if self.origin else 0

    @property
    def generates(self) -> bool:
        """Return whether the run makes its own rollouts; False if it trains on the rollouts of its origin."""
        return self.origin is None or self.origin.stored is None

    @property
    def baseline(self) -> int:
        """Return the version whose scores and evaluations the others are compared with."""
        return 0 if self.origin is None or self.origin.alike else self.first

    def optimizer_step(self, k: int, num_steps: int) -> int:
        """Return the number of optimizer steps before iteration k, with ``num_steps`` in each iteration."""
        before = self.origin.optimizer_steps if self.origin else 0
        return before + (k - self.first) * num_steps

    @property
    def snapshots(self) -> list[Pinned]:
        """Return the prepared datasets that the run reads."""
        return [pinned for pinned in (self.data_snapshot, self.held_out_snapshot) if pinned is not None]

    def request(
        self,
        slot: str,
        config: StageConfig,
        k: int | None = None,
        inputs: dict[str, tuple[Input, ...]] | None = None,
        seed: int | None = None,
    ) -> Request:
        """Return a Request with the stage version, the plugins and, if ``seed`` is None, the seed of this plan."""
        return Request(
            stage=config.name,
            version=self.stage_versions.get(config.name, config.version),
            slot=slot,
            iteration=k,
            seed=self.recipe.train.seed if seed is None else seed,
            config=config,
            inputs=inputs or {},
            plugins=self.plugins,
        )


def run_url(store_url: str, run_id: str) -> str:
    """Return the root of a run."""
    return store.join(store.absolute(store_url), "runs", run_id)


@dataclass(frozen=True)
class Slots:
    """URLs of the slots below the root of a run."""

    root: str
    rewarded: bool
    """Whether policy version k + 1 is made by ``update`` (True) or ``finetune`` (False)."""

    def iteration(self, k: int, stage: str) -> str:
        """Return the slot of a stage in iteration k."""
        return store.join(self.root, "iterations", f"{k:04d}", stage)

    def version(self, k: int, stage: str) -> str:
        """Return the slot of a stage on policy version k: its export, its held-out samples or their scores."""
        return store.join(self.root, "exports", f"{k:04d}", stage)

    def policy(self, k: int) -> str:
        """Return the slot of policy version k. The stage ``policy`` makes version 0."""
        trainer = "update" if self.rewarded else "finetune"
        return store.join(self.root, "policy") if k == 0 else self.iteration(k - 1, trainer)

    @property
    def report(self) -> str:
        """Return the slot of the report."""
        return store.join(self.root, "report")


AnyPlan = BasePlan[AnyRecipe]
"""A plan of any kind of run."""
Planned = TypeVar("Planned", bound=BasePlan[Any], covariant=True)


@dataclass(frozen=True)
class BaseRun(Generic[Planned]):
    """A plan and the store that it runs in."""

    plan: Planned
    store_url: str

    @property
    def url(self) -> str:
        """Return the root of the run."""
        return run_url(self.store_url, self.plan.run_id)

    @cached_property
    def slots(self) -> Slots:
        """Return the slots of the artifacts that this run does not share with others."""
        return Slots(self.url, self.trains_on_rewards)

    @property
    def recipe(self) -> AnyRecipe:
        """Return the recipe of the plan."""
        return self.plan.recipe

    @property
    def trains_on_rewards(self) -> bool:
        """Return whether an iteration is rollout, reward and update (True), or finetune (False)."""
        return self.recipe.train.train_policy.rewarded

    @cached_property
    def scored(self) -> tuple[RewardConfig, ...]:
        """Return the rewards that score every rollout: the recipe's, and pixel statistics if early warning has them."""
        warning, labels = self.plan.early_warning, [reward.fn.label for reward in self.recipe.rewards]
        if warning is None or not warning.statistics or STATISTICS in labels:
            return self.recipe.rewards
        statistics = plugins.load("rewards", STATISTICS).Options()
        return (*self.recipe.rewards, RewardConfig(fn=statistics, role="monitor"))

    @property
    def warns(self) -> bool:
        """Return whether the scores of a rollout are judged before its update."""
        return self.trains_on_rewards and bool(self.plan.early_warning and self.plan.early_warning.limits)

    @property
    def headline_reward(self) -> str:
        """Return the label of the first reward that trains, else of the first reward, else ``""``."""
        ordered = sorted(self.recipe.rewards, key=lambda reward: reward.role != "train")
        return ordered[0].fn.label if ordered else ""

    @property
    def evaluates(self) -> bool:
        """Return whether exported policies generate samples from held-out prompts."""
        return self.recipe.evaluates

    @property
    def staleness(self) -> int:
        """Return by how many policy versions a rollout may be older than the policy that it updates."""
        return 0

    @property
    def validates(self) -> bool:
        """Return whether policies are measured on held-out data."""
        return self.recipe.validation is not None

    def is_due(self, k: int) -> bool:
        """Return whether policy version k is exported and judged."""
        freq = self.recipe.validation.freq if self.recipe.validation else 0
        return k in (self.plan.baseline, self.recipe.train.num_iterations) or bool(freq and k % freq == 0)

    def exports(self, k: int) -> bool:
        """Return whether policy version k is exported. Every version that is judged is."""
        every = self.recipe.train.ckpt.export_every
        return self.is_due(k) or bool(every and k % every == 0)

    @property
    def is_made(self) -> bool:
        """Return whether the run's last wave was made: the report on all of its policy versions.

        Raises :class:`ArtifactError` if the report's manifest is damaged.
        """
        _, report = current_of(self.slots.report)
        return report is not None and len(report.inputs.get("updates", ())) >= self.recipe.train.num_iterations

    def going_to(self, iterations: int) -> Self:
        """Return the same run with another number of iterations."""
        train = self.recipe.train.model_copy(update={"num_iterations": iterations})
        recipe = self.recipe.model_copy(update={"train": train})
        return replace(self, plan=self.plan.model_copy(update={"recipe": recipe}))

    def drop_old_state(self, newest: int) -> list[str]:
        """Delete the parts that :meth:`not_kept` names, unless a fork reads them. Return their slots."""
        gone = self.not_kept(newest)
        for slot, parts in gone.items():
            drop(slot, *parts, held=partial(is_held, self.url, slot))
        return [*gone]

    def not_kept(self, newest: int) -> dict[str, list[str]]:
        """Return the parts, by slot, that the recipe no longer keeps once policy version ``newest`` exists."""
        keep = self.recipe.train.ckpt.max_keep
        return {} if keep is None or newest <= keep else {self.slots.policy(newest - keep): [*TRAINING_ONLY]}

    def lease(self) -> Lease:
        """Return the run's lease. At most one process holds it, and may make or delete artifacts of the run."""
        return Lease(self.lease_url)

    def holder(self, patience_s: float) -> dict[str, Any] | None:
        """Return ``pid`` and ``host`` of the process that holds the lease; None if nobody does.

        Waits up to ``patience_s`` for a heartbeat of a process on another machine.
        """
        return holder_of(self.lease_url, patience_s)

    @property
    def lease_url(self) -> str:
        """Return the URL of the run's lease."""
        return store.join(self.url, "lease")


AnyRun = BaseRun[AnyPlan]
"""A run of any kind."""
