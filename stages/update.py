"""Training of policy k to policy k + 1 on scored rollouts. Algorithms are plugins in ``cosmos_rl_core/algorithms``."""

import math
from functools import partial
from itertools import chain
from typing import Any

import pandas as pd

from cosmos_rl_core.algorithms._base import Algorithm, algorithm_of
from cosmos_rl_core.errors import ArtifactError, ConfigError, counted
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.training.forwards import Filling, filling
from cosmos_rl_core.training.noise_levels import FINE_GRID
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, EMA, INIT, OLD, REFERENCE
from cosmos_rl_core.weights.policy_weights import PolicyWeights
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import evenly
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.policies import read_part
from stages.formats.references import kinds_of, sizes_of
from stages.formats.tables import to_parquet
from stages.scoring.advantages import advantages, counts_of, units_of
from stages.training import foreign
from stages.training.draws import DataDraws, Draw, LatentDraws, Stored, TransitionDraws
from stages.training.drift import DriftWatch
from stages.training.micro_batches import made_ahead, my_share
from stages.training.order import Unit, steps_of
from stages.training.stepper import check_clocks
from stages.training.trainer import Make, Trainer

_UNCHANGED_COPIES = (OLD, REFERENCE)
"""Copies that do not change before the last step is done."""


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write the next policy's parts, ``advantages.parquet`` and ``metrics.parquet`` (one row per sample, and per step).

    Algorithms that train on recorded steps also write ``transitions.parquet``, one row per trained transition.
    """
    config, group = request.settings(contracts.Update), context.ranks
    policy, iteration = request.one("policy"), request.iteration or 0
    check_clocks(policy, iteration, config.steps.first_step)
    rollouts = [Artifact(source) for source in request.inputs["rollouts"]]
    _check_rollouts(rollouts, request)
    algorithm = algorithm_of(config.algorithm)
    table = advantages(request, rollouts, algorithm)
    fills = _filling(request, algorithm, context)
    units = units_of(table, algorithm)
    planned: dict[str, Any] = {"steps": _order(request, table, units, algorithm, fills.samples, group.data_world_size)}
    if config.algorithm.tokens_per_forward is not None:
        # Left out otherwise, so that layouts equal earlier versions' layouts.
        planned["levels"] = fills.levels
    layout = context.layout(planned)
    steps: list[list[list[str]]] = layout["steps"]
    copies = _copies(config)
    given = {"components": (), "context": context, "copies": copies, "other": foreign.other_adapter(request)}
    trainer = Trainer.load(config, algorithm, request=request, **given)
    behaviours = [BEHAVIOUR] * len(rollouts)
    if BEHAVIOUR in algorithm.needs.roles or config.foreign is not None:
        bare = [config.below is not None and not rollout.manifest.inputs.get(INIT) for rollout in rollouts]
        behaviours = _add_behaviours(request, trainer.weights, copies, bare, context)
    compared = _anchored(config, algorithm, trainer.weights, behaviours)
    draws = _draws(request, algorithm, trainer.model, Stored.read(request, table, compared, context))
    moved = _drift(request, trainer, draws[0][0], units, behaviours, fills)
    if (limit := algorithm.needs.max_logp_drift) is not None:
        trainer.watcher = DriftWatch(limit, trainer, [rollout.manifest.content for rollout in rollouts])
    per_pass = len(steps) // config.algorithm.mu_iterations
    at_once = layout.get("levels", 1)
    cut_draws = [(draw, evenly([*range(times)], math.ceil(times / at_once))) for draw, times in draws]

    def share(index: int) -> list[Make]:
        # Each kind of micro-batch is dealt by itself, so that all ranks do the same number of forward passes.
        epoch, batches = index // per_pass, steps[index]
        dealt = (
            my_share([[partial(draw, keys, epoch, places) for places in levels] for keys in batches], group)
            for draw, levels in cut_draws
        )
        return [*chain.from_iterable(dealt)]

    with made_ahead(map(share, range(len(steps))), group.device) as made:
        for index, micro_batches in enumerate(made):
            if not trainer.step(index, micro_batches, sum(map(len, steps[index])), draws[0][1]):
                break  # the policy has drifted too far

    if config.old_decay is not None:
        trainer.weights.lerp_(OLD, config.old_decay)
    if config.reference == "renewed":
        trainer.weights.create(REFERENCE)
    trainer.watcher.write()
    trainer.write(copies, iteration)
    if group.rank == 0:
        context.attempt.put(contracts.Update.ADVANTAGES, to_parquet(table.drop(columns="key")))
    counts = {name: count for name, count in counts_of(table, algorithm).items() if count}
    return trainer.summary() | trainer.watcher.summary() | moved | counts


def _anchored(
    config: contracts.Update, algorithm: Algorithm, weights: PolicyWeights, behaviours: list[str]
) -> list[str]:
    """Return the names of the weights that the loss reads as the behaviour of each rollout."""
    if config.foreign is None or config.foreign.anchor == BEHAVIOUR or BEHAVIOUR not in algorithm.needs.roles:
        return behaviours
    own = algorithm.needs.behaviour
    if own not in weights.parts or own == CURRENT:
        # Training moves ``current``, and a loss compares with its former weights.
        own = f"{BEHAVIOUR} own"
        weights.create(own)
    return [own] * len(behaviours)


def _drift(
    request: Request, trainer: Trainer, draw: Draw, units: list[Unit], behaviours: list[str], fills: Filling
) -> dict[str, float]:
    """Return ``drift``, the distance from the policies that made the rollouts; empty for the run's own. Collective."""
    config = request.settings(contracts.Update)
    if config.foreign is None:
        return {}
    assert isinstance(draw, LatentDraws), "plans refuse recorded steps of another policy"
    found = foreign.drift(trainer, draw, units, behaviours, fills.samples)
    foreign.check(found, config.foreign, request.iteration or 0)
    # From here on only a loss that compares with the behaviours' weights needs them.
    if config.foreign.anchor != BEHAVIOUR or BEHAVIOUR not in trainer.algorithm.needs.roles:
        for name in behaviours:
            trainer.weights.remove(name)
    return {"drift": found}


