"""The stages' settings, inputs and file names.

An artifact's **content** is the digest of its result bytes. It is current for a Request if both have equal recipes
(:mod:`stages.artifacts.request`) and inputs with equal contents.
"""

from typing import ClassVar, Literal

from pydantic import Field

from cosmos_rl_core.algorithms._foreign import Foreign
from cosmos_rl_core.config.early_warning import Limit
from cosmos_rl_core.config.policy import LoraConfig, SolverConfig, TimeDensity
from cosmos_rl_core.config.shared import Decoding, Init, MediaShape, ModelRef, Split, StageConfig, Trains
from cosmos_rl_core.config.train import AnyDataset, AnyReward, AnyRewarded, AnySupervised, Gate
from cosmos_rl_core.datasets._base import Prompt
from stages.dataset_contracts import RECORDS, Caption, Describe, Index, References

INDEX = "index"
"""The part of generated samples that describes them: prompts, seeds, noise levels. It is never deleted."""
MEDIA = "media"
"""The part of generated samples with their pictures or videos."""
TENSORS = "tensors"
"""The part of a rollout with final latents and recorded steps, which updates read."""
_DATA: dict[str, Literal["one", "many"]] = dict.fromkeys(("embeddings", "data", "parts", "captions"), "many")
"""Roles of prepared data: text embeddings, latents, and the dataset's parts and captions, which describe them."""
METRICS = "metrics.parquet"
"""One row per optimizer step; every stage that trains writes it."""


class Embed(StageConfig):
    """Text embeddings of ``prompts``, or of the captions that the last of the input ``parts`` adds to a dataset.

    Each text has one file, in a pool that all runs of a store share."""

    name = "embed"
    elastic = True
    version = 3
    distributed = True
    inputs = {"parts": "many", "captions": "many"}
    model: ModelRef
    media: MediaShape | None = Field(default=None, json_schema_extra={"neutral": None})
    """Size of the media that prompts with references are encoded for; None without references."""
    prompts: tuple[Prompt, ...] = ()
    """The prompts. The negative prompt (for guidance) and the empty prompt (for text dropout) are added to them."""
    negative_prompt: str | None = None
    """The negative prompt; None means the default of the stock pipeline's call."""
    max_prompt_length: int
    prefixed: bool = False
    """Whether the stored embeddings are outputs of the base's first, frozen module."""


class Encode(StageConfig):
    """Latents of a media set, made once: one safetensors file per item, in tar shards.

    With input ``parts``, latents of the media that the last part adds to a dataset and that ``later`` parts keep.
    """

    name = "encode"
    elastic = True
    version = 2
    distributed = True
    inputs = {"parts": "many", "later": "many"}
    model: ModelRef
    dataset: AnyDataset | None = None
    """The media set; None if the media come from ``parts``."""
    dataset_digest: str = ""
    """Digest of the files that the media set reads, pinned by the plan; "" for a generated one."""
    sources: dict[str, AnyDataset] = Field(default={}, json_schema_extra={"neutral": {}})
    """Plugins that open the media of ``parts``, by the names of the sources. A file that changed since it was indexed
    is refused."""
    windows: int = Field(default=1, json_schema_extra={"neutral": 1})
    """Number of clips, evenly spaced, that are cut from each medium of ``parts``."""
    fps: float | None = Field(default=None, json_schema_extra={"neutral": None})
    """Frames per second of the clips of ``parts``; None takes every frame."""
    media: MediaShape
    buckets: tuple[tuple[int, int], ...] = Field(default=(), json_schema_extra={"neutral": []})
    """Pairs of height and width. Each medium of ``parts`` is cropped to the pair nearest to its own aspect ratio; if
    there are none, to the size of ``media``."""
    deviations: bool = Field(default=False, json_schema_extra={"neutral": False})
    """Whether the standard deviation of the VAE's posterior is stored with its mode."""
    items_per_shard: int = 64
    """Items in one shard: the unit that a retry keeps."""


class Policy(StageConfig):
    """Policy version 0 in the part ``current``: weights of the base or of ``init``, fresh adapters or weights."""

    name = "policy"
    version = 1
    inputs = {"init": "many"}
    model: ModelRef
    from_scratch: bool
    lora: LoraConfig | None
    init: Init | None = Field(default=None, json_schema_extra={"neutral": None})
    stacked: bool = Field(default=False, json_schema_extra={"neutral": False})
    """Whether a fresh adapter is trained on top of ``init``'s, which is then a frozen part."""
    keeps_base: bool = Field(default=False, json_schema_extra={"neutral": False})
    """Whether the base is also written, as the part ``reference``; needed if ``current`` does not begin as the base."""


