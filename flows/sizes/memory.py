"""Memory that a rank of each stage needs, from shapes and settings alone."""

import math
from collections.abc import Collection, Iterable, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.pipelines.memory import (
    CHECKSUM_BYTES,
    CHECKSUM_WORDS,
    HALF_BYTES,
    Bytes,
    Shapes,
    Spread,
    halved,
    in_half,
    is_matrix,
    resting,
    visiting,
)
from cosmos_rl_core.vlms import _folders
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, EMA, OLD, REFERENCE, cut
from cosmos_rl_core.weights.shapes import component_shapes, count_elements, file_shapes, trainable_shapes, weight_shapes
from flows.sizes import costs
from flows.sizes.activations import TRAINING, micro_batch, peaks, tile
from flows.sizes.basis import PLAIN, Basis
from stages.formats.members import KEPT_BYTES
from stages.generating.plans import TILES_AHEAD

PARTS = (OLD, EMA, REFERENCE, BEHAVIOUR)
"""Copies of the trainable weights, each as large as these."""
TRANSFORMER, OTHERS = "transformer", "other components"
GRADIENTS, OPTIMIZER = "gradients", "optimizer"
SAMPLES, BATCH, VISITING = "samples", "micro-batch", "gathered or cast"
IN_PASSING = "largest tensor twice"
SCORER = "weights of the scorer"
ACTIVATIONS, VAE = "activations", "VAE at work"
READ = "read on the CPU"
"""Weights of the pipeline in the CPU's memory, whole and in float32, before they are copied to a GPU."""
STAYS = "kept between stages"
"""Frozen weights of other stages in a process that stays."""
ALLOWANCE = "allowance"
"""Memory of each GPU that is set aside for CUDA, NCCL and the allocator, which are not counted exactly."""
STEP = "optimizer's buffers"
MODEL, LOGITS, READING, COPY = "model", "logits", "tensor of the base", "copy to be written"
"""Parts of the memory of models of transformers. A rank maps one tensor of the base at a time."""
AS_READ = "transformer in float32"
"""The transformer before its frozen matrices are cast to the half type in which they stay between passes."""
GATHERED = "files to be written"
"""Tensors that a rank gathers for files of a policy, and the bytes of the file that it writes."""
_KEPT = (TRANSFORMER, MODEL, OTHERS, *PARTS, OPTIMIZER, SCORER, STAYS, ALLOWANCE)
_WORKING = (*_KEPT, GRADIENTS, SAMPLES, BATCH, LOGITS)
READING_BASE, PASS, UPDATE, DECODING, WRITING = "reading", "pass", "step", "VAE", "writing"
MOMENTS: dict[str, tuple[str, ...]] = {
    READING_BASE: (TRANSFORMER, MODEL, OTHERS, SCORER, STAYS, ALLOWANCE, AS_READ, READ, READING),
    PASS: (*_WORKING, VISITING, ACTIVATIONS),
    UPDATE: (*_WORKING, STEP),
    DECODING: (*_WORKING, VAE),
    WRITING: (*_KEPT, GATHERED, IN_PASSING, COPY),
}
"""Moments of a stage, one after the other, and the kinds of memory that are held then: while weights are read, in a
pass through the transformer, in the optimizer's step, while the VAE works, and while files are written."""
ROWS = tuple(dict.fromkeys(chain.from_iterable(MOMENTS[n] for n in (PASS, UPDATE, DECODING, READING_BASE, WRITING))))
"""Kinds of memory."""

CONTEXT_BYTES = 2**30
"""Allowance for CUDA's context, its kernels, and the workspaces of cuBLAS and cuDNN."""
COLLECTIVES_BYTES = 2**29
"""Allowance for the buffers of NCCL, where a stage has several ranks."""
FRAGMENTED = 0.05
"""Allowance for blocks that the allocator rounds up or cannot use: a share of the peak."""
MOMENTS_KEPT = 2
"""Averages that Adam and AdamW keep of every trainable number."""

