"""Which model is trained, how much of it, and how it is sampled. Field names are cosmos-rl's."""

from typing import Literal

from pydantic import Field

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


class SampleConfig(Section):
    """How rollouts are sampled."""

    num_steps: int = Field(default=10, ge=1)
    """Solver steps of a rollout. More is slower and truer to the model."""
    eval_num_steps: int = Field(default=10, ge=1)
    """Solver steps of an evaluation, taken by the stock pipeline with its own scheduler."""
    guidance_scale: float = Field(default=1.0, ge=1)
    """Classifier-free guidance weight; 1 turns guidance off and halves the cost of a step."""
    solver: Literal["euler", "dpm2"] = "euler"
    """``euler`` is first order; ``dpm2`` is DPM-Solver++ 2M, better on fine grids, over-dispersed on coarse ones."""


class DiffusersConfig(Section):
    """Sizes and numbers at the model's door."""

    inference_size: tuple[int, int] = (1024, 1024)
    """Height and width of training, rollout and evaluation media, in pixels."""
    train_frames: int = Field(default=1, ge=1)
    """Frames of training clips and rollouts; 1 for images."""
    max_prompt_length: int = Field(default=300, ge=1)
    """Text tokens; longer prompts are cut."""
    weighting_scheme: Literal["logit_normal", "uniform"] = "logit_normal"
    """Density of the training times t in SFT, before the shift of the pipeline's own schedule."""
    logit_mean: float = 0.0
    """Mean of logit(t) before the shift; higher trains noisier times."""
    logit_std: float = Field(default=1.0, gt=0)
    """Standard deviation of logit(t) before the shift."""
    sample: SampleConfig = SampleConfig()
    """How rollouts are sampled."""


class PolicyConfig(Section):
    """The model."""

    model_name_or_path: str
    """A diffusers pipeline: a local directory, or ``package:tiny-sd3``, the one that ships with this project."""
    from_scratch: bool = False
    """Draw the transformer's weights from the run's seed instead of loading them. For making a base model."""
    model_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    lora: LoraConfig | None = None
    """Adapters; absent means full fine-tuning."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """Sizes and numbers at the model's door."""
