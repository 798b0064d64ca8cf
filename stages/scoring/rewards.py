"""Rewards that a rollout's samples train with: weighted scores, mixed, of the samples that pass the gates."""

import math
from typing import cast

import numpy as np
import pandas as pd

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms._advantages import HELD, decoupled
from cosmos_rl_core.config.train import Gate, RewardOptions
from cosmos_rl_core.errors import ArtifactError, GateError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.formats.samples import read_index
from stages.formats.tables import read_table

PREFIX = "reward."
"""Beginning of the names of columns that have one weighted reward each."""


def rewarded(request: Request, rollout: Artifact) -> pd.DataFrame:
    """Return the samples of a rollout with their weighted rewards: the sum ``reward``, and one column per reward.

    ``valid`` is False for a sample that one of the rewards or gates could not score, or that a gate excludes. With
    gates, ``gate.<name>`` is the score, and ``gated`` says why a sample does not count with its own rewards, or is "".
    With a gate of ``on_fail = "worst"``, ``held`` says whether the sample gets the lowest rewards of its prompt. With
    ``mixing = "gdpo"`` rewards are normalised within their prompts, and ``score.<name>`` are the scores.

    Raises :class:`ArtifactError` unless there are scores of this very rollout by every reward and gate, and
    :class:`GateError` if a gate holds back more than its ``max_gated_fraction``.
    """
    config = request.settings(contracts.Update)
    samples = cast("pd.DataFrame", read_index(rollout)[["sample_id", "prompt_id", "finite"]])
    samples = samples.assign(reward=0.0, valid=True)
    scores = _scores_of(request, rollout)
    if scores.keys() != {*config.reward_weights, *config.gates}:
        raise ArtifactError(
            f"{rollout.url} has scores by {', '.join(scores) or 'no reward'}, this update trains on "
            f"{', '.join([*config.reward_weights, *config.gates])}; score this rollout by each of them"
        )
    raw: dict[str, np.ndarray] = {}
    for label in (*config.reward_weights, *config.gates):
        found = read_table(scores[label], contracts.Reward.SCORES).set_index("sample_id")
        found = found.reindex(samples["sample_id"])
        raw[label] = found["score"].astype("float64").to_numpy()
        samples["valid"] &= found["valid"].fillna(value=False).astype(bool).to_numpy()
    for label, weight in config.reward_weights.items():
        samples[PREFIX + label] = weight * raw[label]
        samples["reward"] += samples[PREFIX + label]
    samples["reward"] = samples["reward"].where(samples["valid"])
    mixing = getattr(config.algorithm, "mixing", "sum")
    if mixing == "gdpo":
        samples = samples.assign(**{f"score.{label}": raw[label] for label in config.reward_weights})
    if config.gates:
        samples = gated(samples.assign(**{f"gate.{label}": raw[label] for label in config.gates}), config.gates)
    if mixing == "gdpo":
        samples = decoupled(samples, config.reward_weights)
    return placed(samples) if HELD in samples else samples


def _scores_of(request: Request, rollout: Artifact) -> dict[str, Artifact]:
    """Return the scores of a rollout by reward label. Scores of other samples than the rollout's are left out."""
    found: dict[str, Artifact] = {}
    for artifact in map(Artifact, request.inputs["scores"]):
        (scored,) = artifact.manifest.inputs["samples"]
        if rollout.manifest.part_content(*scored.parts) == scored.content:
            found[label_of(artifact.manifest)] = artifact
    return found


def label_of(scores: Manifest) -> str:
    """Return the label of the reward that gave scores.

    A manifest lacks settings that change no result, such as the folder of a model, so the reward's options are not
    validated.
    """
    reward = scores.config["reward"]
    options: type[RewardOptions] = plugins.load("rewards", reward["name"]).Options
    return options.model_construct(**reward).label


def gated(samples: pd.DataFrame, gates: dict[str, Gate]) -> pd.DataFrame:
    """Return the samples with the column ``gated``; only samples that pass are valid and have a ``reward``.

    With a gate of ``on_fail = "worst"``, ``held`` marks the valid samples whose rewards :func:`placed` decides.
    """
    reasons: list[list[str]] = [[] for _ in range(len(samples))]
    valid, worst = samples["valid"].to_numpy(bool), np.zeros(len(samples), bool)
    for label, gate in gates.items():
        scores: list[float] = samples[f"gate.{label}"].tolist()
        told = [None if math.isnan(score) else gate.why_not(score) for score in scores]
        _refuse_too_many(label, gate, sum(one is not None for one in told), len(samples))
        for found, score, one in zip(reasons, scores, told, strict=True):
            found += [f"{label} has no score"] * math.isnan(score) + [f"{label} {one}: {gate.on_fail}"] * bool(one)
        failing = np.array([one is not None for one in told])
        valid, worst = (valid & ~failing, worst) if gate.on_fail == "exclude" else (valid, worst | failing)
    passing = valid & ~worst
    samples = samples.assign(valid=passing, reward=np.where(passing, samples["reward"].to_numpy(), np.nan))
    holds = any(gate.on_fail == "worst" for gate in gates.values())
    held = {HELD: worst & valid} if holds else {}
    return samples.assign(gated=["; ".join(found) for found in reasons], **held)


def placed(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples, in which each ``held`` sample gets the rewards of the worst valid sample of its prompt.

    That is the sample with the lowest ``reward``, after the rewards were mixed. If a prompt has no valid sample, its
    held samples stay invalid, because nothing tells how bad they are.
    """
    names = [name for name in samples.columns if name == "reward" or name.startswith(PREFIX)]
    prompts, valid = samples["prompt_id"].to_numpy(), samples["valid"].to_numpy(bool)
    rewards, source = samples["reward"].to_numpy(), np.arange(len(samples))
    for place in np.flatnonzero(samples[HELD].to_numpy(bool)):
        passing = np.flatnonzero(valid & (prompts == prompts[place]))
        if len(passing):
            source[place] = passing[np.argmin(rewards[passing])]
    return samples.assign(valid=valid[source], **{name: samples[name].to_numpy()[source] for name in names})


def held_back_prompts(samples: pd.DataFrame) -> int:
    """Return the number of prompts none of whose samples passes the gates, so that they teach nothing."""
    if "gated" not in samples:
        return 0
    prompts = [*zip(samples["rollout"], samples["prompt_id"], strict=True)]
    return len({*prompts} - {prompt for prompt, why in zip(prompts, samples["gated"], strict=True) if not why})


def _refuse_too_many(label: str, gate: Gate, gated: int, total: int) -> None:
    if gated > gate.max_gated_fraction * total:
        raise GateError(
            f"the gate {label} holds back {gated} of {total} samples, more than max_gated_fraction = "
            f"{gate.max_gated_fraction:g}; look at its scores, change its bounds in another run, or raise the fraction"
        )