Rows = dict[str, Bytes]
"""Bytes of one rank by the kinds of :data:`ROWS`."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a stage."""

    stage: str
    ranks: int
    rows: Rows
    nodes: int = 1
    """Number of machines over which the ranks are spread evenly."""

    @property
    def peak(self) -> Bytes:
        """Return the largest number of bytes held at any moment, for the device and for the CPU."""
        every = self.moments.values()
        return Bytes(max(held.device for held in every), max(held.cpu for held in every))

    @property
    def moment(self) -> str:
        """Return the name of the moment at which the device holds the most bytes."""
        return max(self.moments, key=lambda name: self.moments[name].device)

    @cached_property
    def moments(self) -> dict[str, Bytes]:
        """Return the bytes held at each moment of :data:`MOMENTS`."""
        return {moment: sum(self.rows_at(moment).values(), Bytes()) for moment in MOMENTS}

    def as_json(self) -> dict[str, Any]:
        """Return the fields, the peak and its moment, and the bytes held at each moment."""
        moments = {moment: asdict(held) for moment, held in self.moments.items()}
        return asdict(self) | {"peak": asdict(self.peak), "moment": self.moment, "moments": moments}

    def rows_at(self, moment: str) -> Rows:
        """Return the bytes held at a moment, by kind."""
        # While weights are read in float32, they are not yet cast.
        absent = TRANSFORMER if moment == READING_BASE and AS_READ in self.rows else None
        return {name: self.rows[name] for name in MOMENTS[moment] if name in self.rows and name != absent}


LOADING = ("embed", "encode", "rollout", "decode", "judge", "update", "finetune", "validate", "export", "evaluate")
"""Stages that load weights of the pipeline or of a scorer. For the pipeline, a method of the same name counts them."""


def stages(
    recipe: Recipe,
    kinds: Iterable[str],
    basis: Basis = PLAIN,
    *,
    activations: bool = False,
) -> list[StageMemory]:
    """Return the memory of the stages :data:`LOADING` among ``kinds``.

    ``activations`` adds the memory of :mod:`flows.sizes.activations`, counted for all stages in one process with torch.
    """
    model = _Model(recipe, basis)
    found = [kind for kind in dict.fromkeys(kinds) if kind in LOADING]
    ranks = {kind: recipe.launch.processes_of(kind) for kind in found} | {"export": 1}
    rows = {kind: _judge(recipe) if kind == "judge" else getattr(model, kind)() for kind in found}
    if on_gpus(recipe.launch):
        for kind in found:
            rows[kind] |= {READ: Bytes(cpu=_read(model, kind))}
    if activations:
        for kind, (at_work, by_vae) in peaks(recipe, found, basis).items():
            rows[kind] |= {ACTIVATIONS: Bytes(at_work), VAE: Bytes(by_vae)}
    nodes = {kind: 1 if kind == "export" else recipe.launch.nodes_of(kind) for kind in found}
    counted = [StageMemory(kind, ranks[kind], rows[kind], nodes[kind]) for kind in found]
    kept = recipe.launch.kept_bytes
    return [_with_allowance(_with_kept(stage, kept)) for stage in counted] if on_gpus(recipe.launch) else counted


def on_gpus(launch: LaunchConfig) -> bool:
    """Return whether the profile says that ranks compute on GPUs."""
    names = launch.gpus or launch.stage_gpus or launch.launcher != "local"
    return launch.device == "cuda" or (launch.device is None and bool(names))


def _with_kept(stage: StageMemory, kept_bytes: int) -> StageMemory:
    """Add all bytes that a process may keep: it drops other stages' weights only after it has read its own."""
    if not stage.peak.device or not kept_bytes:
        return stage
    return replace(stage, rows=stage.rows | {STAYS: Bytes(kept_bytes)})


