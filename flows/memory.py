"""What a rank of each stage will hold in memory, before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cosmos_rl_core import pipelines, sizes
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.memory import Bytes, Shapes, Spread, Tokens, activations, num_tokens, passing, resting, visiting
from flows import costs

TRANSFORMER, COPIES, GRADIENTS, OPTIMIZER = "transformer", "copies", "gradients", "optimizer"
OTHERS = "other components"
SAMPLES, BATCH, VISITING = "samples trained on", "micro-batch", "weights at work"
ACTIVATIONS, STEP = "activations, about", "optimizer step"
ROWS = (TRANSFORMER, OTHERS, COPIES, GRADIENTS, OPTIMIZER, SAMPLES, BATCH, VISITING, ACTIVATIONS, STEP)
"""Kinds of what a rank holds. The last is there when the two before it are not."""

MOMENTS = 2
"""Averages that Adam and AdamW keep of every number that trains."""


@dataclass(frozen=True)
class StageMemory:
    """One stage's, by the kinds of :data:`ROWS`; None for a kind whose size no file says."""

    stage: str
    ranks: int
    rows: dict[str, Bytes | None]
    parts: tuple[str, ...] = ()
    """The copies of what trains."""

    @property
    def peak(self) -> Bytes:
        """Of a rank, all that is known taken together."""
        known = {name: held for name, held in self.rows.items() if held is not None}
        work, step = (known.get(VISITING, Bytes()) + known.get(ACTIVATIONS, Bytes()), known.get(STEP, Bytes()))
        total = sum((held for name, held in known.items() if name not in (VISITING, ACTIVATIONS, STEP)), Bytes())
        return total + Bytes(max(work.device, step.device), max(work.cpu, step.cpu))


def stages(recipe: Recipe) -> list[StageMemory]:
    """Of every stage that loads a part of the pipeline, in the order of a run."""
    model, algorithm, validation = _Model(recipe), costs.algorithm_of(recipe), recipe.validation
    encodes = algorithm.given_frames[1] > 0 or algorithm.data_term is not None
    found = [model.policy(), model.stage("embed", {OTHERS: model.others("text_encoder")})]
    if encodes or (validation is not None and validation.data is not None):
        found.append(model.stage("encode", {OTHERS: model.others("vae")}))
    found += [model.rollout(), model.update()] if recipe.train.train_policy.rewarded else [model.finetune()]
    if validation is not None and validation.data is not None:
        found.append(model.validate(validation.batch_size))
    if validation is not None and recipe.rewards:
        found.append(model.evaluate(validation.batch_size))
    return found


