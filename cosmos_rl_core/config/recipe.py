"""A recipe: the TOML file that defines a run. Reading is strict and reports all mistakes at once."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from cosmos_rl_core.config import early_warning
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.early_warning import EarlyWarningConfig
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.policy import PolicyConfig
from cosmos_rl_core.config.train import (
    AnyAlgorithm,
    OptimizationConfig,
    RewardConfig,
    RewardedOptions,
    ValidationConfig,
)

MAX_ITERATIONS = 1_000_000
"""Largest number of iterations of a run. A plan looks at each."""


class CkptConfig(Section):
    """Retention and exports of policies."""

    max_keep: int | None = Field(default=None, ge=1, json_schema_extra=NOT_IDENTITY)
    """Number of newest policies that keep optimizer, ``old`` and ``reference``. Older ones keep weights and average
    only, so that training cannot continue from them. Default: all."""
    export_every: int | None = Field(default=None, ge=1, json_schema_extra=NOT_IDENTITY)
    """Number of iterations between exports of the weights as diffusers loads them: a LoRA, or a whole pipeline.
    ``cosmos-flows export`` copies them out. The base, the final policy and the policies that ``validation.freq``
    evaluates are always exported. Default: no others."""


class TrainConfig(OptimizationConfig):
    """Training: length, batch, optimizer and algorithm."""

    ckpt: CkptConfig = Field(default=CkptConfig(), json_schema_extra=NOT_IDENTITY)
    """Retention and exports of policies."""

    seed: int = Field(default=0, ge=0)
    """Seed of every random draw of the run."""
    num_iterations: int = Field(ge=1, le=MAX_ITERATIONS, json_schema_extra=NOT_IDENTITY)
    """Number of iterations. Raise it to continue a finished run."""
    max_gpu_hours: float | None = Field(default=None, gt=0, json_schema_extra=NOT_IDENTITY)
    """Device hours after which a run stops: before the iteration that would exceed them. A rank on a CPU counts as a
    device. Raise it to continue. Default: no limit."""
    staleness: int = Field(default=0, ge=0)
    """Age of the policy that makes rollouts: rollout k uses policy k minus staleness. From 1 on, rollout k + 1 runs at
    the same time as update k, which is faster and off-policy."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of transformer computations in rollouts, updates and held-out losses: ``bfloat16`` is faster and
    less exact. Weights, states, losses, gradient sums and evaluations are always float32."""
    train_batch_per_replica: int = Field(default=8, ge=1)
    """Number of samples of an iteration over all ranks: prompts times ``rollout.n_generation``. In SFT, of an
    optimizer step."""
    train_policy: AnyAlgorithm
    """The algorithm and its settings."""


class KeepConfig(Section):
    """Retention of the large parts of rollouts. Deleted parts can only be generated again."""

    tensors: int | None = Field(default=None, ge=1)
    """Number of newest rollouts that keep final latents and recorded steps. An update reads its own rollout only;
    training on a rollout again, or scoring its latents again, needs them. Default: all."""
    media: int | None = Field(default=None, ge=1)
    """Number of newest rollouts that keep pictures or videos. The report shows these only, and scoring pixels again
    needs them. Default: all."""


class RolloutConfig(Section):
    """Number of samples, and their division into batches and files."""

    n_generation: int = Field(default=16, ge=2)
    """Number of samples per prompt: the group within which advantages are relative."""
    n_generation_mini_batch: int = Field(default=8, ge=1)
    """Number of samples in one forward pass. Changes memory, speed and the last bits of results."""
    samples_per_shard: int = Field(default=32, ge=1)
    """Number of samples in one file. A retry makes incomplete files again."""
    decode_share: float = Field(default=1.0, ge=0, le=1, json_schema_extra={"neutral": 1.0})
    """Expected share of the samples that are decoded to pixels, chosen by their seeds. Below 1 only where every reward
    reads latents: decoding and encoding a video takes longer than scoring it. ``cosmos-flows decode`` makes the
    pictures of the others."""
    decode_dtype: Literal["float32", "bfloat16"] = Field(default="float32", json_schema_extra={"neutral": "float32"})
    """Type in which the VAE multiplies when it decodes samples of rollouts. Held-out samples are decoded in float32."""
    decode_tf32: bool = Field(default=False, json_schema_extra={"neutral": False})
    """Let a GPU round factors to 10 bits (TF32) when the VAE decodes samples of rollouts in float32."""
    keep: KeepConfig = Field(default=KeepConfig(), json_schema_extra=NOT_IDENTITY)
    """Number of rollouts that keep tensors and media."""
    store_budget_gb: float = Field(default=1000.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """Maximum size of the planned rollouts without pictures, and of the text embeddings, in units of 10^9 bytes.
    Planning refuses to exceed it."""


class LoggingConfig(Section):
    """Destinations of a run's metrics, besides ``metrics.jsonl``, which every run writes."""

    logger: tuple[Literal["console", "wandb"], ...] = ()
    """``console`` prints every new line of metrics. ``wandb`` sends them to Weights & Biases with the account and mode
    (online, offline) from wandb's environment variables; it needs the extra ``tracking``."""
    project_name: str = Field(default="cosmos_rl", min_length=1)
    """Name of the project on wandb."""
    group_name: str | None = None
    """Group of the run on wandb. Default: no group."""
    experiment_name: str | None = None
    """Name of the run on wandb. Default: the run's id."""


