"""Which model is trained, how much of it, and how it is sampled. Field names are cosmos-rl's."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from cosmos_rl_core.config.base import Section

ALL_LINEAR = "all-linear"
"""Stands in ``target_modules`` for every linear module."""

NOT_IN_LORA = {
    "lora_names": "there is one adapter, and the copies that an algorithm needs, such as NFT's old one, are parts of "
    "the policy by themselves",
    "primary_adapter": "there is one adapter, and the algorithm says which of the policy's parts makes rollouts",
    "lora_path": "every policy begins as exactly its base model, which is the reference too; to go on from an adapter "
    "fuse it into the pipeline (fuse_lora, save_pretrained) and name that in policy.model_name_or_path",
    "modules_to_save": "a LoRA file of diffusers holds adapters alone; give the modules one by "
    "policy.lora.target_modules, or leave [policy.lora] out to train every weight",
}
"""Settings of cosmos-rl's adapters that there are none of here, and why. Upstream reads only ``lora_names`` and
``primary_adapter`` for diffusion models."""

_REFUSED_INITS = {
    "eva": "draws A from activations on data, and policy version 0 depends on the base model and the seed alone",
    "olora": "changes the base weights, which the exported adapter is to be loaded on as they are",
    "pissa": "changes the base weights, which the exported adapter is to be loaded on as they are",
    "false": "starts B at random too, and policy version 0 has to be exactly the base model",
}


def _known_init(value: Any) -> Any:
    """``true`` is peft's word for its Kaiming default. Raises ``ValueError`` for what peft knows and this does not."""
    name = str(value).lower() if isinstance(value, bool) else value
    reason = _REFUSED_INITS.get(name.split("_niter_")[0]) if isinstance(name, str) else None
    if reason is not None:
        raise ValueError(f"{name} {reason}; known: true (kaiming), gaussian")
    return "kaiming" if value is True else value


def _regexes(patterns: dict[str, Any]) -> dict[str, Any]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return patterns


Ranks = Annotated[dict[str, Annotated[int, Field(ge=1)]], AfterValidator(_regexes)]
Alphas = Annotated[dict[str, Annotated[float, Field(gt=0)]], AfterValidator(_regexes)]


class LoraConfig(Section):
    """Low-rank adapters on the transformer. Leave the whole section out to train every weight."""

    r: int = Field(default=8, ge=1)
    """Rank. Higher learns more per step and costs memory in proportion."""
    lora_alpha: float = Field(default=8.0, gt=0)
    """The update is scaled by ``lora_alpha / r``."""
    target_modules: tuple[str, ...] = Field(default=("to_q", "to_k", "to_v", "to_out.0"), min_length=1)
    """Suffixes of the module names that get an adapter, or ``"all-linear"``: every linear module there is, those of
    time and text embeddings and of the output too."""
    init_lora_weights: Annotated[
        Literal["gaussian", "kaiming"],
        BeforeValidator(_known_init, json_schema_input_type=Literal["gaussian", "kaiming", True]),
    ] = "gaussian"
    """How A starts: normal with std ``1 / r``, or Kaiming-uniform, which ``true`` says too. B starts at zero: version 0
    is exactly the base model."""
    use_rslora: bool = False
    """Scale by ``lora_alpha / sqrt(r)`` instead, so that a higher rank does not learn more slowly.
    Source: arXiv:2312.03732."""
    r_pattern: Ranks = {}
    """Another rank for the adapted modules that a pattern names, e.g. ``{ "attn.to_q" = 16 }``: peft's
    ``rank_pattern``, a regular expression for a whole name, or for its end after a dot. No module may be named by two.
    """
    alpha_pattern: Alphas = {}
    """Another ``lora_alpha`` for the adapted modules that a pattern names, as in ``r_pattern``."""
    lora_dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Share of each adapter's inputs that a training step leaves out of the policy's own forward pass, and of no other:
    rollouts, evaluations and the copies that a loss compares with see everything. Regularises; the draws are made on
    the CPU, a number for each input, which takes time with many adapters. Not for algorithms that train on recorded
    steps."""

    @field_validator("target_modules", mode="before", json_schema_input_type=tuple[str, ...] | Literal["all-linear"])
    @classmethod
    def _all_or_suffixes(cls, value: Any) -> Any:
        if isinstance(value, str) and value != ALL_LINEAR:
            raise ValueError(f'{value!r} is neither a list of module names nor "{ALL_LINEAR}"')
        if isinstance(value, list | tuple) and ALL_LINEAR in value and len(value) > 1:
            raise ValueError(f'"{ALL_LINEAR}" stands alone: it names every linear module already')
        return tuple([value] if isinstance(value, str) else value) if isinstance(value, str | list) else value


Solver = Literal["euler", "dpm2", "unipc", "unipc1", "unipc3", "flow_sde", "cps", "edm"]


MAX_STEPS = 10_000
"""Solver steps beyond which a number is taken for a mistake: schedulers are trained on a tenth of it."""


class SolverConfig(Section):
    """From noise to a sample. The settings from ``sigma_max`` on are those of ``solver = "edm"`` alone."""

    num_steps: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Solver steps of a rollout. More is slower and truer to the model."""
    guidance_scale: float = Field(default=1.0, ge=1)
    """Classifier-free guidance weight; 1 turns guidance off and halves the cost of a step."""
    solver: Solver | None = None
    """Absent means the one that takes the steps of the pipeline's own scheduler; the plan has its name. Without noise:
    ``euler``, first order, as SD3's stock pipeline samples; ``dpm2``, DPM-Solver++ 2M, as SANA's, better on fine grids,
    over-dispersed on coarse ones; ``unipc``, the same with a corrector, as Wan's; and ``unipc1`` and
    ``unipc3`` that of first and third order. With noise, which policy gradients
    need: ``flow_sde``, FlowGRPO's; ``cps``, which leaves less noise in the sample; ``edm``, cosmos-rl's, on a grid of
    its own."""
    noise_level: float = Field(default=0.7, gt=0)
    """Noise of ``flow_sde`` and ``cps``: more explores further and blurs the samples. At most 1 for ``cps``."""
    sigma_max: float = Field(default=200.0, gt=0)
    """First sigma of the EDM grid."""
    sigma_min: float = Field(default=0.01, gt=0)
    """Last sigma of the EDM grid."""
    s_churn: float = Field(default=1.0, ge=0)
    """Noise added at each sigma: a lift by ``s_churn / (num_steps + 1)`` of it, at most by 0.095."""
    s_noise: float = Field(default=1.0, ge=0)
    """Factor of the added noise's deviation; 1 keeps the marginals."""
    s_t_min: float = Field(default=0.0, ge=0)
    """Sigma above which noise is added."""
    s_t_max: float | None = Field(default=None, gt=0)
    """Sigma below which noise is added; absent (or inf) means no bound."""
    solver_option: Literal["2ab", "1euler"] = "2ab"
    """Step of the EDM solver: ``2ab``, second-order multistep, or ``1euler``, first order. cosmos-rl accepts more names
    and computes ``2ab`` for all of them."""

    @field_validator("s_t_max", mode="before")
    @classmethod
    def _no_bound(cls, value: Any) -> Any:
        return None if value == math.inf else value


