"""A recipe of supervised fine-tuning of a vision-language model (VLM). Names are the same as in other recipes."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from cosmos_rl_core.config.base import NOT_IDENTITY, Section, UserPath
from cosmos_rl_core.config.early_warning import EarlyWarningConfig
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.policy import ALL_LINEAR, LoraConfig, Regex
from cosmos_rl_core.config.reading import Values, validated
from cosmos_rl_core.config.recipe import MAX_ITERATIONS, CkptConfig, LoggingConfig
from cosmos_rl_core.config.train import OptimizationConfig, RewardConfig
from cosmos_rl_core.config.vlm.chat_datasets import AnyChatDataset
from cosmos_rl_core.recipes import effects

VLM_SFT = "vlm_sft"
"""Value of ``train.train_policy.type`` in recipes of this kind."""
Part = Literal["vision", "projector", "language"]


def _named(datasets: dict[str, Any]) -> dict[str, Any]:
    if not datasets:
        raise ValueError("needs at least one dataset, a table [... .datasets.NAME] with the `name` of its format")
    if wrong := [name for name in datasets if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None]:
        raise ValueError(f"names of datasets must be letters, digits, '-' and '_', found {', '.join(map(repr, wrong))}")
    return datasets


Datasets = Annotated[dict[str, AnyChatDataset], AfterValidator(_named)]
"""Datasets, by names that the user chooses."""


class VlmMediaConfig(Section):
    """Settings of the model's own processor of media that replace those in its folder."""

    image: dict[str, Any] = {}
    """Settings of pictures, such as ``size``, the bounds on their pixels."""
    video: dict[str, Any] = {}
    """Settings of videos, such as ``fps``, ``max_frames`` and ``size``, the bounds on all their pixels. For Qwen3-VL
    and Cosmos-Reason2 ``clip_markers = false`` leaves out ``<|vision_start|>`` and ``<|vision_end|>`` around a clip,
    whose frames have them too, as cosmos-rl does; default: they stay, as in transformers 5."""

    @property
    def changes(self) -> dict[Literal["image", "video"], dict[str, Any]]:
        """Return the settings by kind of medium, without kinds that have none."""
        kinds: dict[Literal["image", "video"], dict[str, Any]] = {"image": self.image, "video": self.video}
        return {kind: settings for kind, settings in kinds.items() if settings}


class VlmLoraConfig(LoraConfig):
    """Low-rank adapters on the linear modules of the trained parts."""

    target_modules: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1)
    """Suffixes of the names of modules that get an adapter, or ``"all-linear"`` for every linear module except the
    output."""


class VlmPolicyConfig(Section):
    """The model and its trained parts."""

    model_name_or_path: UserPath
    """A VLM of transformers: a local directory, or a Hugging Face name in the local cache, ``owner/name`` or
    ``owner/name@revision``."""
    trains: tuple[Part, ...] = Field(default=("projector", "language"), min_length=1)
    """Parts that train: ``vision`` (the vision tower), ``projector``, ``language``. Others are frozen and in no
    policy. With ``[policy.lora]``: the parts that get adapters."""
    model_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    lora: VlmLoraConfig | None = None
    """Settings of LoRA adapters. Default: none, so that all weights of the parts are trained."""
    media: VlmMediaConfig = VlmMediaConfig()
    """How the model sees media."""

    @model_validator(mode="after")
    def _parts_differ(self) -> "VlmPolicyConfig":
        if len(set(self.trains)) < len(self.trains):
            raise ValueError(f"trains names a part twice: {', '.join(self.trains)}")
        return self


