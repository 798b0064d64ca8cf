"""The data flow on one page: what a stage is asked (its Request), what it leaves (an artifact), and when that stands.

A Request names a stage, its closed settings and its inputs. Its **recipe** is the digest of everything but the inputs;
its **fingerprint** adds the inputs' fingerprints, so it is known before anything runs. An artifact's **content** is the
digest of its result bytes. An artifact stands while its recipe is the one asked for and every input's content is what
stands now: a stage run again with equal bytes leaves everything below it standing, whatever its own recipe was.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.policy import LoraConfig, SolverConfig, TimeDensity
from cosmos_rl_core.config.train import AnyDataset, AnyReward, AnyRewarded, AnySupervised, OptimizerName
from cosmos_rl_core.datasets._base import Prompt

RECORDS = "records/"
"""Prefix of files that record times, reasons and answers. All others are results, and their bytes the content."""
INDEX = "index"
"""The part of generated samples with all facts of them but their bytes; it is never dropped."""
MEDIA = "media"
"""The part of generated samples with what people and rewards see of them."""
TENSORS = "tensors"
"""The part of a rollout's samples that is trained on."""
METRICS = "metrics.parquet"
"""A row an optimizer step, of every stage that trains."""
NOT_IDENTITY: dict[str, Any] = {"identity": False}


class StageConfig(Section):
    """The closed settings of a stage. A subclass is a stage: ``stages/<name>.py`` runs it."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised by whoever changes the bytes that equal settings and inputs lead to."""
    distributed: ClassVar[bool] = False
    """Whether it runs under ``torch.distributed.run`` (True) or as one plain process (False)."""
    torch: ClassVar[bool] = True
    """Whether it may import torch; a light stage starts in a second."""
    inputs: ClassVar[dict[str, Literal["one", "many"]]] = {}
    """Roles of the inputs."""


class ModelRef(Section):
    """The base pipeline: where it is now, and what it is."""

    plugin = ("models", "adapter")
    path: str = Field(json_schema_extra=NOT_IDENTITY)
    """Directory of the pipeline, or ``package:<name>``."""
    adapter: str
    """The model plugin that reads it."""
    digest: str
    """Digest of the pipeline's files, pinned by the plan."""
    guardrail: tuple[Literal["guardrail"], ...] = ()
    """The component of this name where prompts, and the media of rollouts and evaluations, go through it."""
    complex_human_instruction: tuple[str, ...] | None = None
    """What is put before prompts; absent means the stock pipeline's own."""
    embedded_guidance_scale: float | None = None
    """The guidance that the transformer takes as an input; None: it takes none."""


class MediaShape(Section):
    """Size of the generated media."""

    size: tuple[int, int]
    """Height and width in pixels."""
    frames: int
    """Frames; 1 for images."""


class OptimizerSteps(Section):
    """A range of optimizer steps, every schedule resolved to its values."""

    lrs: tuple[float, ...]
    """Learning rate of each step."""
    ema_decays: tuple[float | None, ...]
    """Decay of the average after each step; None where it stays."""
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    grad_norm_clip: float
    first_step: int
    """Optimizer steps done before this range."""
    optimizer: OptimizerName = "AdamW"
    max_nonfinite: int = Field(default=0, json_schema_extra=NOT_IDENTITY)
    """Steps in a row that may be left out for gradients that are not finite: it decides whether there is a result, not
    which."""


class Embed(StageConfig):
    """Text embeddings of prompts, once: one safetensors a prompt, in tar shards."""

    name = "embed"
    version = 1
    distributed = True
    model: ModelRef
    prompts: tuple[Prompt, ...]
    """The prompts; the negative one, for guidance, is added, and the empty one, for dropping texts."""
    negative_prompt: str | None = None
    """Absent means the default of the stock pipeline's call."""
    max_prompt_length: int
    prefixed: bool = False
    """Whether embeddings are stored as they come out of the frozen module of the base that they pass through first."""
    prompts_per_shard: int = 256


class Encode(StageConfig):
    """Latents of a media set, once: one safetensors an item, in tar shards."""

    name = "encode"
    version = 1
    distributed = True
    model: ModelRef
    dataset: AnyDataset
    dataset_digest: str
    """Digest of the files that the dataset reads, pinned by the plan; "" for a generated one."""
    media: MediaShape
    items_per_shard: int = 64
    """Items in one shard: the unit that a retry keeps."""


class Policy(StageConfig):
    """Policy version 0: the base's own weights, or freshly initialised adapters or weights; one part, ``current``."""

    name = "policy"
    version = 1
    model: ModelRef
    from_scratch: bool
    lora: LoraConfig | None


