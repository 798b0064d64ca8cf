"""The base of the settings of stages, and sections that several of them share."""

from typing import ClassVar, Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.train import OptimizerName


class ModelRef(Section):
    """The base pipeline: its place and its identity."""

    plugin = ("models", "adapter")
    path: str = Field(json_schema_extra=NOT_IDENTITY)
    """Directory of the pipeline, or ``package:<name>``."""
    adapter: str
    """The model plugin that reads it."""
    digest: str
    """Digest of the pipeline's files, pinned by the plan."""
    guardrail: tuple[Literal["guardrail"], ...] = ()
    """``("guardrail",)`` if prompts, and the media of rollouts and evaluations, pass the pipeline's guardrail."""
    complex_human_instruction: tuple[str, ...] | None = None
    """Text put before prompts; None means the stock pipeline's own."""
    embedded_guidance_scale: float | None = None
    """Guidance that the transformer takes as an input; None if it takes none."""
    supervised_guidance_scale: float | None = Field(default=None, json_schema_extra={"neutral": None})
    """Guidance that the transformer takes in losses on media; None for ``embedded_guidance_scale``."""
    cfg_normalization: float | None = Field(default=None, json_schema_extra={"neutral": None})
    """Longest norm of a guided prediction, in norms of the conditional one; None means the stock pipeline's own."""
    cfg_truncation: float | None = Field(default=None, json_schema_extra={"neutral": None})
    """Largest ``1 - t`` at which guidance is on; None means the stock pipeline's own."""


class MediaShape(Section):
    """Size of the generated media."""

    size: tuple[int, int]
    """Height and width in pixels."""
    frames: int
    """Frames; 1 for images."""


class Decoding(Section):
    """Decoding of a rollout's samples to pixels: how many of them, and in which precision."""

    share: float = Field(default=1.0, json_schema_extra={"neutral": 1.0})
    """Expected share of the samples, chosen by their seeds."""
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", json_schema_extra={"neutral": "float32"})
    """Type in which the VAE multiplies."""
    tf32: bool = Field(default=False, json_schema_extra={"neutral": False})
    """Whether a GPU may round the factors of float32 products and convolutions to 10 bits."""


class OptimizerSteps(Section):
    """A range of optimizer steps, with every schedule resolved to its values."""

    lrs: tuple[float, ...]
    """Learning rate of each step."""
    ema_decays: tuple[float | None, ...]
    """Decay of the average after each step; None if the average does not change."""
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    grad_norm_clip: float
    first_step: int
    """Optimizer steps done before this range."""
    optimizer: OptimizerName = "AdamW"
    max_nonfinite: int = Field(default=0, json_schema_extra=NOT_IDENTITY)
    """Consecutive steps that may be skipped because their gradients are not finite. Affects success, not the result."""


class Init(Section):
    """Trained weights that a policy begins with."""

    source: str = Field(default="", json_schema_extra=NOT_IDENTITY)
    """Run and policy version, ``sft@16``, or the folder."""
    path: str = Field(default="", json_schema_extra=NOT_IDENTITY)
    """The folder; "" for another run's policy, which is then the input ``init``."""
    digest: str
    """Digest of the manifest of the other run's policy, or of the folder's files, pinned by the plan."""
    lora: LoraConfig | None = None
    """Settings of the adapter; None for all weights."""


class Split(Section):
    """A share of a dataset. The digest of a medium decides its side, so that equal media are never on both sides."""

    side: Literal["train", "held_out"]
    held_out_share: float
    """Expected share of the media that are held out."""


class StageConfig(Section):
    """The closed settings of a stage. Each subclass with a name is one stage, which a module of its package runs."""

    name: ClassVar[str]
    package: ClassVar[str] = "stages"
    """Package of the module that runs the stage. The module has the stage's name, without the package's name."""
    version: ClassVar[int]
    """Version, which rises with every change of the bytes that equal settings and inputs give."""
    distributed: ClassVar[bool] = False
    """Whether it may have several ranks, under ``torch.distributed.run``; else it is one plain process."""
    torch: ClassVar[bool] = True
    """Whether it may import torch; a light stage starts in a second."""
    elastic: ClassVar[bool] = False
    """Whether workers may share it (``launch.elastic``): its work is units that do not wait for each other."""
    inputs: ClassVar[dict[str, Literal["one", "many"]]] = {}
    """Whether an input is ``one`` artifact or ``many``, by its role."""
    reader: ClassVar[str | None] = None
    """Module of the package with ``excerpt_of`` and ``answers_of``, for reports of artifacts without a fragment."""
    measures: ClassVar[str | None] = None
    """Module of the package that reads the stage's measurements of a policy on held-out data, with the functions of
    ``stages.scoring.held_out.Reader``; None for a stage without such measurements."""


class Trains(StageConfig):
    """The settings of every stage that trains a policy version, which ends an iteration."""

    gradient_checkpointing: bool
    steps: OptimizerSteps
    keeps_ema: bool
    """Whether the policy has the part ``ema``."""
