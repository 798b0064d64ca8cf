"""How the weights move. Field names are cosmos-rl's; the algorithm's own settings live in its plugin file."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from cosmos_rl_core import plugins
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.errors import ConfigError


def plugin_options(kind: str, key: str) -> BeforeValidator:
    """Validate a table by the ``Options`` of the plugin that its ``key`` names."""

    def validate(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if key not in value:
            raise ValueError(f"needs `{key}`; known: {', '.join(plugins.known(kind))}")
        return _options(kind, key, str(value[key])).model_validate_json(json.dumps(value), strict=True)

    return BeforeValidator(validate)


def _options(kind: str, key: str, name: str) -> type[Section]:
    """The ``Options`` of a plugin. Raises :class:`ConfigError` where they are not what its kind and name ask for."""
    module = plugins.load(kind, name)
    options, base = module.Options, _BASES[kind]
    if not (isinstance(options, type) and issubclass(options, base)):
        raise ConfigError(f"{module.__file__}: Options must be a class below {base.__name__}")
    if (found := options.model_fields[key].annotation) != Literal[name]:
        raise ConfigError(f"{module.__file__}: Options.{key} must be Literal[{name!r}], found {found}")
    return options


class DatasetOptions(Section):
    """What every dataset's ``Options`` has; ``name`` is the plugin's file name."""

    plugin = ("datasets", "name")
    name: str
    """The dataset: the name of a file in ``cosmos_rl_core/datasets``, or of a plugin from outside."""


class RewardOptions(Section):
    """What every reward's ``Options`` has; ``name`` is the plugin's file name."""

    plugin = ("rewards", "name")
    name: str
    """The reward: the name of a file in ``cosmos_rl_core/rewards``, or of a plugin from outside."""

    @property
    def label(self) -> str:
        """What the reward is called in slots, tables and metrics; tells one plugin's rewards of a recipe apart."""
        return self.name

    def reads(self, num_frames: int) -> Literal["media", "latents"]:
        """Return what it scores of samples of ``num_frames``: their ``media`` (pixels) or their ``latents``."""
        return "media"


AnyDataset = Annotated[SerializeAsAny[DatasetOptions], plugin_options("datasets", "name")]
AnyReward = Annotated[SerializeAsAny[RewardOptions], plugin_options("rewards", "name")]


class AlgorithmOptions(Section):
    """What every algorithm's ``Options`` has; ``type`` is the plugin's file name."""

    plugin = ("algorithms", "type")
    rewarded: ClassVar[bool]
    """Whether it trains on rewarded rollouts (True) or on the media of a dataset (False)."""
    type: str
    """The algorithm: the name of a file in ``cosmos_rl_core/algorithms``, or of a plugin from outside."""
    dataset: AnyDataset
    """Prompts, or media with prompts."""
    mini_batch: int = Field(default=1, ge=1)
    """Samples per forward pass. Speed and memory only: the gradient is the same up to rounding."""
    min_num_conditional_frames: int = Field(default=0, ge=0)
    """Fewest latent frames that are given at the start of a video: 0 is text to video, 1 image to video."""
    max_num_conditional_frames: int = Field(default=0, ge=0)
    """Most of these. Their number is drawn for each prompt of an iteration, and they are the first ones of an item of
    ``data``, of the prompt if it has any; supervised training draws it for each item and pass, and takes the item's
    own. No loss counts them. Only for models that can be given frames. Evaluations are text to video whatever is set
    here."""

    @property
    def given_frames(self) -> tuple[int, int]:
        """Fewest and most latent frames that are given."""
        return self.min_num_conditional_frames, self.max_num_conditional_frames

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each setting that was written although the other settings leave it unread.

        Asked of recipes only: a section that was written out whole has set all its fields.
        """
        yield from ()

    @model_validator(mode="after")
    def _frames_in_order(self) -> Self:
        fewest, most = self.given_frames
        if fewest > most:
            raise ValueError(
                f"min_num_conditional_frames = {fewest} is more than max_num_conditional_frames = {most}; raise that, "
                "or lower it"
            )
        return self


class RewardedOptions(AlgorithmOptions):
    """What the ``Options`` of an algorithm that trains on rewarded rollouts has besides."""

    rewarded: ClassVar[bool] = True
    batch_size_per_optimize: int | None = Field(default=None, ge=1)
    """Samples per optimizer step, over all ranks; absent means one step on everything."""
    mu_iterations: int = Field(default=1, ge=1)
    """Passes over each rollout. More learns more from a rollout and drifts further from the policy that made it."""
    shuffle_rewards: bool = False
    """A control: train on the iteration's rewards in random order. What still rises does not come from them."""
    data: AnyDataset | None = None
    """Media whose first frames are given; their captions may be prompts of the rollouts, or not."""


