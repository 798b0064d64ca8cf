"""Memory that a rank of each stage needs, from shapes and settings alone."""

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import cached_property

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.pipelines.memory import (
    Bytes,
    Shapes,
    Spread,
    in_half,
    resting,
    visiting,
)
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, EMA, OLD, REFERENCE
from flows.planning import costs
from stages.formats.members import KEPT_BYTES

PARTS = (OLD, EMA, REFERENCE, BEHAVIOUR)
"""Copies of the trainable weights, each of their size."""
TRANSFORMER, OTHERS, GRADIENTS, OPTIMIZER = "transformer", "other components", "gradients", "optimizer"
SAMPLES, BATCH, VISITING = "samples", "micro-batch", "gathered or cast"
IN_PASSING = "largest tensor twice"
STEP = "optimizer's buffers"
ROWS = (TRANSFORMER, OTHERS, *PARTS, GRADIENTS, OPTIMIZER, SAMPLES, BATCH, IN_PASSING, VISITING, STEP)
"""Kinds of memory. The last two are never held at the same time."""

MOMENTS = 2
"""Averages that Adam and AdamW keep of every trainable number."""

Rows = dict[str, Bytes | None]
"""Bytes of one rank by the kinds of :data:`ROWS`; None if no file states the size."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a stage."""

    stage: str
    ranks: int
    rows: Rows

    @property
    def peak(self) -> Bytes:
        """Return the sum of all known rows, with the larger of the forward's and the optimizer step's buffers."""
        known = {name: held for name, held in self.rows.items() if held is not None}
        work, step = known.get(VISITING, Bytes()), known.get(STEP, Bytes())
        always = sum((held for name, held in known.items() if name not in (VISITING, STEP)), Bytes())
        return always + Bytes(max(work.device, step.device), max(work.cpu, step.cpu))


def stages(recipe: Recipe, kinds: Iterable[str]) -> list[StageMemory]:
    """Return the memory of the stages among ``kinds`` that load a part of the pipeline or read its weights."""
    model = _Model(recipe)
    found = {kind: _ROWS_OF[kind](model) for kind in dict.fromkeys(kinds) if kind in _ROWS_OF}
    ranks = {kind: recipe.launch.processes_of(kind) for kind in found} | {"export": 1}
    return [StageMemory(kind, ranks[kind], rows) for kind, rows in found.items()]


