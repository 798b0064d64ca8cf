"""Memory that a rank of each stage of a VLM needs, from ``config.json`` and settings alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cosmos_rl_core.config.vlm.recipe import VlmRecipe
from cosmos_rl_core.pipelines.memory import HALF_BYTES, Bytes, Shapes, Spread, resting, visiting
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES
from cosmos_rl_core.vlms._base import Processor, WeightShapes, adapted, module_of, serving
from cosmos_rl_core.vlms._settings import CONFIG, json_object
from cosmos_rl_core.weights import lora as adapters
from cosmos_rl_core.weights.parts import EMA, cut
from cosmos_rl_core.weights.shapes import count_elements
from flows.sizes.memory import (
    BATCH,
    COPY,
    GATHERED,
    GRADIENTS,
    IN_PASSING,
    LOGITS,
    MODEL,
    MOMENTS_KEPT,
    OPTIMIZER,
    READING,
    STEP,
    VISITING,
    Rows,
    StageMemory,
    to_be_written,
)

WORKS = {"vlm_policy": "policy", "vlm_finetune": "finetune", "vlm_evaluate": "validate", "vlm_export": "export"}
"""Stages with weights, and the names that people see. :class:`Model` counts each by a method of the latter name."""
SEVERAL = ("vlm_finetune", "vlm_evaluate")
"""Stages of models of transformers that may have several ranks."""


def stages(recipe: VlmRecipe, path: str, kinds: Iterable[str]) -> list[StageMemory]:
    """Return the memory of the stages with weights among ``kinds``; empty if the plugin does not know the shapes.

    ``path`` is the folder of the model. Raises :class:`ConfigError` for a ``config.json`` that lacks a number for the
    shapes, and for LoRA targets that name no module.
    """
    model = model_of(recipe, path)
    if model is None:
        return []
    asked = set(kinds)
    found = [kind for kind in WORKS if kind in asked]
    ranks = {kind: recipe.launch.processes_of(kind) if kind in SEVERAL else 1 for kind in found}
    return [StageMemory(WORKS[kind], ranks[kind], getattr(model, WORKS[kind])()) for kind in found]


def model_of(recipe: VlmRecipe, path: str) -> "Model | None":
    """Return the recipe with the shapes of its model's weights, or None if the plugin does not know them."""
    _, processor = serving(path)
    shapes: WeightShapes | None = getattr(processor, "weights", None)
    return None if shapes is None else Model(recipe, path, processor, shapes)