class SupervisedOptions(AlgorithmOptions):
    """What the ``Options`` of an algorithm that trains on media has besides."""

    rewarded: ClassVar[bool] = False
    steps_per_iteration: int = Field(default=100, ge=1)
    """Optimizer steps of one iteration, each on ``train.train_batch_per_replica`` samples of the dataset."""


Beta = Annotated[float, Field(ge=0, lt=1)]
AnyAlgorithm = Annotated[SerializeAsAny[AlgorithmOptions], plugin_options("algorithms", "type")]
AnyRewarded = Annotated[SerializeAsAny[RewardedOptions], plugin_options("algorithms", "type")]
AnySupervised = Annotated[SerializeAsAny[SupervisedOptions], plugin_options("algorithms", "type")]


_BASES: dict[str, type[Section]] = {
    "algorithms": AlgorithmOptions,
    "rewards": RewardOptions,
    "datasets": DatasetOptions,
}
"""What the ``Options`` of a plugin's kind are below."""

OptimizerName = Literal["AdamW", "Adam"]


class OptimizerConfig(Section):
    """The optimizer and its schedule, in optimizer steps."""

    optm_name: OptimizerName = "AdamW"
    """``AdamW`` shrinks weights beside the gradient's step; ``Adam`` adds the decay to the gradient, where its own
    averages scale it away."""
    optm_lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    optm_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's averaging of gradient and square."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Adam's denominator floor."""
    optm_weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of every trainable parameter alike: decoupled in ``AdamW``, part of the gradient in ``Adam``."""
    optm_grad_norm_clip: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_nonfinite_steps: int = Field(default=0, ge=0, json_schema_extra=NOT_IDENTITY)
    """Optimizer steps in a row that may be left out because their gradients are not finite; one more ends the run. 0
    ends it at the first. In a row, over iterations too, because a policy that is lost has no finite gradients any more,
    while a long run may have any number of single bad batches. May be raised when a run goes on."""
    optm_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    optm_warmup_start_factor: float = Field(default=0.0, ge=0, le=1)
    """Multiplier of the learning rate at the first step of the warm-up."""
    optm_peak_after_warmup: bool = False
    """The first step after the warm-up is the first at the peak, instead of the last step of the warm-up: cosmos-rl's
    ``--wfm-mode``."""
    optm_decay_type: Literal["none", "linear", "cosine", "sqrt"] = "none"
    """Shape of the decay at the end of ``max_num_steps``."""
    optm_decay_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of ``max_num_steps`` that decays; absent means everything after the warm-up."""
    optm_min_lr_factor: float = Field(default=0.0, ge=0, le=1)
    """Floor of the multiplier."""
    max_num_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps that the decay is stretched over; needed when there is one. The number of iterations is not tied
    to it."""

    @model_validator(mode="after")
    def _peak_is_after_something(self) -> "OptimizerConfig":
        if self.optm_peak_after_warmup and self.optm_warmup_steps == 0:
            raise ValueError("optm_peak_after_warmup = true without optm_warmup_steps: set them, or leave it out")
        return self

    @model_validator(mode="after")
    def _decay_has_room(self) -> "OptimizerConfig":
        if self.optm_decay_type == "none":
            return self
        if self.max_num_steps is None:
            raise ValueError(f"optm_decay_type = {self.optm_decay_type!r} needs max_num_steps")
        if self.optm_warmup_steps >= self.max_num_steps:
            raise ValueError(
                f"optm_warmup_steps = {self.optm_warmup_steps} leaves nothing of "
                f"max_num_steps = {self.max_num_steps} to decay"
            )
        if self.optm_decay_ratio is not None and round(self.max_num_steps * self.optm_decay_ratio) == 0:
            raise ValueError(
                f"optm_decay_ratio = {self.optm_decay_ratio} of max_num_steps = {self.max_num_steps} is no step"
            )
        return self


class EmaConfig(Section):
    """Exponential moving average of the trained weights; exports and evaluations use it when enabled."""

    ema_enable: bool = False
    """Keep an average."""
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """Cap of the decay; the decay at step k is min((1 + k) / (10 + k), ema_decay)."""
    ema_first_step: Literal[0, 1] = 0
    """Number k of the first optimizer step in decay and interval. cosmos-rl's DiffusionNFT counts from 1, so that its
    first decay is 2/11 instead of 1/10."""
    ema_rate: float | None = Field(default=None, gt=0, lt=0.2886)
    """Average over a share of the training so far instead, however long that is, and leave ``ema_decay`` unread: the
    deviation of the steps that it averages over, relative to the steps done. 0.1 is cosmos-rl's; near 0.2886 it is the
    plain mean of all."""
    ema_update_step_interval: int = Field(default=1, ge=1)
    """Optimizer steps between updates of the average."""
