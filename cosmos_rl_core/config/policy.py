"""The model, its trained part and its sampling. Field names are cosmos-rl's."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from cosmos_rl_core import plugins
from cosmos_rl_core.config.base import NOT_IDENTITY, Section, UserPath

ALL_LINEAR = "all-linear"
"""Value of ``target_modules`` for every linear module."""

NOT_IN_LORA = {
    "lora_names": "there is one adapter; copies that an algorithm needs, such as NFT's old, are parts of the policy",
    "primary_adapter": "there is one adapter, and the algorithm decides which part of the policy makes rollouts",
    "lora_path": "policy.init_from names the folder of an adapter to begin with; policy.init_mode says whether it goes "
    "on training or lies frozen below a new one",
    "modules_to_save": "a LoRA file of diffusers holds adapters only; list the modules in "
    "policy.lora.target_modules, or leave [policy.lora] out to train every weight",
}
"""cosmos-rl's settings of adapters that do not exist here, and why. For diffusion models cosmos-rl itself reads only
``lora_names`` and ``primary_adapter``."""


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Init = Annotated[
    Literal["gaussian", "kaiming"],
    BeforeValidator(
        lambda value: "kaiming" if value is True else value,
        json_schema_input_type=Literal["gaussian", "kaiming", True],
    ),
]
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_Targets = tuple[str, ...] | Literal["all-linear"]
Regex = Annotated[str, AfterValidator(_checked_regex)]


class LoraConfig(Section):
    """Low-rank adapters on the transformer. Leave the whole section out to train every weight."""

    r: int = Field(default=8, ge=1)
    """Rank of the adapters. A higher rank can learn more per step; memory grows in proportion."""
    lora_alpha: float = Field(default=8.0, gt=0)
    """Scale of the adapters: their output is multiplied by ``lora_alpha / r``."""
    target_modules: tuple[str, ...] = Field(default=_ATTENTION, min_length=1)
    """Suffixes of the names of modules that get an adapter, or ``"all-linear"`` for every linear module, including
    time embeddings, text embeddings and the output."""
    init_lora_weights: Init = "gaussian"
    """Initialization of A: normal with standard deviation ``1 / r``, or Kaiming-uniform (also written ``true``). B
    starts at zero, so that version 0 is exactly the base model; peft's other inits change the base or read data."""
    use_rslora: bool = False
    """Multiply the output by ``lora_alpha / sqrt(r)`` instead, so that a higher rank does not learn more slowly.
    Source: arXiv:2312.03732."""
    r_pattern: dict[Regex, Annotated[int, Field(ge=1)]] = {}
    """Ranks of single modules, in place of ``r``, e.g. ``{ "attn.to_q" = 16 }`` (peft's ``rank_pattern``). A key is
    a regular expression for a module's whole name, or for its end after a dot. At most one key may match a module."""
    alpha_pattern: dict[Regex, Annotated[float, Field(gt=0)]] = {}
    """``lora_alpha`` of single modules, with the keys of ``r_pattern``."""
    lora_dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Probability with which a training step drops each input of an adapter, in the policy's own forward pass only;
    rollouts, evaluations and other parts in the loss see all inputs. Regularizes. Masks are drawn on the CPU, which
    takes time with many adapters. Not for algorithms that train on recorded steps."""

    @field_validator("target_modules", mode="before", json_schema_input_type=_Targets)
    @classmethod
    def _all_or_suffixes(cls, value: Any) -> Any:
        if isinstance(value, str) and value != ALL_LINEAR:
            raise ValueError(f'{value!r} is neither a list of module names nor "{ALL_LINEAR}"')
        if isinstance(value, list | tuple) and ALL_LINEAR in value and len(value) > 1:
            raise ValueError(f'"{ALL_LINEAR}" must be the only name: it covers every linear module')
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value


MAX_STEPS = 10_000
"""Largest number of solver steps: ten times the steps that schedulers are trained on."""


class SolverConfig(Section):
    """Sampler of rollouts. Settings from ``sigma_max`` on are for solvers that read them, such as ``edm``."""

    plugin = ("solvers", "solver")

    num_steps: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Number of solver steps of a rollout. More steps are slower and follow the model more exactly."""
    guidance_scale: float = Field(default=1.0, ge=1)
    """Weight of classifier-free guidance. 1 turns guidance off, which halves the cost of a step."""
    solver: str | None = Field(default=None, json_schema_extra={"examples": [*plugins.own("solvers")]})
    """Solver of rollouts: the name of a file in ``cosmos_rl_core/solvers``, or of a plugin from outside.
    Default: the one that takes the steps of the pipeline's own scheduler; the plan names it.
    Without noise: ``euler``, first order, the scheduler of SD3; ``dpm2``, DPM-Solver++ 2M, the scheduler of SANA,
    better with many steps, over-dispersed with few; ``unipc``, which adds a corrector, the scheduler of Wan;
    ``unipc1`` and ``unipc3``, the same with first and third order. With noise, for policy gradients: ``flow_sde``
    (FlowGRPO); ``cps``, which leaves less noise in samples; ``edm``, cosmos-rl's solver with its own grid of
    sigmas."""
    noise_level: float = Field(default=0.7, gt=0)
    """Amount of noise that ``flow_sde`` and ``cps`` add. More noise explores further and blurs samples. At most 1
    for ``cps``."""
    sigma_max: float = Field(default=200.0, gt=0)
    """First (largest) sigma of the EDM grid."""
    sigma_min: float = Field(default=0.01, gt=0)
    """Last (smallest) sigma of the EDM grid."""
    s_churn: float = Field(default=1.0, ge=0)
    """Amount of noise added at each sigma: sigma grows by a factor of ``1 + min(s_churn / (num_steps + 1),
    0.095)``."""
    s_noise: float = Field(default=1.0, ge=0)
    """Factor on the standard deviation of the added noise; 1 preserves the marginals."""
    s_t_min: float = Field(default=0.0, ge=0)
    """Sigma above which noise is added."""
    s_t_max: float | None = Field(default=None, gt=0)
    """Sigma below which noise is added. Default (or ``inf``): no bound."""
    solver_option: Literal["2ab", "1euler"] = "2ab"
    """Step of the EDM solver: ``2ab``, second-order multistep, or ``1euler``, first order. cosmos-rl accepts more names
    and computes ``2ab`` for all of them."""

    @field_validator("solver")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None:
            # Raises for an unknown name, with the names that are known.
            plugins.load("solvers", value)
        return value

    @field_validator("s_t_max", mode="before")
    @classmethod
    def _no_bound(cls, value: Any) -> Any:
        return None if value == math.inf else value