@dataclass(frozen=True)
class _Model:
    """A recipe with the shapes of its transformer."""

    recipe: Recipe

    @cached_property
    def path(self) -> str:
        return directories.resolve_path(self.recipe.policy.model_name_or_path)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return sizes.weight_shapes(self.path)

    @cached_property
    def trained(self) -> Shapes:
        return sizes.trainable_shapes(self.shapes, self.recipe.policy.lora)

    @cached_property
    def latents(self) -> tuple[int, int, int, int] | None:
        diffusers = self.recipe.policy.diffusers
        return sizes.latent_shape(self.path, diffusers.inference_size, diffusers.train_frames)

    def rollout(self) -> Rows:
        """Count the behaviour weights, the VAE, and the recorded states of one batch of samples."""
        rollout, recorded = self.recipe.rollout, costs.sample_bytes(self.recipe)
        batch = min(rollout.n_generation_mini_batch, rollout.samples_per_shard)
        rows = self._forward(self._spread("rollout"), batch, guided=self._guided)
        held = rows[BATCH]
        rows[BATCH] = None if held is None or recorded is None else held + Bytes(batch * recorded)
        return rows | self.holding("vae")

    def validate(self) -> Rows:
        """Count a forward without guidance."""
        return self._forward(self._spread("validate"), self._held_out_batch)

    def export(self) -> Rows:
        """Count one tensor twice: its bytes in the file, and its numbers."""
        largest = max(map(math.prod, self.trained.values()))
        return {IN_PASSING: Bytes(cpu=2 * sizes.FLOAT32_BYTES * largest)}

    def evaluate(self) -> Rows:
        """Count the whole stock pipeline. Guidance doubles its batch; its matrices rest in the type of the compute."""
        spread = Spread(half=self._half)
        rows = self._forward(spread, self._held_out_batch * (1 + self._guided)) | self.holding("vae", "text_encoder")
        if not self._half:
            return rows
        adapters = {} if self.recipe.policy.lora is None else self.trained
        kept = directories.spec(self.path).float32_modules
        held = in_half(self.shapes, kept) + in_half(adapters, kept)
        return rows | {TRANSFORMER: Bytes(held), VISITING: Bytes()}

    def update(self) -> Rows:
        """Count training with the parts that the algorithm compares with or keeps, and the samples that it reads."""
        needs, train, each = costs.needs_of(self.recipe), self.recipe.train, costs.sample_bytes(self.recipe)
        carried = costs.policy_parts(self.recipe)
        parts = {*needs.roles, *carried}
        if train.staleness == 0 and needs.behaviour != CURRENT and needs.behaviour in carried:
            # One copy serves under both names.
            parts.discard(BEHAVIOUR)
        rows = self._training("update", parts, guided=self._guided)
        # Samples are read when they are drawn, and the last ones read are kept.
        rows[SAMPLES] = None if each is None else Bytes(cpu=min(train.train_batch_per_replica * each, KEPT_BYTES))
        return rows

    def finetune(self) -> Rows:
        """Count training, and the VAE that encodes media when they are drawn."""
        return self._training("finetune", set(costs.policy_parts(self.recipe)), guided=False) | self.holding("vae")

    def holding(self, *prefixes: str) -> Rows:
        """Count the components whose names begin with one of ``prefixes``, in float32."""
        index = directories.read_json(self.path, directories.INDEX)
        names = [
            name
            for name, value in index.items()
            if name.startswith(prefixes) and isinstance(value, list) and value[0] is not None
        ]
        elements = sum(sizes.elements(sizes.component_shapes(self.path, name)) for name in names)
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
        base = resting(self.shapes, spread)
        return base if self.recipe.policy.lora is None else base + resting(self.trained, spread)

    @property
    def _text_elements(self) -> int:
        policy = self.recipe.policy
        return sizes.embedding_elements(self.path, policy.diffusers.max_prompt_length, policy.lora)

    def _batch(self, size: int, num_states: int, *, guided: bool) -> Bytes | None:
        """Count ``num_states`` tensors of the latents' size for each sample, and its text embeddings."""
        if self.latents is None:
            return None
        elements = num_states * math.prod(self.latents) + (1 + guided) * self._text_elements
        return Bytes(sizes.FLOAT32_BYTES * size * elements)

    def _forward(self, spread: Spread, batch: int, *, guided: bool = False) -> Rows:
        """Count a stage that trains nothing: state, noise, estimate and velocity of each sample, one more if guided."""
        all_train = self.recipe.policy.lora is None
        return {
            TRANSFORMER: self._transformer(spread),
            BATCH: self._batch(batch, 4 + guided, guided=guided),
            VISITING: Bytes(visiting(self.shapes, spread, backward=False, all_train=all_train)),
        }

    def _training(self, stage: str, parts: Set[str], *, guided: bool) -> Rows:
        """Count a stage with an optimizer: latents, noise, state and target of each sample, one velocity a part."""
        policy, spread = self.recipe.policy, self._spread(stage)
        trained, all_train = resting(self.trained, spread), policy.lora is None
        checkpointing = policy.model_gradient_checkpointing
        at_work = visiting(self.shapes, spread, backward=True, all_train=all_train, checkpointing=checkpointing)
        options, samples = self.recipe.train.train_policy, self.recipe.train.train_batch_per_replica
        batch = min(options.mini_batch, getattr(options, "batch_size_per_optimize", None) or samples)
        copies: Rows = {part: trained for part in PARTS if part in parts}
        return copies | {
            TRANSFORMER: self._transformer(spread),
            GRADIENTS: trained,
            OPTIMIZER: trained * MOMENTS,
            BATCH: self._batch(batch, 5 + len(copies), guided=guided),
            VISITING: Bytes(at_work),
            # The buffer of the all-reduce of gradients, or of torch's fused loops: once more their size.
            STEP: trained,
        }


_ROWS_OF: dict[str, Callable[[_Model], Rows]] = {
    "embed": lambda model: model.holding("text_encoder"),
    "encode": lambda model: model.holding("vae"),
    "rollout": _Model.rollout,
    "update": _Model.update,
    "finetune": _Model.finetune,
    "validate": _Model.validate,
    "export": _Model.export,
    "evaluate": _Model.evaluate,
}
"""The rows of each stage that loads a model."""
