"""Optimizer, average of weights, and bases of plugin options. Field names are cosmos-rl's."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, SerializeAsAny, model_validator

from cosmos_rl_core.config.base import NOT_IDENTITY, Section, plugin_options, written
from cosmos_rl_core.config.reward_facts import Facts


class DatasetOptions(Section):
    """Base of every dataset's ``Options``."""

    plugin = ("datasets", "name")
    name: str
    """The dataset: the name of a file in ``cosmos_rl_core/datasets``, or of a plugin from outside."""

    @property
    def follows(self) -> tuple[str, ...]:
        """Return a sentence for each part of the data that may change under the same name, and how to pin it."""
        return ()


class SnapshotOptions(DatasetOptions):
    """Base of the ``Options`` of datasets whose media are in the store, indexed and captioned."""

    dataset: str
    """Name of the dataset in the store of the run."""
    number: int | None = Field(default=None, ge=1)
    """Number of the snapshot. Default: the newest when the run is first planned; a run keeps it."""
    side: Literal["all", "train", "held_out"] = "all"
    """Which media are used: all, or those on one side of a split by the digests of their bytes."""
    held_out_share: float = Field(default=0.05, gt=0, lt=1)
    """Share of the media that are held out, if ``side`` is not ``all``."""
    windows_per_item: int = Field(default=1, ge=1, le=100)
    """Number of clips that each medium gives. The first starts at the beginning, the last ends at the end, the others
    are evenly spaced. 1 takes the beginning only."""
    fps: float | None = Field(default=None, gt=0)
    """Frames a second of the clips. Default: every frame of the file."""
    crop: Literal["centre", "buckets"] = Field(default="centre", json_schema_extra={"neutral": "centre"})
    """``centre`` scales and crops all media to ``inference_size``. ``buckets`` takes for each medium the size nearest
    to its own ratio, among sizes of about that area: 1:1, 4:3, 3:2, 16:9 and their inverses. For supervised training
    and held-out losses; rollouts have one size."""
    weights: dict[str, PositiveFloat] = Field(default={}, json_schema_extra={"neutral": {}})
    """Shares of the samples that supervised training draws from each source of the dataset, relative to each other.
    Default: every item equally often."""


class RewardOptions(Section):
    """Base of every reward's ``Options``."""

    plugin = ("rewards", "name")
    facts: ClassVar[Facts] = Facts()
    """Facts that planning and pages read before the reward runs."""
    name: str
    """The reward: the name of a file in ``cosmos_rl_core/rewards``, or of a plugin from outside."""

    @property
    def label(self) -> str:
        """Return the reward's name in slots, tables and metrics, unique within a recipe."""
        return self.name

    @property
    def uses_references(self) -> Literal["ignored", "taken", "needed"]:
        """Return whether the reward reads the references of a prompt, and whether it can score without."""
        return self.facts.references

    def reads(self, num_frames: int) -> Literal["media", "latents"]:
        """Return the input of the reward for samples of ``num_frames``: ``media`` (pixels) or ``latents``."""
        return "media"


class CaptionerOptions(Section):
    """Base of every captioner's ``Options``."""

    plugin = ("captioners", "by")
    torch: ClassVar[bool] = False
    """Whether captions need torch: the ranks of the stage ``describe`` then write them, not the stage ``caption``."""
    by: str
    """The captioner: the name of a file in ``cosmos_rl_core/captioners``, or of a plugin from outside."""

    @property
    def asked(self) -> str:
        """Return the instruction that captions answer; "" if there is none."""
        return ""

    def pinned(self) -> Self:
        """Return the settings with the digests of all files that decide captions.

        Raises :class:`ConfigError` if these files cannot be used.
        """
        return self


AnyDataset = Annotated[SerializeAsAny[DatasetOptions], plugin_options(DatasetOptions)]
AnyReward = Annotated[SerializeAsAny[RewardOptions], plugin_options(RewardOptions)]
AnyCaptioner = Annotated[SerializeAsAny[CaptionerOptions], plugin_options(CaptionerOptions)]


class Gate(Section):
    """Bounds on a score. Samples beyond them do not count in training with their own rewards."""

    min: float | None
    max: float | None
    on_fail: Literal["exclude", "worst"]
    max_gated_fraction: float = Field(default=1.0, json_schema_extra=NOT_IDENTITY)
    """Share of gated samples above which the update fails. It affects success, not the result, so artifacts do not
    keep it."""

    def why_not(self, score: float) -> str | None:
        """Return the bound that a score exceeds, ``0.2 < min 0.5``; None if it passes."""
        if self.min is not None and score < self.min:
            return f"{score:g} < min {self.min:g}"
        if self.max is not None and score > self.max:
            return f"{score:g} > max {self.max:g}"
        return None