class SampleConfig(SolverConfig):
    """Sampling of rollouts and evaluations."""

    negative_prompt: str | None = None
    """Text that guidance steers away from, in rollouts, updates and evaluations. Default: the default of the stock
    pipeline's call, for most models empty. Pass the same text to the pipeline when using exported weights."""
    eval_num_steps: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Number of solver steps of an evaluation, which uses the stock pipeline with its own scheduler."""

    @model_validator(mode="after")
    def _steers_away_from_it(self) -> Self:
        if (text := self.negative_prompt) is not None and self.guidance_scale == 1:
            found = f"negative_prompt = {text!r} has no effect at guidance_scale = 1"
            raise ValueError(f"{found}; raise guidance_scale, or leave negative_prompt out")
        return self

    @property
    def rollout(self) -> SolverConfig:
        """Return the settings of rollouts only."""
        # The values are valid already; a second validation would fail if this process has since forgotten a solver from
        # outside, for the sake of another run.
        return SolverConfig.model_construct(**{name: getattr(self, name) for name in SolverConfig.model_fields})


class TimeDensity(Section):
    """Noise levels of training on media: supervised training, and the data term of training on rewards."""

    weighting_scheme: Literal["logit_normal", "uniform"] = "logit_normal"
    """Density of the training times t, before the shift of the pipeline's own schedule."""
    logit_mean: float = 0.0
    """Mean of logit(t) before the shift. A higher mean trains noisier times."""
    logit_std: float = Field(default=1.0, gt=0)
    """Standard deviation of logit(t) before the shift."""


Posterior = Literal["mode", "sample"]