class Recipe(Section):
    """Definition of a run."""

    plugins: tuple[str, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Files or folders of plugins outside the package: algorithms, rewards, datasets, models. Relative paths start
    at the recipe's folder, on the command line at the working directory. The plan pins the digests of the files."""
    policy: PolicyConfig
    """The model and its trained part."""
    train: TrainConfig
    """Length, batch, optimizer and algorithm."""
    rollout: RolloutConfig = RolloutConfig()
    """Number of samples, and their division into batches and files."""
    rewards: tuple[RewardConfig, ...] = ()
    """The rewards, each a table ``[[rewards]]``."""
    early_warning: EarlyWarningConfig | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Limits on the scores of rollouts, judged before each update. Default: limits on statistics of pixels, which mark
    an iteration and do not end the run."""
    validation: ValidationConfig | None = None
    """Held-out evaluation. Default: none."""
    launch: LaunchConfig = Field(default=LaunchConfig(), json_schema_extra=NOT_IDENTITY)
    """Processes and machines."""
    logging: LoggingConfig = Field(default=LoggingConfig(), json_schema_extra=NOT_IDENTITY)
    """Destinations of metrics."""

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> "Recipe":
        if mistakes := list(_mistakes(self)):
            # Settings without effect are listed too, but do not raise here: other checks are still to come.
            idle = () if info.context is None else info.context(self)
            raise ValueError("\n".join([*mistakes, *idle]))
        return self

    @property
    def prompts_per_iteration(self) -> int:
        """Return the number of prompts of a rollout."""
        return self.train.train_batch_per_replica // self.rollout.n_generation

    @property
    def evaluates(self) -> bool:
        """Return whether exported policies generate samples from held-out prompts."""
        return self.validation is not None and self.validation.dataset is not None


def _mistakes(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each combination of settings that cannot work."""
    train, options, rewards = recipe.train, recipe.train.train_policy, recipe.rewards
    batch, group = train.train_batch_per_replica, recipe.rollout.n_generation
    the_batch = f"train.train_batch_per_replica = {batch}"
    the_group = f"rollout.n_generation = {group}"
    training = [reward for reward in rewards if reward.role == "train"]
    if any(reward.role != "monitor" for reward in rewards) and not options.rewarded:
        yield f"{options.type} trains on data: give its rewards role = 'monitor'"
    if isinstance(options, RewardedOptions):
        if batch % group:
            yield f"{the_batch} is not a multiple of {the_group}"
        if not training:
            yield f"{options.type} needs at least one [[rewards]] with role = 'train'"
        smallest = getattr(options, "min_group_size", 0)
        if smallest > group:
            yield f"train.train_policy.min_group_size = {smallest} drops every prompt: {the_group}"
        if (per_step := options.batch_size_per_optimize) and batch % per_step:
            divisor = f"train.train_policy.batch_size_per_optimize = {per_step}"
            yield f"{the_batch} is not a multiple of {divisor}"
    if weightless := [reward.fn.label for reward in training if reward.weight == 0]:
        yield f"rewards of weight 0 train nothing: {', '.join(weightless)}; give them role = 'monitor'"
    names = [reward.fn.label for reward in rewards]
    if recipe.validation is not None:
        yield from recipe.validation.mistakes(names, trains=bool(training))
    if recipe.early_warning is not None:
        yield from early_warning.mistakes(recipe.early_warning, {r.fn.label: r.fn.facts.scores for r in rewards})
    if len(set(names)) != len(names):
        yield f"two rewards have the same name: {', '.join(names)}"
    gates = [reward.fn.label for reward in rewards if reward.role == "gate"]
    if gates and getattr(options, "parity_advantages", False):
        yield f"train.train_policy.parity_advantages gives a number to samples that gates exclude: {', '.join(gates)}"
    weights = {abs(reward.weight) for reward in training}
    if getattr(options, "reward_average", False) and len(weights) > 1:
        found = ", ".join(f"{weight:g}" for weight in sorted(weights))
        advice = "set it to false, or make the weights equal"
        yield f"rewards weigh {found}, but train.train_policy.reward_average uses signs only; {advice}"
    if recipe.policy.from_scratch and recipe.policy.lora is not None:
        yield "policy.from_scratch draws all weights anew; leave [policy.lora] out"
    if recipe.policy.from_scratch and recipe.policy.init_from is not None:
        yield "policy.from_scratch draws all weights anew, policy.init_from names trained ones; leave one of them out"
    if recipe.policy.init_mode == "stack" and recipe.policy.lora is None:
        yield "policy.init_mode = 'stack' trains a new adapter: add [policy.lora], or set it to 'continue'"
    keep, staleness = train.ckpt.max_keep, f"train.staleness = {train.staleness}"
    if keep is not None and keep <= train.staleness:
        yield f"train.ckpt.max_keep = {keep} drops policies that rollouts still need at {staleness}"
    if train.staleness:
        yield from _stale_mistakes(recipe)


def _stale_mistakes(recipe: Recipe) -> Iterator[str]:
    train, staleness = recipe.train, f"train.staleness = {recipe.train.staleness}"
    gpus = recipe.launch.stage_gpus
    update, rollout = set(gpus.get("update", ())), set(gpus.get("rollout", ()))
    if not train.train_policy.rewarded:
        yield f"{staleness}: {train.train_policy.type} makes no rollouts"
    if update & rollout or bool(update) != bool(rollout):
        found = f"found update {sorted(update)}, rollout {sorted(rollout)}"
        expected = "give both GPUs of their own in launch.stage_gpus"
        yield f"{staleness} runs rollout and update at once: {expected}, {found}"
    if train.staleness >= train.num_iterations:
        num_iterations = f"train.num_iterations = {train.num_iterations}"
        yield f"{staleness} samples every rollout of {num_iterations} from the base policy; use 1 or 2"