def _with_allowance(stage: StageMemory) -> StageMemory:
    if not stage.peak.device:
        return stage
    allowed = CONTEXT_BYTES + COLLECTIVES_BYTES * (stage.ranks > 1) + int(FRAGMENTED * stage.peak.device)
    return replace(stage, rows=stage.rows | {ALLOWANCE: Bytes(allowed)})


def scorers(recipe: Recipe) -> list[RewardOptions]:
    """Return the rewards with torch, which the stage ``judge`` loads one after the other."""
    return [reward.fn for reward in recipe.rewards if reward.fn.facts.torch]


def weight_bytes(options: RewardOptions) -> int | None:
    """Return the bytes of a scorer's weights in memory, from the headers of its files; None if it names no folder."""
    folders = [folder for name in options.facts.weights if (folder := getattr(options, name, None))]
    paths = [_folders.resolve(folder) for folder in folders]
    files = [Path(path, file) for path in paths for file in _folders.weight_files(path)]
    held = HALF_BYTES if getattr(options, "param_dtype", "float32") == "bfloat16" else sizes.FLOAT32_BYTES
    return held * sum(count_elements(file_shapes([file])) for file in files) if files else None


def _judge(recipe: Recipe) -> Rows:
    """Count the weights of the largest scorer. Its activations are not known."""
    known = [size for options in scorers(recipe) if (size := weight_bytes(options)) is not None]
    return {SCORER: Bytes(max(known, default=0))}