class VlmSftOptions(Section):
    """Supervised fine-tuning on the answers of conversations."""

    rewarded: ClassVar[bool] = False
    """Whether it trains on rewarded rollouts, as the options of other algorithms say."""
    type: Literal["vlm_sft"]
    """The algorithm."""
    datasets: Datasets
    """The conversations that are trained on."""
    weights: dict[str, PositiveFloat] = Field(default={}, json_schema_extra={"neutral": {}})
    """Shares of conversations that are drawn from each dataset, relative to each other. Default: every conversation
    equally often."""
    steps_per_iteration: int = Field(default=100, ge=1)
    """Number of optimizer steps of an iteration, each on ``train.train_batch_per_replica`` conversations."""
    model_max_length: int = Field(default=4096, ge=16)
    """Most tokens of a conversation. Longer ones are cut, never inside a picture or a video."""
    row_length: int | None = Field(default=None, ge=16)
    """Most tokens of a row of packed conversations. Default: ``model_max_length``."""
    turns: Literal["all", "last"] = "all"
    """Whether every answer of a conversation has labels, or the last one alone."""
    balance_dp_token: bool = True
    """Whether the loss is the mean over all labels of a step; otherwise the mean over rows of each row's mean."""
    max_left_out: float = Field(default=0.05, ge=0, lt=1, json_schema_extra=NOT_IDENTITY)
    """Maximum share of conversations that cannot be used; above it the stage fails and names them."""

    @property
    def row_tokens(self) -> int:
        """Return the most tokens of a row."""
        return self.row_length or self.model_max_length

    @model_validator(mode="after")
    def _weights_have_datasets(self) -> "VlmSftOptions":
        if self.weights and self.weights.keys() != self.datasets.keys():
            raise ValueError(
                f"weights has {', '.join(self.weights)}, and datasets has {', '.join(self.datasets)}; give every "
                "dataset a weight, or none"
            )
        return self


class VlmTrainConfig(OptimizationConfig):
    """Training: length, batch, optimizer and data."""

    ckpt: CkptConfig = Field(default=CkptConfig(), json_schema_extra=NOT_IDENTITY)
    """Retention and exports of policies."""
    seed: int = Field(default=0, ge=0)
    """Seed of every random draw of the run."""
    num_iterations: int = Field(ge=1, le=MAX_ITERATIONS, json_schema_extra=NOT_IDENTITY)
    """Number of iterations, each a range of optimizer steps. Raise it to continue a finished run."""
    max_gpu_hours: float | None = Field(default=None, gt=0, json_schema_extra=NOT_IDENTITY)
    """Device hours after which a run stops: before the iteration that would exceed them. A rank on a CPU counts as a
    device. Raise it to continue. Default: no limit."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of computations: ``bfloat16`` is faster and less exact. Weights, losses, gradient sums and states are
    always float32."""
    train_batch_per_replica: int = Field(default=8, ge=1)
    """Number of conversations of an optimizer step, over all ranks."""
    train_policy: VlmSftOptions
    """The algorithm and its settings."""