class RewardConfig(Section):
    """A reward and its role in training."""

    fn: AnyReward
    """The reward plugin and its settings."""
    weight: float = 1.0
    """Factor of the reward in the sum that trains."""
    role: Literal["train", "monitor", "gate"] = "train"
    """``train`` rewards enter the loss; ``monitor`` rewards are scored and reported only. A ``gate`` has bounds: a
    sample whose score is beyond them does not count in training with its own rewards. A sample that a gate cannot
    score is excluded like any other that has no score."""
    min: float | None = Field(default=None, json_schema_extra={"neutral": None})
    """Lowest score that passes a gate. Default: none."""
    max: float | None = Field(default=None, json_schema_extra={"neutral": None})
    """Highest score that passes a gate. Default: none."""
    on_fail: Literal["exclude", "worst"] = Field(default="exclude", json_schema_extra={"neutral": "exclude"})
    """What becomes of a gated sample: ``exclude`` leaves it out like one without a score; ``worst`` gives it the
    lowest place of its prompt, however rewards are mixed, so that the policy learns to avoid it. Its own rewards count
    nowhere. Prompts without a sample that passes are not trained on."""
    max_gated_fraction: float = Field(default=0.5, ge=0, le=1, json_schema_extra=NOT_IDENTITY)
    """Maximum share of an iteration's samples that a gate may hold back; above it the update fails."""
    max_attempts: int = Field(default=3, ge=1)
    """Number of attempts to score a sample before it is excluded."""
    max_failed_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Maximum share of excluded samples; above it the stage fails. Gated samples do not count, nor do samples that a
    guardrail refused."""
    overlap: bool = Field(default=False, json_schema_extra=NOT_IDENTITY)
    """Begin to score the finished files of a rollout while it still makes others. Changes no score. For
    ``launch.launcher = "local"``. Rewards without torch share the processor with the rollout; rewards with torch
    take devices that the rollout leaves free, and begin after it if there are none."""

    @model_validator(mode="after")
    def _gate_has_bounds(self) -> Self:
        low, high = self.min, self.max
        given = written(self, "min", "max", "on_fail", "max_gated_fraction")
        if self.role == "gate" and low is None and high is None:
            raise ValueError("role = 'gate' needs a bound on the score: min, max or both")
        if self.role != "gate" and (low is not None or high is not None or self.on_fail != "exclude"):
            raise ValueError(f"{', '.join(given)} without effect: role = {self.role!r}; only a gate has bounds")
        if low is not None and high is not None and low > high:
            raise ValueError(f"no score passes a gate with min = {low:g} above max = {high:g}")
        return self

    @property
    def gate(self) -> Gate:
        """Return the bounds."""
        return Gate(min=self.min, max=self.max, on_fail=self.on_fail, max_gated_fraction=self.max_gated_fraction)


_NUMBERS = {"reward": "the weighted sum of the rewards", "loss": "the held-out loss"}
"""Values of ``best_by`` that are no name in ``[[rewards]]``."""


class ValidationConfig(Section):
    """Held-out evaluation: samples by the stock pipeline from exported weights, their rewards, and held-out loss."""

    dataset: AnyDataset | None = None
    """Prompts that training does not use. The report shows their samples, which all ``[[rewards]]`` score. Default: no
    held-out samples."""
    data: AnyDataset | None = None
    """Media that training does not use, for the diffusion loss of each evaluated policy. Default: no held-out loss."""
    n_generation: int = Field(default=8, ge=1)
    """Number of samples per prompt, from fixed seeds."""
    seed: int = Field(default=0, ge=0)
    """Seed of the samples, independent of the run's seed, so that runs can be compared."""
    freq: int = Field(default=0, ge=0)
    """Number of iterations between evaluations; 0 evaluates the base model and the final policy only."""
    batch_size: int = Field(default=16, ge=1)
    """Number of samples in one call of the pipeline."""
    best_by: str | None = Field(default=None, min_length=1, json_schema_extra=NOT_IDENTITY)
    """The number that ranks policies, for ``status`` and ``export --best``. ``"reward"``: the weighted sum of the
    rewards that train, its mean over held-out samples that pass every gate. ``"loss"``: the held-out loss. A name in
    ``[[rewards]]``: the mean of that score. Default: ``"reward"`` with held-out samples of a run that trains on
    rewards, else ``"loss"``, else the first reward."""

    @model_validator(mode="after")
    def _has_prompts_or_media(self) -> "ValidationConfig":
        if self.dataset is None and self.data is None:
            raise ValueError("needs `dataset`, prompts for samples, or `data`, media for a held-out loss, or both")
        return self

    def mistakes(self, rewards: Sequence[str], *, trains: bool) -> Iterator[str]:
        """Yield a sentence if ``best_by`` names no number, or two, among ``rewards`` by name."""
        if self.best_by in _NUMBERS and self.best_by in rewards:
            yield (
                f"validation.best_by = {self.best_by!r} names {_NUMBERS[self.best_by]} and one of the rewards "
                f"{', '.join(rewards)}; expected the name of one number: give the plugin of the reward another name"
            )
            return
        samples = rewards if self.dataset is not None else ()
        known = ["reward"] * (bool(samples) and trains) + ["loss"] * (self.data is not None) + [*samples]
        if self.best_by is not None and self.best_by not in known:
            found = f"validation.best_by = {self.best_by!r} is not measured by this recipe"
            yield f"{found}; known: {', '.join(known) or 'none'}"