def _add_behaviours(
    request: Request, weights: PolicyWeights, copies: list[str], bare: list[bool], context: Context[Group]
) -> list[str]:
    """Add the weights that made each rollout, and return their names in the order of the rollouts.

    Equal weights are held once: rollouts of one policy share them, and so does a copy that does not change. A ``bare``
    rollout was made without the frozen adapter.
    """
    policy = Artifact(request.one("policy")).manifest
    still = {copy: copy if policy.has_part(copy) else CURRENT for copy in copies if copy in _UNCHANGED_COPIES}
    names = {(policy.part_content(part), False): copy for copy, part in still.items()}
    found: list[str] = []
    for place, (source, is_bare) in enumerate(zip(request.inputs["behaviours"], bare, strict=True)):
        found.append(f"{BEHAVIOUR} {place}")
        made_by = source.content, is_bare
        if made_by in names:
            weights.share(found[-1], names[made_by])
        else:
            tensors = read_part(source, source.part, weights.shards, context.progress, group=context.ranks)
            (weights.create_other if weights.other else weights.create)(found[-1], tensors, bare=is_bare)
        names.setdefault(made_by, found[-1])
    return found


def _draws(request: Request, algorithm: Algorithm, model: Model, stored: Stored) -> list[tuple[Draw, int]]:
    """Return what an optimizer step draws: noised samples or stored steps, each with their number per sample.

    Draws of rewarded samples come before draws of data.
    """
    config = request.settings(contracts.Update)
    num_steps = config.sample.num_steps
    needs = algorithm.needs
    num_times = needs.num_times(num_steps)
    media = _media(request)
    schedule = partial(model.schedule, size=media.size, frames=media.frames)
    kernel = kernel_of(config.sample, lambda: schedule(num_steps))
    if not needs.transitions:
        key = request.seed, request.iteration or 0
        return [(LatentDraws(stored, key, kernel.levels, num_times, needs.members), num_times)]
    steps = TransitionDraws(stored, kernel)
    if (term := needs.data_term) is None:
        return [(steps, num_times)]
    data = DataDraws(request, term, config.density, steps, schedule(FINE_GRID))
    return [(steps, num_times), (data, data.num_times or num_times)]


