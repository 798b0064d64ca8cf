"""Which model is trained, how much of it, and how it is sampled. Field names are cosmos-rl's."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from cosmos_rl_core.config.base import Section


class LoraConfig(Section):
    """Low-rank adapters on the transformer. Leave the whole section out to train every weight."""

    r: int = Field(default=8, ge=1)
    """Rank. Higher learns more per step and costs memory in proportion."""
    lora_alpha: float = Field(default=8.0, gt=0)
    """The update is scaled by ``lora_alpha / r``."""
    target_modules: tuple[str, ...] = Field(default=("to_q", "to_k", "to_v", "to_out.0"), min_length=1)
    """Suffixes of the module names that get an adapter."""
    init_lora_weights: Literal["gaussian", "kaiming"] = "gaussian"
    """How A starts: normal with std ``1 / r``, or Kaiming-uniform. B starts at zero: version 0 is exactly the base
    model."""


class SolverConfig(Section):
    """From noise to a sample. The settings from ``sigma_max`` on are those of ``solver = "edm"`` alone."""

    num_steps: int = Field(default=10, ge=1)
    """Solver steps of a rollout. More is slower and truer to the model."""
    guidance_scale: float = Field(default=1.0, ge=1)
    """Classifier-free guidance weight; 1 turns guidance off and halves the cost of a step."""
    solver: Literal["euler", "dpm2", "unipc", "flow_sde", "cps", "edm"] = "euler"
    """Without noise: ``euler``, first order, as SD3's stock pipeline samples; ``dpm2``, DPM-Solver++ 2M, as SANA's,
    better on fine grids, over-dispersed on coarse ones; ``unipc``, the same with a corrector, as Wan's. With noise,
    which policy gradients need: ``flow_sde``, FlowGRPO's; ``cps``, which leaves less noise in the sample; ``edm``,
    cosmos-rl's, on a grid of its own."""
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
    solver_option: str = "2ab"
    """``2ab``, second order multistep, or ``1euler``."""

    @field_validator("solver_option")
    @classmethod
    def _is_rolled_out(cls, value: str) -> str:
        if value not in ("2ab", "1euler"):
            raise ValueError(
                f"{value!r} is not one of 1euler, 2ab; cosmos-rl took more names, but rolled out 2ab whatever the name"
            )
        return value

    @field_validator("s_t_max", mode="before")
    @classmethod
    def _no_bound(cls, value: Any) -> Any:
        return None if value == math.inf else value


class SampleConfig(SolverConfig):
    """How rollouts and evaluations are sampled."""

    eval_num_steps: int = Field(default=10, ge=1)
    """Solver steps of an evaluation, taken by the stock pipeline with its own scheduler."""

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
    guardrail: Literal["required", "off"] | None = Field(default=None, json_schema_extra={"neutral": None})
    """The model's own safety checker. ``required`` refuses unsafe prompts, checks every generated video and blurs the
    faces in it, in rollouts too: rewards see what it leaves. ``off`` never loads it, which the model's licence may
    forbid. Absent means ``required`` for a model whose stock pipeline does not run without one, because to turn a
    safety checker off is for whoever runs the model to say, not for a default. Models without one take no setting."""
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
