"""Policy k to policy k + 1 from rewarded rollouts. Knows no algorithm: those are in ``cosmos_rl_core/algorithms``."""

from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

import pandas as pd

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._base import Algorithm, algorithm_of
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.training.noise_levels import FINE_GRID
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, EMA, OLD, REFERENCE
from cosmos_rl_core.weights.policy_weights import PolicyWeights
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.context import Context
from stages.formats.policies import read_part
from stages.formats.samples import INDEX, are_finite, cut, read_table, to_parquet
from stages.training.draws import DataDraws, Draw, LatentDraws, Stored, TransitionDraws
from stages.training.drift import DriftWatch
from stages.training.trainer import Trainer, check_clocks, my_share

_STILL = (OLD, REFERENCE)
"""Copies that stay as they are until the last step is done."""


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write the next policy's parts, ``advantages.parquet`` (what trained), ``metrics.parquet`` (a row a step) and, of
    algorithms that train on recorded steps, ``transitions.parquet`` (a row each)."""
    config, group = request.config, context.ranks
    assert isinstance(config, contracts.Update)
    policy, iteration = request.one("policy"), request.iteration or 0
    check_clocks(policy, iteration, config.steps.first_step)
    _check_behaviours(request, config.sample)
    algorithm = algorithm_of(config.algorithm)
    table = _advantages(request, config, algorithm)
    layout = context.layout({"steps": _order(request, config, table, context.shrunk(config.algorithm.mini_batch))})
    copies = _copies(config)
    trainer = Trainer.load(config, algorithm, policy=policy, components=(), context=context, copies=copies)
    if BEHAVIOUR in algorithm.needs.roles:
        _take_up_behaviour(request, trainer.weights, copies, context)
    draws = _draws(request, config, algorithm, trainer.model, Stored.read(request, table, group.device))
    drift = DriftWatch(algorithm.needs.drift_limits, trainer, context)
    _train(trainer, layout["steps"], config, draws)

    if config.old_decay is not None:
        trainer.weights.lerp_(OLD, config.old_decay)
    if config.reference == "renewed":
        trainer.weights.create(REFERENCE)
    drift.write()
    trainer.write(context, copies, iteration)
    if group.rank == 0:
        context.attempt.put(contracts.Update.ADVANTAGES, to_parquet(table))
    excluded = len(table[~table["used"]])
    return trainer.summary() | drift.summary() | ({"excluded": excluded} if excluded else {})


def _take_up_behaviour(request: Request, weights: PolicyWeights, copies: list[str], context: Context) -> None:
    """Make the part ``behaviour``: a second name of the copy whose bytes it has, if there is one that keeps still."""
    source, policy = request.inputs["behaviours"][0], Artifact(request.one("policy")).manifest
    for part in (copy for copy in copies if copy in _STILL):
        if policy.part_content(part if policy.has_part(part) else CURRENT) == source.content:
            weights.share(BEHAVIOUR, part)
            return
    weights.create(BEHAVIOUR, read_part(source, source.part, weights.shards, context.progress))


def _train(
    trainer: Trainer,
    steps: list[list[list[str]]],
    config: contracts.Update,
    draws: list[tuple[Draw, int]],
) -> None:
    """Every pass over the samples, until the end or until the policy has drifted too far."""
    per_pass = len(steps) // config.algorithm.mu_iterations
    for index, micro_batches in enumerate(steps):
        kinds = [
            [partial(draw, ids, index // per_pass, place) for ids in micro_batches for place in range(num_times)]
            for draw, num_times in draws
        ]
        # Each kind is dealt by itself, so that all ranks do the same number of forwards.
        share = chain.from_iterable(my_share(kind, trainer.group) for kind in kinds)
        if not trainer.step(index, share, sum(map(len, micro_batches)), draws[0][1]):
            return


def _draws(
    request: Request, config: contracts.Update, algorithm: Algorithm, model: Model, stored: Stored
) -> list[tuple[Draw, int]]:
    """What an optimizer step is made of, each with how often it draws for a sample; the rewarded draws come first."""
    num_times = algorithm.needs.num_times(config.sample.num_steps)
    key = (request.seed, request.iteration or 0)
    media = contracts.MediaShape.model_validate(Artifact(request.inputs["rollouts"][0]).manifest.config["media"])
    schedule = partial(model.schedule, size=media.size, frames=media.frames)
    if not algorithm.needs.transitions:
        sigmas = schedule(config.sample.num_steps).sigmas
        return [(LatentDraws(stored, key, sigmas, num_times, config.sample.guidance_scale), num_times)]
    kernel = kernel_of(config.sample, lambda: schedule(config.sample.num_steps))
    steps = TransitionDraws(stored, kernel, config.sample.guidance_scale)
    if (term := algorithm.needs.data_term) is None:
        return [(steps, num_times)]
    data = DataDraws(request, term, config.density, steps, schedule(FINE_GRID))
    return [(steps, num_times), (data, data.num_times or num_times)]


def _advantages(request: Request, config: contracts.Update, algorithm: Algorithm) -> pd.DataFrame:
    """Every sample of the rollouts with its reward, its advantage and whether it is used.

    A sample that one reward failed to score is not.
    """
    samples = pd.concat([read_table(Artifact(i), INDEX) for i in request.inputs["rollouts"]], ignore_index=True)
    samples["reward"], samples["valid"] = 0.0, True
    for source in request.inputs["scores"]:
        artifact = Artifact(source)
        scores = read_table(artifact, contracts.Reward.SCORES).set_index("sample_id").reindex(samples["sample_id"])
        name = contracts.Reward.model_validate(artifact.manifest.config).reward.label
        weighted = config.reward_weights[name] * scores["score"].astype("float64").to_numpy()
        samples[f"reward.{name}"] = weighted
        samples["reward"] += weighted
        samples["valid"] &= scores["valid"].fillna(value=False).astype(bool).to_numpy()
    samples["reward"] = samples["reward"].where(samples["valid"])
    single = [name for name in samples.columns if name.startswith("reward.")]
    scored = ["reward", "valid", *single]
    finite = are_finite(samples)
    samples = cast("pd.DataFrame", samples[["sample_id", "prompt_id", *scored]])
    trainable = cast("pd.DataFrame", samples[finite]).reset_index(drop=True)
    if config.algorithm.shuffle_rewards:
        order = seeds.permutation(len(trainable), request.seed, "shuffled rewards", request.iteration or 0)
        trainable[scored] = trainable[scored].iloc[order].reset_index(drop=True)
    table = algorithm.advantages(trainable)
    if not finite.all():
        # No reward, shuffled or made up, makes such a sample one to train on.
        table = samples.drop(columns=scored).merge(table.drop(columns="prompt_id"), on="sample_id", how="left")
        table["used"] = table["used"].eq(True)
    if not any(table["used"]):
        raise ArtifactError("no sample can be trained on: every group has fewer scored samples than min_group_size")
    return table


def _order(request: Request, config: contracts.Update, table: pd.DataFrame, mini_batch: int) -> list[list[list[str]]]:
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
    key = (request.seed, "update order", request.iteration or 0)
    steps: list[list[list[str]]] = []
    for epoch in range(passes):
        order = [used[i] for i in seeds.permutation(len(used), *key, epoch)]
        bounds = [len(order) * k // per_pass for k in range(per_pass + 1)]
        steps += [cut(order[a:b], mini_batch) for a, b in pairwise(bounds)]
    return steps


def _copies(config: contracts.Update) -> list[str]:
    """The copies beside ``current`` that this policy carries on."""
    kept = {
        OLD: config.old_decay is not None,
        EMA: config.keeps_ema,
        REFERENCE: config.reference != "base",
    }
    return [part for part, is_kept in kept.items() if is_kept]


def _check_behaviours(request: Request, sample: SolverConfig) -> None:
    """Weights and sampler must be those that made the rollouts: the loss compares with exactly those."""
    manifests = [Artifact(source).manifest for source in request.inputs["rollouts"]]
    if other := [m.config["sample"] for m in manifests if m.config["sample"] != sample.identity()]:
        raise ConfigError(f"the rollouts were sampled by {other[0]}, this update would replay {sample.identity()}")
    made_by = [manifest.inputs["policy"][0].content for manifest in manifests]
    given = [source.content for source in request.inputs["behaviours"]]
    if len(made_by) != 1:
        raise ConfigError(f"an update trains on one rollout so far, found {len(made_by)}")
    if made_by != given:
        raise ConfigError(
            f"the rollouts were made by policies {[d[:12] for d in made_by]}, the behaviours given are "
            f"{[d[:12] for d in given]}"
        )