class SampleConfig(SolverConfig):
    """How rollouts and evaluations are sampled."""

    negative_prompt: str | None = None
    """What guidance steers away from, in rollouts, updates and evaluations; absent means the default of the stock
    pipeline's call, which is empty for most models. Users of the exported weights give that call the same."""
    eval_num_steps: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Solver steps of an evaluation, taken by the stock pipeline with its own scheduler."""

    @model_validator(mode="after")
    def _steers_away_from_it(self) -> Self:
        if self.negative_prompt is not None and self.guidance_scale == 1:
            raise ValueError(
                f"negative_prompt = {self.negative_prompt!r} has no effect at guidance_scale = 1; raise that, or leave "
                "it out"
            )
        return self

    @property
    def rollout(self) -> SolverConfig:
        """The settings of rollouts alone."""
        return SolverConfig(**{name: getattr(self, name) for name in SolverConfig.model_fields})


class TimeDensity(Section):
    """Where supervised training, and the data term beside rewards, draw their noise levels."""

    weighting_scheme: Literal["logit_normal", "uniform"] = "logit_normal"
    """Density of the training times t in SFT, before the shift of the pipeline's own schedule."""
    logit_mean: float = 0.0
    """Mean of logit(t) before the shift; higher trains noisier times."""
    logit_std: float = Field(default=1.0, gt=0)
    """Standard deviation of logit(t) before the shift."""


class DiffusersConfig(TimeDensity):
    """Sizes and numbers at the model's door."""

    inference_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (1024, 1024)
    """Height and width of training, rollout and evaluation media, in pixels."""
    train_frames: int = Field(default=1, ge=1)
    """Frames of training clips and rollouts; 1 for images."""
    max_prompt_length: int = Field(default=300, ge=1)
    """Text tokens; longer prompts are cut."""
    guardrail: Literal["required", "off"] | None = None
    """The model's own safety checker. ``required`` refuses unsafe prompts, checks every generated video and blurs the
    faces in it, in rollouts too: rewards see what it leaves. ``off`` never loads it, which the model's licence may
    forbid. Absent means ``required`` for a model whose stock pipeline does not run without one, because to turn a
    safety checker off is for whoever runs the model to say, not for a default. Models without one take no setting."""
    complex_human_instruction: tuple[str, ...] | None = None
    """For SANA: lines put before every prompt but the negative one; the prompt follows the last line directly. ``[]``
    puts none; absent means those of the stock pipeline's call. Users of the exported weights give that call the same.
    """
    embedded_guidance_scale: float | None = Field(default=None, ge=0)
    """For guidance-distilled transformers: the guidance that they take as an input, in training too. Absent means the
    default of the stock call's ``guidance_scale``. ``sample.guidance_scale`` is the weight of two predictions, which
    such pipelines call ``true_cfg_scale``."""
    sample: SampleConfig = SampleConfig()
    """How rollouts are sampled."""

    @property
    def density(self) -> TimeDensity:
        """The settings of noise levels alone."""
        return TimeDensity(**{name: getattr(self, name) for name in TimeDensity.model_fields})


class PolicyConfig(Section):
    """The model."""

    model_name_or_path: str
    """A diffusers pipeline: a local directory; a name on the Hugging Face hub that is in its local cache,
    ``owner/name`` or ``owner/name@revision``; or ``package:tiny-sd3``, the one that ships with this project."""
    from_scratch: bool = False
    """Draw the transformer's weights from the run's seed instead of loading them. For making a base model."""
    model_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    lora: LoraConfig | None = None
    """Adapters; absent means full fine-tuning."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """Sizes and numbers at the model's door."""