def largest(found: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most on a rank's device."""
    return max(found, key=lambda stage: stage.peak.device)


@dataclass(frozen=True)
class _Model:
    """A recipe with the shapes of what it trains."""

    recipe: Recipe

    @cached_property
    def path(self) -> str:
        return pipelines.resolve_path(self.recipe.policy.model_name_or_path)

    @cached_property
    def config(self) -> dict[str, Any]:
        return pipelines.read_json(self.path, "transformer", "config.json")

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

    def policy(self) -> StageMemory:
        """Version 0, which is made by one process that has all weights, with a copy to be written."""
        written = Bytes(cpu=resting(self.trained, Spread()).device)
        return StageMemory("policy", 1, {TRANSFORMER: self._transformer(Spread()), COPIES: written})

    def rollout(self) -> StageMemory:
        rollout, spread = self.recipe.rollout, self._spread("rollout")
        batch, recorded = min(rollout.n_generation_mini_batch, rollout.samples_per_shard), costs.sample_bytes(self.recipe)
        rows = self._forward(spread, batch, others=("vae",), guided=self._guided)
        if (held := rows[BATCH]) is not None and recorded is not None:
            rows[BATCH] = held + Bytes(batch * recorded)
        return self.stage("rollout", rows)

    def validate(self, batch: int) -> StageMemory:
        return self.stage("validate", self._forward(self._spread("validate"), batch, half=False))

    def evaluate(self, batch: int) -> StageMemory:
        """By the whole stock pipeline, in float32, whose guidance is a batch of twice as many."""
        rows = self._forward(Spread(), batch * (1 + self._guided), others=("vae", "text_encoder"))
        return self.stage("evaluate", rows)

    def update(self) -> StageMemory:
        algorithm, train = costs.algorithm_of(self.recipe), self.recipe.train
        kept = {
            "old": algorithm.old_decay(0) is not None,
            "ema": train.ema_enable,
            "reference": "reference" in algorithm.roles or algorithm.reference_after(0) != "base",
            "behaviour": "behaviour" in algorithm.roles,
        }
        guided = self._guided and algorithm.transitions
        rows = self._training("update", tuple(part for part in kept if kept[part]), guided=guided)
        each = costs.sample_bytes(self.recipe)
        # Every rank reads all of them, and takes a micro-batch of its share to the device at a time.
        rows[SAMPLES] = None if each is None else Bytes(cpu=train.train_batch_per_replica * each)
        return self.stage("update", rows, tuple(part for part in kept if kept[part]))

    def finetune(self) -> StageMemory:
        parts = ("ema",) if self.recipe.train.ema_enable else ()
        rows = self._training("finetune", parts, guided=False)
        return self.stage("finetune", rows | {OTHERS: self.others("vae")}, parts)

    def stage(self, name: str, rows: dict[str, Bytes | None], parts: tuple[str, ...] = ()) -> StageMemory:
        return StageMemory(name, self.recipe.launch.processes_of(name), rows, parts)

    def others(self, *prefixes: str) -> Bytes | None:
        """Components in float32, whatever their files are of; None if one has no safetensors."""
        index = pipelines.read_json(self.path, pipelines.INDEX)
        names = [
            name
            for name, value in index.items()
            if name.startswith(prefixes) and isinstance(value, list) and value[0] is not None
        ]
        shapes = [sizes.component_shapes(self.path, name) for name in names]
        return Bytes(sizes.FLOAT32_BYTES * sum(map(sizes.elements, shapes))) if all(shapes) else None

    @property
    def _guided(self) -> bool:
        return self.recipe.policy.diffusers.sample.guidance_scale != 1

    @property
    def _half(self) -> bool:
        return self.recipe.train.param_dtype == "bfloat16"

    def _spread(self, stage: str) -> Spread:
        launch = self.recipe.launch
        shard_size = launch.shard_size_of(stage)
        return Spread(shard_size, launch.fsdp_offload and shard_size > 1, self._half)

    def _transformer(self, spread: Spread) -> Bytes:
        base = resting(self.shapes, spread)
        return base if self.recipe.policy.lora is None else base + resting(self.trained, spread)

    def _tokens(self) -> Tokens | None:
        if self.latents is None:
            return None
        text = sizes.text_tokens(self.path, self.recipe.policy.diffusers.max_prompt_length)
        return Tokens(num_tokens(self.latents, self.config), text)

    def _batch(self, size: int, num_states: int, *, guided: bool) -> Bytes | None:
        """So many tensors of the size of latents a sample, and the texts that it is conditioned on."""
        elements = sizes.embedding_elements(self.path, self.recipe.policy.diffusers.max_prompt_length)
        diffusers = self.recipe.policy.diffusers
        states = sizes.latent_elements(self.path, diffusers.inference_size, diffusers.train_frames)
        if elements is None or states is None:
            return None
        return Bytes(sizes.FLOAT32_BYTES * size * (num_states * states + (1 + guided) * elements))

    def _forward(
        self,
        spread: Spread,
        batch: int,
        *,
        others: tuple[str, ...] = (),
        guided: bool = False,
        half: bool | None = None,
    ) -> dict[str, Bytes | None]:
        """Of a stage that trains nothing: state, noise, estimate and velocity of each sample, one more with guidance."""
        half, tokens = spread.half if half is None else half, self._tokens()
        all_train = self.recipe.policy.lora is None
        return {
            TRANSFORMER: self._transformer(spread),
            OTHERS: self.others(*others) if others else Bytes(),
            BATCH: self._batch(batch, 4 + guided, guided=guided),
            VISITING: Bytes(visiting(self.shapes, spread, backward=False, all_train=all_train)),
            ACTIVATIONS: tokens and Bytes(batch * passing(self.shapes, self.config, tokens, half=half)),
        }

    def _training(self, stage: str, parts: tuple[str, ...], *, guided: bool) -> dict[str, Bytes | None]:
        """Of a stage with an optimizer: latents, noise, state and target of each sample, and a velocity a part."""
        policy, spread, tokens = self.recipe.policy, self._spread(stage), self._tokens()
        trained, lora, checkpointing = resting(self.trained, spread), policy.lora, policy.model_gradient_checkpointing
        kept = tokens and activations(
            self.shapes, self.config, tokens, lora=lora is not None, half=spread.half, checkpointing=checkpointing
        )
        # The gradient goes through both predictions where the algorithm trains the unconditional one too.
        doubled = guided and costs.algorithm_of(self.recipe).trains_unconditional
        at_work = visiting(self.shapes, spread, backward=True, all_train=lora is None, checkpointing=checkpointing)
        options, samples = self.recipe.train.train_policy, self.recipe.train.train_batch_per_replica
        batch = min(options.mini_batch, getattr(options, "batch_size_per_optimize", None) or samples)
        return {
            TRANSFORMER: self._transformer(spread),
            COPIES: trained * len(parts),
            GRADIENTS: trained,
            OPTIMIZER: trained * MOMENTS,
            BATCH: self._batch(batch, 5 + len(parts), guided=guided),
            VISITING: Bytes(at_work),
            ACTIVATIONS: None if kept is None else Bytes(batch * (1 + doubled) * kept),
            # The buffer that gradients are summed over ranks in, or what torch's fused loops take: as much again.
            STEP: trained,
        }
