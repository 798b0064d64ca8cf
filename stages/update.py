"""Policy k to policy k + 1 from rewarded rollouts. Knows no algorithm: those are in ``cosmos_rl_core/algorithms``."""

from functools import partial
from itertools import pairwise
from typing import Any, cast

import pandas as pd
import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.algorithms._base import Algorithm, Batch
from cosmos_rl_core.distributed import Group
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models._base import Conditioning, stack
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.training import DrawKey, random_times, training_noise
from stages import contracts, embed
from stages.artifacts import Artifact
from stages.contracts import Request
from stages.loading import load_model
from stages.reward import SCORES
from stages.runner import Context
from stages.samples import INDEX, cut, read_shard, read_table, shard_names, to_parquet
from stages.trainer import MicroBatch, Trainer, check_clocks, my_share

ADVANTAGES = "advantages.parquet"


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write the next policy's parts, ``advantages.parquet`` (what trained) and ``metrics.parquet`` (a row a step)."""
    config, group = request.config, context.ranks
    assert isinstance(config, contracts.Update)
    policy, iteration = request.one("policy"), request.iteration or 0
    check_clocks(policy, iteration, config.steps.first_step)
    algorithm: Algorithm = plugins.load("algorithms", config.algorithm.type).Algorithm(config.algorithm)
    table = _advantages(request, config, algorithm)
    layout = context.layout({"steps": _order(table, config, request.seed, iteration)})
    model = load_model(config.model, ("transformer",), group.device)
    if config.gradient_checkpointing:
        model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    copies = _copies(config)
    trainer = Trainer.load(model, algorithm, config.lora, policy, config.steps, context, copies)
    _check_behaviour(request, algorithm.behaviour)

    sigmas = schedule_of(model.scheduler, config.num_steps).sigmas
    draws = _Draws(request, table, sigmas, algorithm.num_times(config.num_steps), group)
    for index, micro_batches in enumerate(layout["steps"]):
        epoch = index * config.algorithm.mu_iterations // len(layout["steps"])
        items = [partial(draws, ids, epoch, j) for ids in micro_batches for j in range(draws.num_times)]
        trainer.step(index, my_share(items, group), sum(map(len, micro_batches)), draws.num_times)

    if "old" in copies and config.old_decay is not None:
        trainer.weights.lerp_("old", config.old_decay)
    trainer.write(context.attempt, copies, iteration)
    if group.rank == 0:
        context.attempt.put(ADVANTAGES, to_parquet(table))
    excluded = len(table[~table["used"]])
    return trainer.summary() | ({"excluded": excluded} if excluded else {})


def _advantages(request: Request, config: contracts.Update, algorithm: Algorithm) -> pd.DataFrame:
    """Every sample of the rollouts with its reward, its advantage and whether it is used.

    A sample that one reward failed to score is not.
    """
    samples = pd.concat([read_table(Artifact(i), INDEX) for i in request.inputs["rollouts"]], ignore_index=True)
    samples["reward"], samples["valid"] = 0.0, True
    for source in request.inputs["scores"]:
        artifact = Artifact(source)
        weight = config.reward_weights[artifact.manifest.config["reward"]["name"]]
        scores = read_table(artifact, SCORES).set_index("sample_id").reindex(samples["sample_id"])
        samples["reward"] += weight * scores["score"].astype("float64").to_numpy()
        samples["valid"] &= scores["valid"].fillna(value=False).astype(bool).to_numpy()
    samples["reward"] = samples["reward"].where(samples["valid"])
    table = algorithm.advantages(cast("pd.DataFrame", samples[["sample_id", "prompt_id", "reward", "valid"]]))
    if not any(table["used"]):
        raise ArtifactError("no sample can be trained on: every group has fewer scored samples than min_group_size")
    return table


def _order(table: pd.DataFrame, config: contracts.Update, seed: int, iteration: int) -> list[list[list[str]]]:
    """Optimizer steps of micro-batches of sample ids.

    The number of steps is planned: with samples excluded, steps are smaller.
    """
    used = table.loc[table["used"], "sample_id"].tolist()
    passes, total = config.algorithm.mu_iterations, len(config.steps.lrs)
    per_pass = total // passes
    if len(used) < per_pass:
        raise ArtifactError(
            f"{len(used)} samples can be trained on, fewer than the {per_pass} optimizer steps planned on them"
        )
    steps: list[list[list[str]]] = []
    for epoch in range(passes):
        order = [used[i] for i in seeds.permutation(len(used), seed, "update order", iteration, epoch)]
        bounds = [len(order) * k // per_pass for k in range(per_pass + 1)]
        steps += [cut(order[a:b], config.algorithm.mini_batch) for a, b in pairwise(bounds)]
    return steps


def _copies(config: contracts.Update) -> list[str]:
    """The copies beside ``current`` that this policy carries on."""
    return (["old"] if config.old_decay is not None else []) + (["ema"] if config.keeps_ema else [])


def _check_behaviour(request: Request, part: str) -> None:
    """The weights that made the rollouts must be this policy's own ``part``: the loss reflects about exactly those."""
    manifest = Artifact(request.one("policy")).manifest
    own = manifest.part_content(part if manifest.has_part(part) else "current")
    made_by = {Artifact(source).manifest.inputs["policy"][0].content for source in request.inputs["rollouts"]}
    if made_by | {source.content for source in request.inputs["behaviours"]} != {own}:
        raise ConfigError(
            f"the rollouts were not made by this policy's own {part!r} weights; no others can be trained on"
        )


class _Draws:
    """Micro-batches of stored samples at random noise levels; every draw depends on the sample and the pass alone."""

    def __init__(
        self, request: Request, table: pd.DataFrame, sigmas: tuple[float, ...], num_times: int, group: Group
    ) -> None:
        self.key = (request.seed, request.iteration or 0)
        self.sigmas, self.num_times, self.device = sigmas, num_times, group.device
        used = table[table["used"]]
        self.advantages = dict(zip(used["sample_id"], used["advantage"], strict=True))
        self.prompts = dict(zip(used["sample_id"], used["prompt_id"], strict=True))
        self.latents = _read_latents(request, set(self.advantages))
        self.conditioning: dict[str, Conditioning] = embed.read(
            request.one("embeddings"), sorted(set(self.prompts.values()))
        )

    def __call__(self, ids: list[str], epoch: int, time_index: int, weight: float) -> MicroBatch:
        keys = [DrawKey(*self.key, epoch, sample_id) for sample_id in ids]
        times = [random_times(self.sigmas, self.num_times, key)[time_index] for key in keys]
        x_0 = torch.stack([self.latents[sample_id] for sample_id in ids])
        noise = torch.stack([training_noise(tuple(x_0.shape[1:]), key, time_index) for key in keys])
        batch = Batch(
            x_0=x_0.to(self.device),
            noise=noise.to(self.device),
            t=torch.tensor(times, dtype=torch.float32, device=self.device),
            advantages=torch.tensor([self.advantages[i] for i in ids], dtype=torch.float32, device=self.device),
        )
        return MicroBatch(batch, stack([self.conditioning[self.prompts[i]] for i in ids], self.device), weight)


def _read_latents(request: Request, ids: set[str]) -> dict[str, Tensor]:
    latents: dict[str, Tensor] = {}
    for source in request.inputs["rollouts"]:
        artifact = Artifact(source)
        for name in shard_names(artifact):
            for stored in read_shard(artifact, name):
                if stored.sample_id in ids and stored.latents is not None:
                    latents[stored.sample_id] = load_tensors(stored.latents)["latents"]
    return latents