@dataclass(frozen=True)
class _Model:
    """A recipe with the shapes of its transformer."""

    recipe: Recipe
    basis: Basis

    @cached_property
    def path(self) -> str:
        return costs.base_path(self.recipe)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return weight_shapes(self.path)

    @cached_property
    def trained(self) -> Shapes:
        return trainable_shapes(self.shapes, self.recipe.policy.lora)

    def embed(self) -> Rows:
        """Count the text encoders, and with references the VAE and image encoder, which read pictures."""
        return self.holding("text_encoder", *(("vae", "image_encoder") if self.basis.pictures else ()))

    def encode(self) -> Rows:
        """Count the VAE."""
        return self.holding("vae")

    decode = encode

    def rollout(self) -> Rows:
        """Count the behaviour weights, the VAE, and the recorded states of one batch of samples."""
        batch = tile(self.recipe)
        rows = self._forward(self._spread("rollout"), batch, guided=self._guided)
        rows[BATCH] += Bytes(batch * costs.sample_bytes(self.recipe))
        # Pixels that wait to be encoded while the next samples are made.
        rows[SAMPLES] = Bytes(cpu=(TILES_AHEAD + 1) * batch * costs.pixel_bytes(self.recipe))
        return rows | self.holding("vae")

    def validate(self) -> Rows:
        """Count a forward pass without guidance."""
        return self._forward(self._spread("validate"), self._held_out_batch)

    def export(self) -> Rows:
        """Count one tensor twice: its bytes in the file, and its numbers."""
        largest = max(map(math.prod, self.trained.values()))
        return {IN_PASSING: Bytes(cpu=2 * sizes.FLOAT32_BYTES * largest)}

    def evaluate(self) -> Rows:
        """Count the whole stock pipeline. Guidance doubles its batch; its matrices are in the computation's dtype."""
        spread = Spread(half=self._half)
        rows = self._forward(spread, self._held_out_batch * (1 + self._guided))
        rows |= self.holding("vae", "text_encoder")
        rows.pop(AS_READ, None)  # The pipeline is read a tensor at a time.
        if not self._half:
            return rows
        kept = directories.spec(self.path).float32_modules
        held = in_half(self.shapes, kept) + sum(in_half(shapes, kept) for shapes in _adapters(self))
        return rows | {TRANSFORMER: Bytes(held), VISITING: Bytes()}

    def update(self) -> Rows:
        """Count training, with the parts that the algorithm compares with or keeps, and the samples that are read."""
        needs, train = costs.needs_of(self.recipe), self.recipe.train
        carried = costs.policy_parts(self.recipe)
        parts = {*needs.roles, *carried}
        if train.staleness == 0 and needs.behaviour != CURRENT and needs.behaviour in carried:
            # The behaviour is another part as well: one copy serves as both.
            parts.discard(BEHAVIOUR)
        parts |= set[str]() if self.basis.generates else {BEHAVIOUR}
        # Samples are read when they are drawn, and the last ones stay in memory.
        read = min(train.train_batch_per_replica * costs.sample_bytes(self.recipe), KEPT_BYTES)
        return self._training("update", parts, guided=self._guided) | {SAMPLES: Bytes(cpu=read)}

    def finetune(self) -> Rows:
        """Count training with the parts that are kept."""
        return self._training("finetune", costs.policy_parts(self.recipe).keys(), guided=False)

    def holding(self, *prefixes: str) -> Rows:
        """Count the components whose names begin with one of ``prefixes``, in float32."""
        index = directories.read_json(self.path, directories.INDEX)
        wanted = {name: value for name, value in index.items() if name.startswith(prefixes)}
        names = [name for name, value in wanted.items() if isinstance(value, list) and value[0]]
        elements = sum(count_elements(component_shapes(self.path, name)) for name in names)
        return {OTHERS: Bytes(sizes.FLOAT32_BYTES * elements)}

    @property
    def _held_out_batch(self) -> int:
        assert self.recipe.validation is not None
        return self.recipe.validation.batch_size

    @property
    def _guided(self) -> bool:
        return self.recipe.policy.diffusers.sample.guidance_scale != 1

    @property
    def _half(self) -> bool:
        return self.recipe.train.param_dtype == "bfloat16"

    def _spread(self, stage: str) -> Spread:
        return Spread(self.recipe.launch.parallelism_of(stage), half=self._half)

    def _transformer(self, spread: Spread) -> Bytes:
        """Count frozen matrices in the half type of the computation, and all other weights in float32."""
        kept = directories.spec(self.path).float32_modules
        half = spread.half and self.recipe.policy.lora is not None
        base = resting(self.shapes, spread, halved(kept, is_matrix)) if half else resting(self.shapes, spread)
        return sum((resting(shapes, spread) for shapes in _adapters(self)), base)

    def _batch(self, size: int, num_states: int, *, guided: bool) -> Bytes:
        """Count ``num_states`` tensors of the latents' size for each sample, and its conditioning."""
        diffusers = self.recipe.policy.diffusers
        latents = sizes.latent_elements(self.path, diffusers.inference_size, diffusers.train_frames)
        given = (1 + guided) * costs.text_bytes(self.recipe) + costs.reference_bytes(self.recipe, self.basis.pictures)
        return Bytes(size * (sizes.FLOAT32_BYTES * num_states * latents + given))

    def _forward(self, spread: Spread, batch: int, *, guided: bool = False) -> Rows:
        """Count a stage that trains nothing: a sample's state, noise, estimate and velocity, two if guided."""
        return _as_read(self, spread) | {
            TRANSFORMER: self._transformer(spread),
            BATCH: self._batch(batch, 4 + guided, guided=guided),
            VISITING: _visiting(self, spread, backward=False),
        }

    def _training(self, stage: str, parts: Set[str], *, guided: bool) -> Rows:
        """Count a stage with an optimizer: a sample's latents, noise, state, target, and a velocity from each part."""
        spread = self._spread(stage)
        trained = resting(self.trained, spread)
        checkpointing = self.recipe.policy.model_gradient_checkpointing is True
        copies: Rows = {part: trained for part in PARTS if part in parts}
        return (
            _as_read(self, spread)
            | copies
            | {
                TRANSFORMER: self._transformer(spread),
                GRADIENTS: trained,
                OPTIMIZER: trained * MOMENTS_KEPT,
                BATCH: self._batch(micro_batch(self.recipe, self.basis.pictures), 5 + len(copies), guided=guided),
                VISITING: _visiting(self, spread, backward=True, checkpointing=checkpointing),
                GATHERED: to_be_written(self.trained, self.recipe.launch, stage),
                # A buffer as large as the gradients, for their all-reduce or for torch's fused loops.
                STEP: trained,
            }
        )