class OnPolicy(StageConfig):
    """The settings of every stage that runs the transformer with the weights of a policy."""

    model: ModelRef
    lora: LoraConfig | None
    below: LoraConfig | None = Field(default=None, json_schema_extra={"neutral": None})
    """Settings of a frozen adapter below the trained one, whose tensors are the input ``init``."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the transformer computes in; weights, states, losses and sums of gradients are float32."""
    data_split: Split | None = Field(default=None, json_schema_extra={"neutral": None})
    """Side of the train and held-out split whose media of ``parts`` are read; None reads all."""


class Samples(StageConfig):
    """The settings of every stage that generates samples."""

    model: ModelRef
    prompts: tuple[Prompt, ...]
    n_generation: int
    """Samples of each prompt."""
    media: MediaShape
    batch_size: int
    """Samples in one forward pass. Part of the identity, because it changes the last bits."""
    samples_per_shard: int
    """Samples in one shard: the unit that a retry keeps."""


class Rollout(OnPolicy, Samples):
    """Samples of the behaviour policy: media, final latents, recorded steps and seeds."""

    name = "rollout"
    elastic = True
    version = 4
    distributed = True
    inputs = {"policy": "one", "init": "many", **_DATA}
    sample: SolverConfig
    train_on: tuple[int, ...] = ()
    """Solver steps whose transitions are stored; each -1 is one more step, drawn at random. Empty if only final latents
    are needed."""
    use_same_seed: bool = False
    """Whether all samples of a prompt start from the same noise."""
    given_frames: tuple[int, int] = (0, 0)
    """Fewest and most latent frames that a video takes from the data as its beginning. The input ``data`` is needed if
    the greater number is above 0."""
    decoding: Decoding = Field(default=Decoding(), json_schema_extra={"neutral": {}})
    """Which samples are decoded, and how."""


class Decode(StageConfig):
    """Decoded media of a rollout's samples, in the rollout's units, with the samples' rows of the index."""

    name = "decode"
    elastic = True
    version = 1
    distributed = True
    inputs = {"samples": "one"}
    model: ModelRef
    media: MediaShape
    decoding: Decoding
    batch_size: int
    """Samples that the VAE decodes at once; fewer if they are large."""
    undecoded_only: bool = Field(default=True, json_schema_extra={"neutral": True})
    """Whether samples that the rollout decoded are left out; False once their media were deleted."""


class Reward(StageConfig):
    """Scores of every sample of a rollout or an evaluation."""

    name = "reward"
    elastic = True
    version = 2
    torch = False
    inputs = {"samples": "one", "decoded": "many"}
    SCORES: ClassVar[str] = "scores.parquet"
    """One row per sample: its score, or that it is not valid, and the scorer."""
    ANSWERS: ClassVar[str] = f"{RECORDS}answers.parquet"
    """One row per sample: all other values that the reward returned, or its error."""
    CALLS: ClassVar[str] = f"{RECORDS}calls.parquet"
    """One row per call of the reward: number of the try, failed samples, seconds."""
    reward: AnyReward
    scorer: str
    """Version of the scorer. Another version is another recipe: samples are scored again."""
    reads: Literal["media", "latents"] = "media"
    """Part of the samples that is scored: pixels (``media``) or final latents."""
    max_attempts: int
    """Number of tries of a failing sample before it is excluded."""
    max_failed_fraction: float
    """Share of excluded samples above which the stage fails."""


class Judge(Reward):
    """The scores of :class:`Reward` from a reward that needs torch; the ranks share the samples."""

    name = "judge"
    version = 2
    distributed = True
    torch = True

    @property
    def param_dtype(self) -> str:
        """Return the type that the reward computes in."""
        return getattr(self.reward, "param_dtype", "float32")


class Warn(StageConfig):
    """The distance of a rollout's scores from iteration 0, and the limits that they exceed."""

    name = "warn"
    version = 4
    torch = False
    inputs = {"samples": "one", "scores": "many", "first": "many"}
    EVIDENCE: ClassVar[str] = "evidence.json"
    """The estimates of every score, and the limits that tripped. People approve it by its digest."""
    PAGE: ClassVar[str] = f"{RECORDS}warning.html"
    """The limits that tripped, with the samples that exceed them most; written if any limit tripped."""
    rewards: tuple[str, ...]
    """The reward of each of the inputs ``scores`` and ``first``, in their order."""
    limits: tuple[Limit, ...]