class OnPolicy(StageConfig):
    """What every stage is asked that runs the transformer with the weights of a policy."""

    model: ModelRef
    lora: LoraConfig | None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the transformer computes with; weights, states, losses and the sums of gradients are float32."""


class Rollout(OnPolicy):
    """Samples of the behaviour policy: media, latents and the seeds they came from, in tar shards."""

    name = "rollout"
    version = 1
    distributed = True
    inputs = {"policy": "one", "embeddings": "one", "data": "many"}
    prompts: tuple[Prompt, ...]
    n_generation: int
    media: MediaShape
    sample: SolverConfig
    train_on: tuple[int, ...] = ()
    """Solver steps whose transitions are stored, -1 for a random other one; none for algorithms that need only latents.
    """
    use_same_seed: bool = False
    """Whether all samples of a prompt start from the same noise."""
    given_frames: tuple[int, int] = (0, 0)
    """Fewest and most latent frames of the data that videos begin with; above 0 there is one input ``data``."""
    batch_size: int
    """Samples in one forward pass; part of the identity because it changes the last bits."""
    samples_per_shard: int
    """Samples in one shard: the unit that a retry keeps."""


class Reward(StageConfig):
    """Scores of every sample of a rollout or an evaluation."""

    name = "reward"
    version = 1
    torch = False
    inputs = {"samples": "one"}
    SCORES: ClassVar[str] = "scores.parquet"
    """A row a sample: its score, or that it is not valid, and the scorer."""
    ANSWERS: ClassVar[str] = f"{RECORDS}answers.parquet"
    """A row a sample: everything else that the reward returned."""
    CALLS: ClassVar[str] = f"{RECORDS}calls.parquet"
    """A row a call of the reward: its try, how many samples failed, seconds."""
    reward: AnyReward
    scorer: str
    """The version of what computes the score: another one is asked anew."""
    reads: Literal["media", "latents"] = "media"
    """What is scored of the samples: pixels, or final latents."""
    max_attempts: int
    """Tries of a sample that fails before it is excluded."""
    max_failed_fraction: float
    """Share of excluded samples above which the stage fails."""


class Update(OnPolicy):
    """Policy k to policy k + 1 from rollouts and their scores, every schedule resolved to this range of steps."""

    name = "update"
    version = 1
    distributed = True
    inputs = {
        "policy": "one",
        "rollouts": "many",
        "behaviours": "many",
        "scores": "many",
        "embeddings": "one",
        "data": "many",
    }
    ADVANTAGES: ClassVar[str] = "advantages.parquet"
    """A row a sample: its reward, its advantage, whether it is trained on."""
    TRANSITIONS: ClassVar[str] = "transitions.parquet"
    """A row a trained transition, of algorithms that train on recorded steps."""
    gradient_checkpointing: bool
    algorithm: AnyRewarded
    reward_weights: dict[str, float]
    """Weight of each reward in the sum that trains; monitored rewards are not here."""
    sample: SolverConfig
    """How the rollouts were sampled: the grid that noise levels are drawn from, or the density of stored steps."""
    steps: OptimizerSteps
    keeps_ema: bool
    """Whether the policy has the part ``ema``."""
    old_decay: float | None
    """Of the slow copy, after this iteration; None where the algorithm has none."""
    reference: Literal["base", "kept", "renewed"] = "base"
    """Where the next version's reference comes from: the base model, this version's own part, or the new weights."""
    density: TimeDensity = TimeDensity()
    """Of the data term's noise levels, where they are drawn."""


class Finetune(OnPolicy):
    """Policy k to policy k + 1 by a range of supervised steps on a media set."""

    name = "finetune"
    version = 1
    distributed = True
    inputs = {"policy": "one", "embeddings": "one"}
    gradient_checkpointing: bool
    algorithm: AnySupervised
    dataset_digest: str = ""
    """Digest of the files that the algorithm's dataset reads, pinned by the plan; "" for a generated one."""
    media: MediaShape
    density: TimeDensity
    batch_size: int
    """Samples of one optimizer step, over all ranks."""
    steps: OptimizerSteps
    keeps_ema: bool
    """Whether the policy has the part ``ema``."""


class Export(StageConfig):
    """The policy as users load it: a diffusers LoRA, or a whole pipeline."""

    name = "export"
    version = 1
    inputs = {"policy": "one"}
    model: ModelRef
    lora: LoraConfig | None


class Evaluate(StageConfig):
    """Samples of the stock pipeline on fixed prompts and seeds, with an export loaded into it."""

    name = "evaluate"
    version = 1
    distributed = True
    inputs = {"export": "one"}
    model: ModelRef
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the transformer computes with; its matrices rest in that type."""
    prompts: tuple[Prompt, ...]
    n_generation: int
    media: MediaShape
    num_steps: int
    guidance_scale: float
    negative_prompt: str | None = None
    max_prompt_length: int
    batch_size: int
    samples_per_shard: int


class Validate(OnPolicy):
    """Diffusion loss of a policy on held-out media, at fixed noise and fixed noise levels."""

    name = "validate"
    version = 1
    distributed = True
    inputs = {"policy": "one", "embeddings": "one", "data": "one"}
    LOSSES: ClassVar[str] = "losses.parquet"
    """A row an item and noise level."""
    num_levels: int = 8
    """Noise levels of each item, the middles of as many equal parts of [0, 1]."""
    batch_size: int


class Report(StageConfig):
    """One HTML file: the reward curve, best and worst samples of each iteration, base beside final."""

    name = "report"
    version = 1
    torch = False
    inputs = {
        "rollouts": "many",
        "scores": "many",
        "updates": "many",
        "evaluations": "many",
        "evaluation_scores": "many",
    }
    PAGE: ClassVar[str] = "index.html"
    title: str
    reward: str
    groups_shown: int = 2


_STAGES = (Embed, Encode, Policy, Rollout, Reward, Update, Finetune, Export, Evaluate, Validate, Report)
STAGES: dict[str, type[StageConfig]] = {stage.name: stage for stage in _STAGES}