def _filling(request: Request, algorithm: Algorithm, context: Context[Group]) -> Filling:
    """Return how many samples and noise levels a forward pass takes, after the halvings of earlier attempts."""
    config, media = request.settings(contracts.Update), _media(request)
    path = directories.resolve_path(config.model.path)

    def num_tokens() -> int:
        pictures = sizes_of(request.inputs["rollouts"]).values()
        return max(sizes.num_tokens(path, media.size, media.frames, each) for each in pictures)

    needs = algorithm.needs
    times = needs.num_times(config.sample.num_steps)
    return filling(config.algorithm, times, num_tokens, context.shrunk, needs.members)


def _media(request: Request) -> contracts.MediaShape:
    """Return the size of the rollouts' media."""
    rollout = Artifact(request.inputs["rollouts"][0]).manifest
    return contracts.MediaShape.model_validate(rollout.config["media"])


def _order(
    request: Request, table: pd.DataFrame, units: list[Unit], algorithm: Algorithm, mini_batch: int, num_shares: int
) -> list[list[list[str]]]:
    """Return the optimizer steps: lists of micro-batches of sample keys.

    The plan fixes the number of steps; if samples are excluded, steps are smaller.
    """
    config = request.settings(contracts.Update)
    passes, total = config.algorithm.mu_iterations, len(config.steps.lrs)
    if len(units) < (per_pass := total // passes):
        raise ArtifactError(
            f"{counted(len(units), algorithm.needs.unit)} can be trained on, fewer than the {per_pass} optimizer steps "
            "planned on them; raise batch_size_per_optimize, so that fewer steps are planned"
        )
    how = {"passes": passes, "per_pass": per_pass, "mini_batch": mini_batch, "num_shares": num_shares}
    return steps_of(units, **how, seed=request.seed, iteration=request.iteration or 0, kinds=_kinds(request, table))


def _kinds(request: Request, table: pd.DataFrame) -> dict[str, int]:
    """Return a number for the shapes of each sample's references, by the sample's key; empty without references."""
    numbers = kinds_of(request.inputs["rollouts"], request.settings(contracts.Update).model.path)
    found = zip(table["key"], table["prompt_id"], strict=True) if numbers else ()
    return {key: numbers[prompt] for key, prompt in found}


def _copies(config: contracts.Update) -> list[str]:
    """Return the copies other than ``current`` that this policy has."""
    kept = {
        OLD: config.old_decay is not None,
        EMA: config.keeps_ema,
        REFERENCE: config.reference != "base",
    }
    return [part for part, is_kept in kept.items() if is_kept]


def _check_rollouts(rollouts: list[Artifact], request: Request) -> None:
    """Check that the Request's sampler and behaviours made the rollouts: the loss compares with them.

    Raises :class:`ConfigError` if they did not, if rollouts differ in size, or if one is given twice.
    """
    manifests = [rollout.manifest for rollout in rollouts]
    if len({manifest.content for manifest in manifests}) != len(manifests):
        raise ConfigError("a rollout is given twice; name each one once")
    sample = request.settings(contracts.Update).sample.identity()
    if other := [m.config["sample"] for m in manifests if m.config["sample"] != sample]:
        raise ConfigError(f"the rollouts were sampled by {other[0]}, the update would replay {sample}")
    first, *others = (manifest.config["media"] for manifest in manifests)
    if other := [media for media in others if media != first]:
        raise ConfigError(f"rollouts of {first} and of {other[0]} do not train together; name rollouts of one size")
    init = [source.content for source in request.inputs.get(INIT, ())]
    if any([source.content for source in m.inputs[INIT]] != init for m in manifests if m.inputs.get(INIT)):
        raise ConfigError("a rollout was made on another frozen adapter than this update has")
    made_by = [manifest.inputs["policy"][0].content for manifest in manifests]
    given = [source.content for source in request.inputs["behaviours"]]
    if made_by != given:
        raise ConfigError(
            f"the rollouts were made by policies {[d[:12] for d in made_by]}, the behaviours given are "
            f"{[d[:12] for d in given]}"
        )