class AlgorithmOptions(Section):
    """Base of every algorithm's ``Options``."""

    plugin = ("algorithms", "type")
    rewarded: ClassVar[bool]
    """True if the algorithm trains on rewarded rollouts, False if on the media of a dataset."""
    type: str
    """The algorithm: the name of a file in ``cosmos_rl_core/algorithms``, or of a plugin from outside."""
    dataset: AnyDataset
    """Dataset of prompts, or of media with prompts."""
    mini_batch: int = Field(default=1, ge=1)
    """Number of samples per forward pass. Changes speed and memory; the gradient is the same up to rounding."""
    min_num_conditional_frames: int = Field(default=0, ge=0)
    """Minimum number of given latent frames at the start of a video: 0 is text to video, 1 image to video."""
    max_num_conditional_frames: int = Field(default=0, ge=0)
    """Maximum number of given latent frames. Their number is drawn for each prompt of an iteration, in supervised
    training for each item and pass. The frames come from an item of ``data``, with the same prompt if there is one;
    in supervised training from the item itself. Losses ignore given frames. Only for models that accept them.
    Evaluations are always text to video."""

    @property
    def given_frames(self) -> tuple[int, int]:
        """Return the minimum and maximum number of given latent frames."""
        return self.min_num_conditional_frames, self.max_num_conditional_frames

    def pinned(self) -> Self:
        """Return the settings with the digests of all files that decide the training.

        Raises :class:`ConfigError` if these files cannot be used.
        """
        return self

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each setting that was set explicitly and that nothing reads, given the other settings.

        Call it for recipes only: in a section that a program wrote in full, every field counts as set.
        """
        yield from ()

    @model_validator(mode="after")
    def _frames_in_order(self) -> Self:
        fewest, most = self.given_frames
        if fewest > most:
            found = f"max_num_conditional_frames = {most}"
            raise ValueError(f"min_num_conditional_frames = {fewest} is more than {found}; lower it")
        return self


class RewardedOptions(AlgorithmOptions):
    """Base of the ``Options`` of algorithms that train on rewarded rollouts."""

    rewarded: ClassVar[bool] = True
    batch_size_per_optimize: int | None = Field(default=None, ge=1)
    """Number of samples per optimizer step, over all ranks. Default: one step on all samples of the iteration."""
    tokens_per_forward: int | None = Field(default=None, ge=1, json_schema_extra={"neutral": None})
    """Number of latent tokens per forward pass, in place of ``mini_batch``: it takes as many noise levels of a sample
    as fit, then levels of more samples; at least one level. Changes speed and memory; the gradient is the same up to
    rounding. Default: one noise level of ``mini_batch`` samples."""
    mu_iterations: int = Field(default=1, ge=1)
    """Number of passes over each rollout. More learn more from it and move further from the policy that made it."""
    shuffle_rewards: bool = False
    """Train on the iteration's rewards in random order, as a control: no improvement then comes from the rewards."""
    shuffle_groups: int = Field(default=0, ge=0, json_schema_extra={"neutral": 0})
    """Shuffle rewards among each prompt's samples, as such a control. The number selects the random order; 0: off."""
    data: AnyDataset | None = None
    """Dataset of media whose first frames are given. Its captions may differ from the prompts of rollouts."""

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence if ``mini_batch`` is set in addition to a number of tokens."""
        if self.tokens_per_forward is not None and written(self, "mini_batch"):
            yield "mini_batch without effect: tokens_per_forward decides what a forward pass holds"


class SupervisedOptions(AlgorithmOptions):
    """Base of the ``Options`` of algorithms that train on media."""

    rewarded: ClassVar[bool] = False
    steps_per_iteration: int = Field(default=100, ge=1)
    """Number of optimizer steps of an iteration, each on ``train.train_batch_per_replica`` samples of the dataset."""
    text_dropout: float = Field(default=0.0, ge=0, le=1, json_schema_extra={"neutral": 0.0})
    """Probability of training a sample on the empty prompt in place of its caption, so that guidance has a prediction
    without text to move away from. Drawn for each item and pass."""


Beta = Annotated[float, Field(ge=0, lt=1)]
AnyAlgorithm = Annotated[SerializeAsAny[AlgorithmOptions], plugin_options(AlgorithmOptions)]
AnyRewarded = Annotated[SerializeAsAny[RewardedOptions], plugin_options(AlgorithmOptions)]
AnySupervised = Annotated[SerializeAsAny[SupervisedOptions], plugin_options(AlgorithmOptions)]

OptimizerName = Literal["AdamW", "Adam"]


class OptimizerConfig(Section):
    """Optimizer and its learning rate, which is a function of the optimizer step."""

    optm_name: OptimizerName = "AdamW"
    """Optimizer. ``AdamW`` applies weight decay separately from the gradient; ``Adam`` adds it to the gradient,
    where Adam rescales it."""
    optm_lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    optm_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's decay rates of the averages of gradient and squared gradient."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Term added to Adam's denominator."""
    optm_weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of all trained parameters: decoupled in ``AdamW``, part of the gradient in ``Adam``."""
    optm_grad_norm_clip: float = Field(default=1.0, gt=0)
    """Maximum global norm of the gradients; larger gradients are scaled down to it."""
    max_nonfinite_steps: int = Field(default=0, ge=0, json_schema_extra=NOT_IDENTITY)
    """Maximum number of consecutive optimizer steps that are skipped because of non-finite gradients; one more ends
    the run. 0 ends it at the first. Counts across iterations. Can be raised when a run is continued."""
    optm_warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of the linear warm-up."""
    optm_warmup_start_factor: float = Field(default=0.0, ge=0, le=1)
    """Factor on the learning rate at the first step of the warm-up."""
    optm_peak_after_warmup: bool = False
    """Reach the peak at the first step after the warm-up, as cosmos-rl's ``--wfm-mode`` does, instead of at its
    last step."""
    optm_decay_type: Literal["none", "linear", "cosine", "sqrt"] = "none"
    """Shape of the decay of the learning rate, which ends at step ``max_num_steps``."""
    optm_decay_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of ``max_num_steps`` during which the learning rate decays. Default: all steps after the warm-up."""
    optm_min_lr_factor: float = Field(default=0.0, ge=0, le=1)
    """Lowest factor on the learning rate after a decay."""
    max_num_steps: int | None = Field(default=None, ge=1)
    """Optimizer step at which the decay ends; required with a decay. It does not end the run: ``num_iterations``
    does."""

    @model_validator(mode="after")
    def _warmup_and_decay_have_room(self) -> "OptimizerConfig":
        if self.optm_peak_after_warmup and self.optm_warmup_steps == 0:
            raise ValueError("optm_peak_after_warmup = true needs optm_warmup_steps above 0")
        if self.optm_decay_type == "none":
            return self
        if self.max_num_steps is None:
            raise ValueError(f"optm_decay_type = {self.optm_decay_type!r} needs max_num_steps")
        if self.optm_warmup_steps >= self.max_num_steps:
            warmup, total = self.optm_warmup_steps, self.max_num_steps
            raise ValueError(f"optm_warmup_steps = {warmup} leaves no step of max_num_steps = {total}; lower it")
        ratio = self.optm_decay_ratio
        if ratio is not None and round(self.max_num_steps * ratio) == 0:
            raise ValueError(f"optm_decay_ratio = {ratio} of {self.max_num_steps} steps is 0 steps; raise it")
        return self


class EmaConfig(Section):
    """Exponential moving average of the trained weights; exports and evaluations use it if enabled."""

    ema_enable: bool = False
    """Keep an average of the weights."""
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """Maximum decay of the average; the decay at step k is min((1 + k) / (10 + k), ema_decay)."""
    ema_first_step: Literal[0, 1] = 0
    """Number k of the first optimizer step, for decay and interval. cosmos-rl's DiffusionNFT counts from 1, so that
    its first decay is 2/11 instead of 1/10."""
    ema_rate: float | None = Field(default=None, gt=0, lt=0.2886)
    """Width of an average over a share of the training so far, in place of ``ema_decay``: the standard deviation of
    the averaged steps, relative to the number of steps done. cosmos-rl uses 0.1; values near 0.2886 average all
    steps equally."""
    ema_update_step_interval: int = Field(default=1, ge=1)
    """Number of optimizer steps between updates of the average."""


class OptimizationConfig(OptimizerConfig, EmaConfig):
    """All settings that decide an optimizer step. Its gradients are the only other input."""