class Training(OnPolicy, Trains):
    """The settings of every stage that trains the transformer."""

    posterior: Literal["mode", "sample"] = Field(default="mode", json_schema_extra={"neutral": "mode"})
    """Whether latents of media are the mode of their posterior, or drawn from it in each pass."""


class Update(Training):
    """Training of policy k to policy k + 1 on rollouts and their scores, with schedules resolved for its steps."""

    name = "update"
    version = 3
    distributed = True
    inputs = {"policy": "one", "init": "many", "rollouts": "many", "behaviours": "many", "scores": "many", **_DATA}
    ADVANTAGES: ClassVar[str] = "advantages.parquet"
    """One row per sample: rollout, reward, advantage, whether it trains, and the samples that it beats in pairs."""
    TRANSITIONS: ClassVar[str] = "transitions.parquet"
    """One row per trained transition; written by algorithms that train on recorded steps."""
    HELD_BACK: ClassVar[str] = "prompts_held_back"
    """Key of the summary: the number of prompts none of whose samples passes the gates; left out if it is 0."""
    algorithm: AnyRewarded
    reward_weights: dict[str, float]
    """Weight of each reward in the sum that is trained on; rewards that are only monitored have none."""
    gates: dict[str, Gate] = Field(default={}, json_schema_extra={"neutral": {}})
    """Bounds on scores, by the label of the reward; they decide which samples count in training."""
    sample: SolverConfig
    """The sampler of the rollouts. It gives the grid that noise levels are drawn from, or the probability density of
    stored steps."""
    old_decay: float | None
    """Decay of the slow copy ``old`` after this iteration; None if the algorithm has no such copy."""
    reference: Literal["base", "kept", "renewed"] = "base"
    """Reference of the next version: the base model, this version's part ``reference``, or the new weights."""
    density: TimeDensity = TimeDensity()
    """Density of the data term's noise levels, if they are drawn."""
    foreign: Foreign | None = Field(default=None, json_schema_extra={"neutral": None})
    """Settings for stored rollouts that another policy made; None for the run's own rollouts."""


class Finetune(Training):
    """Training of policy k to policy k + 1, by supervised steps on a media set."""

    name = "finetune"
    version = 4
    distributed = True
    inputs = {"policy": "one", "init": "many", **_DATA}
    algorithm: AnySupervised
    weights: dict[str, float] = Field(default={}, json_schema_extra={"neutral": {}})
    """Shares of samples from each source of a prepared dataset; without any, items are drawn equally often."""
    media: MediaShape
    density: TimeDensity
    batch_size: int
    """Samples of one optimizer step, over all ranks."""


class Export(StageConfig):
    """The policy as users load it: a diffusers LoRA, or a whole pipeline."""

    name = "export"
    version = 2
    inputs = {"policy": "one", "init": "many"}
    model: ModelRef
    lora: LoraConfig | None
    below: LoraConfig | None = Field(default=None, json_schema_extra={"neutral": None})
    """Settings of a frozen adapter below the trained one, whose tensors are the input ``init``."""


class Evaluate(Samples):
    """Samples of the stock pipeline on fixed prompts and seeds, with an export loaded into it."""

    name = "evaluate"
    elastic = True
    version = 4
    distributed = True
    inputs = {"export": "one"}
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the transformer computes in; its matrices are held in that type."""
    num_steps: int
    guidance_scale: float
    negative_prompt: str | None = None
    max_prompt_length: int


class Validate(OnPolicy):
    """Diffusion loss of a policy on held-out media, at fixed noise and fixed noise levels."""

    name = "validate"
    elastic = True
    version = 3
    distributed = True
    measures = "formats.losses"
    inputs = {"policy": "one", "init": "many", **_DATA}
    LOSSES: ClassVar[str] = "losses.parquet"
    """One row per item and noise level, with the medium that the item is a clip of."""
    num_levels: int = 8
    """Noise levels of each item: the midpoints of this many equal parts of [0, 1]."""
    batch_size: int


CONTRACTS: tuple[type[StageConfig], ...] = (
    *(Index, Caption, Describe, References, Embed, Encode, Policy, Rollout, Decode, Reward, Judge, Warn),
    *(Update, Finetune, Export, Evaluate, Validate),
)