def _as_read(model: _Model, spread: Spread) -> Rows:
    """Count a whole base that is cast after it was read. Ranks that shard it read their rows in the half type."""
    if not spread.half or model.recipe.policy.lora is None or spread.parallelism.dp_shard_size > 1:
        return {}
    return {AS_READ: sum((resting(shapes, spread) for shapes in _adapters(model)), resting(model.shapes, spread))}


def _visiting(model: _Model, spread: Spread, *, backward: bool, checkpointing: bool = False) -> Bytes:
    """Count matrices gathered or cast in a pass. Whole frozen matrices were cast before; autocast casts adapters."""
    lora = model.recipe.policy.lora is not None
    if lora and spread.parallelism.dp_shard_size == 1:
        factors = sum(count_elements(shapes) for shapes in _adapters(model))
        return Bytes(HALF_BYTES * factors * spread.half)
    found = visiting(model.shapes, spread, backward=backward, all_train=not lora, checkpointing=checkpointing)
    return Bytes(found)


def to_be_written(trained: Shapes, launch: LaunchConfig, stage: str, tables: Collection[str] = ()) -> Bytes:
    """Count the memory that a rank adds when it writes the largest part of a policy, the optimizer's state.

    Ranks compare checksums first. Ranks that shard matrices then gather a file each, and tensors for others' files. The
    CPU holds the bytes of a file, and its tensors too if these are on a GPU. ``tables`` are never sharded.
    """
    ranks, shards = launch.processes_of(stage), launch.parallelism_of(stage).dp_shard_size
    state = {f"{moment}.{name}": shape for moment in range(MOMENTS_KEPT) for name, shape in trained.items()}
    whole = {name: sizes.FLOAT32_BYTES * math.prod(shape) for name, shape in state.items()}
    shared = {
        name: shards > 1 and is_matrix(name, shape) and name.partition(".")[2] not in tables
        for name, shape in state.items()
    }
    files = cut(whole)
    gathered = max(sum(whole[name] for name in names if shared[name]) for names in files)
    another = max(whole[name] * shared[name] for name in whole)
    words = max(math.prod(shape) // (shards if shared[name] else 1) for name, shape in state.items())
    checked = CHECKSUM_BYTES * min(words, CHECKSUM_WORDS) * (ranks > 1)
    bytes_of_file = max(sum(whole[name] for name in names) for names in files)
    return Bytes(max(checked, gathered + another), (1 + on_gpus(launch)) * bytes_of_file)


def _adapters(model: _Model) -> list[Shapes]:
    """Return the shapes of the frozen adapter and of the trained one, if they exist."""
    settings = (model.basis.below, model.recipe.policy.lora)
    return [trainable_shapes(model.shapes, adapter) for adapter in settings if adapter is not None]


def _read(model: _Model, kind: str) -> int:
    """Count the bytes of weights that a rank holds in the CPU's memory before it copies them to its device.

    Sharded weights are read by rows, and the stock pipeline a tensor at a time, straight to the device.
    """
    parts = {"embed": "text_encoder", "encode": "vae", "decode": "vae", "rollout": "vae"}
    others = model.holding(parts[kind])[OTHERS].device if kind in parts else 0
    if kind not in (*TRAINING, "rollout", "validate"):
        return others
    is_whole = model.recipe.launch.parallelism_of(kind).dp_shard_size == 1
    return others + sizes.FLOAT32_BYTES * count_elements(model.shapes) * is_whole