class VlmValidationConfig(Section):
    """Held-out evaluation: losses, and answers to the last question of each conversation."""

    datasets: Datasets
    """Conversations that training does not use."""
    freq: int = Field(default=0, ge=0)
    """Number of iterations between evaluations; 0 evaluates the base model and the final policy only."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Most tokens of a generated answer; 0 generates none, and only the loss is measured."""
    parsers: dict[str, Regex] = {}
    """Regular expressions by dataset. The first group of one is compared in the expected and the given answer. Without
    an expression, answers must be equal, except for white space around them."""
    best_by: str | None = Field(default=None, min_length=1, json_schema_extra=NOT_IDENTITY)
    """The number that ranks policies, for ``status`` and ``export --best``. ``"loss"``: the held-out loss. A name in
    ``datasets``: the share of correct answers to its conversations. Default: ``"loss"``."""

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence if this recipe does not measure the number that ``best_by`` names."""
        known = ["loss", *(self.datasets if self.max_new_tokens else ())]
        if self.best_by is not None and self.best_by not in known:
            told = ", ".join(known)
            if self.best_by in self.datasets:
                told += "; set max_new_tokens above 0, so that answers are generated"
            yield f"validation.best_by = {self.best_by!r} is not measured by this recipe; known: {told}"
        if self.best_by == "loss" and "loss" in self.datasets:
            yield "validation.best_by = 'loss' names the loss and a dataset; give the dataset another name"

    @model_validator(mode="after")
    def _parsers_are_of_datasets(self) -> "VlmValidationConfig":
        if unknown := [name for name in self.parsers if name not in self.datasets]:
            raise ValueError(f"parsers of no dataset: {', '.join(unknown)}; known: {', '.join(self.datasets)}")
        if without := [name for name, pattern in self.parsers.items() if re.compile(pattern).groups == 0]:
            raise ValueError(f"parsers.{without[0]} has no group: put what is compared in parentheses")
        if self.parsers and not self.max_new_tokens:
            raise ValueError("parsers without effect: max_new_tokens = 0 generates no answers")
        return self


class VlmRecipe(Section):
    """Definition of a run that fine-tunes a VLM."""

    plugins: tuple[str, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Files or folders of plugins outside the package: ``vlms`` and ``chat_datasets``. Relative paths start at the
    recipe's folder, on the command line at the working directory. The plan pins the digests of the files."""
    policy: VlmPolicyConfig
    """The model and its trained parts."""
    train: VlmTrainConfig
    """Length, batch, optimizer and data."""
    validation: VlmValidationConfig | None = None
    """Held-out evaluation. Default: none."""
    launch: LaunchConfig = Field(default=LaunchConfig(), json_schema_extra=NOT_IDENTITY)
    """Processes and machines."""
    logging: LoggingConfig = Field(default=LoggingConfig(), json_schema_extra=NOT_IDENTITY)
    """Destinations of metrics."""

    @model_validator(mode="after")
    def _check(self) -> "VlmRecipe":
        if mistakes := list(_mistakes(self)):
            raise ValueError("\n".join(mistakes))
        return self

    @property
    def rewards(self) -> tuple[RewardConfig, ...]:
        """Return none: supervised training has no rewards."""
        return ()

    @property
    def early_warning(self) -> EarlyWarningConfig | None:
        """Return None: supervised training has no scores with limits."""
        return None

    @property
    def evaluates(self) -> bool:
        """Return False: a VLM makes no samples from held-out prompts; ``validation`` has losses and answers."""
        return False


def _mistakes(recipe: VlmRecipe) -> Iterator[str]:
    """Yield a sentence for each combination of settings that cannot work."""
    if (lora := recipe.policy.lora) is not None and lora.lora_dropout:
        yield f"policy.lora.lora_dropout = {lora.lora_dropout:g}: VLMs are trained without dropout; leave it out"
    if recipe.validation is not None:
        yield from recipe.validation.mistakes()
    launch, options = recipe.launch, recipe.train.train_policy
    ranks, batch = launch.processes_of("vlm_finetune"), recipe.train.train_batch_per_replica
    if batch % ranks:
        yield f"train.train_batch_per_replica = {batch} is not a multiple of the {ranks} ranks of vlm_finetune"
    if launch.cp_size > 1:
        yield f"launch.cp_size = {launch.cp_size}: only diffusion models share the tokens of a video; set it to 1"
    if launch.compile:
        yield "launch.compile = true: only diffusion transformers are compiled; set it to false"
    if options.row_tokens < options.model_max_length:
        longest = f"train.train_policy.model_max_length = {options.model_max_length}"
        yield f"train.train_policy.row_length = {options.row_tokens} is below {longest}; raise it, or leave it out"


def is_vlm(values: Mapping[str, Any]) -> bool:
    """Return whether plain values are a recipe of this kind."""
    train = values.get("train")
    policy = train.get("train_policy") if isinstance(train, Mapping) else None
    return isinstance(policy, Mapping) and policy.get("type") == VLM_SFT


def checked(values: Values, source: str) -> tuple[VlmRecipe, list[str]]:
    """Build a recipe from plain values, strictly typed, and list the settings that were set without effect.

    Raises one :class:`ConfigError` with all mistakes.
    """
    recipe = validated(VlmRecipe, values, source)
    return recipe, list(effects.of_launch(recipe.launch))