@dataclass(frozen=True)
class Model:
    """A recipe with the shapes of its model's weights."""

    recipe: VlmRecipe
    path: str
    processor: type[Processor]
    known: WeightShapes

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights."""
        return self.known.of(json_object(self.path, CONFIG) or {})

    @cached_property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of trained tensors: weights of the parts that train, or factors of adapters on them."""
        policy = self.recipe.policy
        processor: Any = self.processor
        if policy.lora is None:
            return {name: shape for name, shape in self.shapes.items() if module_of(processor, name) in policy.trains}
        linear = {name.removesuffix(".weight"): shape for name, shape in self.shapes.items() if self._multiplies(name)}
        output = self.known.output.removesuffix(".weight")
        factors: dict[str, tuple[int, ...]] = {}
        for module in adapted(policy.lora, linear, processor, output, policy.trains):
            (rows, columns), rank = linear[module], adapters.rank(policy.lora, module)
            factors |= {f"{module}.lora_A.weight": (rank, columns), f"{module}.lora_B.weight": (rows, rank)}
        return factors

    def _multiplies(self, name: str) -> bool:
        """Return whether a weight is a linear module's."""
        return name.endswith(".weight") and len(self.shapes[name]) == 2 and name not in self.known.tables

    def policy(self) -> Rows:
        """Count the whole model. Trained tensors are copied to the CPU, and then to the bytes of files."""
        sizes = {name: FLOAT32_BYTES * math.prod(shape) for name, shape in self.trained.items()}
        largest = max(sum(sizes[name] for name in names) for names in cut(sizes))
        return self._whole() | {COPY: Bytes(cpu=sum(sizes.values())), GATHERED: Bytes(cpu=largest)}

    def finetune(self) -> Rows:
        """Count training: copies of trained tensors, and inputs and logits of a row, as if each token had a label."""
        train, policy = self.recipe.train, self.recipe.policy
        spread = self._spread("vlm_finetune")
        trained = self._resting(self.trained, spread)
        average: Rows = {EMA: trained} if train.ema_enable else {}
        adapters_too = self._resting(self.trained, spread) if policy.lora is not None else Bytes()
        rows: Rows = average | {
            MODEL: self._resting(self.shapes, spread) + adapters_too,
            GRADIENTS: trained,
            OPTIMIZER: trained * MOMENTS_KEPT,
            STEP: trained,
            VISITING: Bytes(self._visiting(spread, backward=True)),
            READING: self._reading(spread),
            GATHERED: to_be_written(self.trained, self.recipe.launch, "vlm_finetune", self.known.tables),
        }
        # Two copies: logits and their gradients.
        return rows | self._row(copies=2)

    def validate(self) -> Rows:
        """Count a forward pass of a conversation; each rank has all weights."""
        spread = Spread(half=self._half)
        return self._whole() | {VISITING: Bytes(self._visiting(spread, backward=False))} | self._row(copies=1)

    def export(self) -> Rows:
        """Count one tensor twice: its bytes in the file, and its numbers."""
        return {IN_PASSING: Bytes(cpu=2 * FLOAT32_BYTES * max(map(math.prod, self.trained.values())))}

    @property
    def _half(self) -> bool:
        return self.recipe.train.param_dtype == "bfloat16"

    @property
    def _base(self) -> int:
        """Return the bytes of the base in float32."""
        return FLOAT32_BYTES * count_elements(self.shapes)

    def _spread(self, stage: str) -> Spread:
        return Spread(self.recipe.launch.parallelism_of(stage), half=self._half)

    def _whole(self) -> Rows:
        lora = count_elements(self.trained) if self.recipe.policy.lora is not None else 0
        return {MODEL: Bytes(self._base + FLOAT32_BYTES * lora), READING: self._reading(Spread())}

    def _reading(self, spread: Spread) -> Bytes:
        """Count the rank's share of the largest tensor of the mapped files, as if they were in float32."""
        each = (self._resting({name: shape}, spread) for name, shape in self.shapes.items())
        return Bytes(cpu=max(found.device + found.cpu for found in each))

    def _resting(self, shapes: Shapes, spread: Spread) -> Bytes:
        """Count weights between passes. Tables stay whole on every rank."""
        tables = {name: shape for name, shape in shapes.items() if name in self.known.tables}
        others = {name: shape for name, shape in shapes.items() if name not in tables}
        return resting(others, spread) + Bytes(FLOAT32_BYTES * count_elements(tables))

    def _visiting(self, spread: Spread, *, backward: bool) -> int:
        """Count gathered and cast matrices. Of the tables, only one that is the output too is cast."""
        policy = self.recipe.policy
        matrices = {name: shape for name, shape in self.shapes.items() if name not in self.known.tables}
        found = visiting(
            matrices,
            spread,
            backward=backward,
            all_train=policy.lora is None,
            checkpointing=policy.model_gradient_checkpointing,
            block=self.known.block,
        )
        tied = self.known.output not in self.shapes
        return found + (HALF_BYTES * math.prod(self.shapes[self.known.tables[0]]) if tied and spread.half else 0)

    def _row(self, copies: int) -> Rows:
        """Count the patches of a row of media alone, and float32 logits of all its tokens."""
        options, image = (
            self.recipe.train.train_policy,
            self.processor(self.path, self.recipe.policy.media.changes).image,
        )
        values = image.merge_size**2 * 3 * image.temporal_patch_size * image.patch_size**2
        vocabulary = self.shapes[self.known.tables[0]][0]
        tokens = FLOAT32_BYTES * options.row_tokens
        return {BATCH: Bytes(tokens * values), LOGITS: Bytes(copies * tokens * vocabulary)}