class DiffusersConfig(TimeDensity):
    """Sizes, inputs and sampling of the model."""

    inference_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (1024, 1024)
    """Height and width of training, rollout and evaluation media, in pixels."""
    train_frames: int = Field(default=1, ge=1)
    """Number of frames of training clips and rollouts; 1 for images."""
    max_prompt_length: int = Field(default=300, ge=1)
    """Maximum number of text tokens; longer prompts are cut."""
    guardrail: Literal["required", "off"] | None = None
    """The model's own safety checker. ``required`` refuses unsafe prompts, checks every generated video and blurs
    faces, in rollouts too, so that rewards score the changed video. ``off`` never loads it, which the model's
    licence may forbid. Default: ``required`` for models whose stock pipeline needs one. Must be left out for models
    without one."""
    complex_human_instruction: tuple[str, ...] | None = None
    """SANA only: lines before every prompt except the negative one; the prompt follows the last line directly.
    ``[]`` means none. Default: the lines of the stock pipeline's call. Pass the same lines to the pipeline when
    using exported weights."""
    embedded_guidance_scale: float | None = Field(default=None, ge=0)
    """Guidance-distilled transformers only: the guidance that is an input of the transformer, in rollouts, losses on
    them and evaluations. Default: the default ``guidance_scale`` of the stock pipeline's call.
    ``sample.guidance_scale`` is the weight between two predictions, which these pipelines call ``true_cfg_scale``."""
    supervised_guidance_scale: float | None = Field(default=None, ge=0, json_schema_extra=NOT_IDENTITY)
    """Guidance-distilled transformers only: the guidance that is an input of the transformer in losses on media:
    supervised training, held-out losses, and a diffusion loss in addition to rewards. Default: 1 for FLUX.1 dev, as
    diffusers' commands train it. The resolved value is part of the identity of stages that use it."""
    cfg_normalization: float | None = Field(default=None, gt=0, json_schema_extra={"neutral": None})
    """Z-Image only: longest norm of a guided prediction, in norms of the conditional one, in rollouts, losses on them
    and evaluations. Lower saturates pictures less. Default: no limit, the default of the stock pipeline's call."""
    cfg_truncation: float | None = Field(default=None, ge=0, json_schema_extra={"neutral": None})
    """Z-Image only: guidance is off where ``1 - t`` exceeds it, that is in the last part of the steps, in rollouts,
    losses on them and evaluations. Above 1: never. Default: 1, the default of the stock pipeline's call."""
    posterior: Posterior = Field(default="mode", json_schema_extra={"neutral": "mode"})
    """Latents of the media that are trained on: the ``mode`` of the VAE's posterior, or a ``sample``, drawn anew in
    each pass. Samples double the bytes of stored latents. Given frames of rollouts and held-out losses use the
    mode. Not for VAEs without a posterior, such as SANA's."""
    sample: SampleConfig = SampleConfig()
    """Sampling of rollouts and evaluations."""

    @property
    def density(self) -> TimeDensity:
        """Return the settings of noise levels only."""
        return TimeDensity(**{name: getattr(self, name) for name in TimeDensity.model_fields})


class PolicyConfig(Section):
    """The model and its trained part."""

    model_name_or_path: UserPath
    """A diffusers pipeline: a local directory; a Hugging Face name in the local cache, ``owner/name`` or
    ``owner/name@revision``; or ``package:tiny-sd3``, the tiny model of this project."""
    from_scratch: bool = False
    """Draw the transformer's weights from the run's seed instead of loading them, to make a base model."""
    init_from: UserPath | None = Field(default=None, min_length=1, json_schema_extra={"neutral": None})
    """Trained weights that policy version 0 begins with, such as the result of supervised training: ``"run@16"``,
    policy version 16 of a run of this store, ``"run"``, its newest one; the folder of an adapter (diffusers', peft's or
    cosmos-rl's safetensors); or a pipeline, for all weights. A folder is named with a slash. A run gives the weights
    that ``export`` takes: the moving average, if it has one. Optimizer and ``old`` begin anew. Default: the base
    model."""
    init_mode: Literal["continue", "stack"] = Field(default="continue", json_schema_extra={"neutral": "continue"})
    """``continue``: the weights of ``init_from`` go on training; an adapter needs the modules, ranks and alphas of
    ``[policy.lora]``. ``stack``: its adapter is frozen, and a new one of any rank and modules is trained on it; exports
    join the two."""
    init_alpha: float | None = Field(default=None, gt=0, json_schema_extra={"neutral": None})
    """``lora_alpha`` of the adapter in the folder ``init_from``, if no file there states it."""
    reference: Literal["base", "init"] = Field(default="base", json_schema_extra={"neutral": "base"})
    """Weights that a KL term compares with: the base model, with all adapters off, or the weights that policy version 0
    begins with."""
    model_gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward pass: slower, much less memory. ``"auto"``: unless training without it fits
    into ``launch.device_memory_gb``; models below 10^8 parameters always fit. It is decided when the run is planned;
    the run keeps it on other machines too."""
    lora: LoraConfig | None = None
    """Settings of LoRA adapters. Default: none, so that all weights are trained."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """Sizes, inputs and sampling of the model."""
