"""Flow-DPO: make the better sample of a pair likelier than the worse one. arXiv:2501.13918, after arXiv:2311.12908."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cosmos_rl_core.algorithms._advantages import BEATS, DROPPED, HELD, rewards_of
from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.algorithms._needs import Needs, every_pair
from cosmos_rl_core.algorithms._preferences import read
from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import RewardedOptions
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.weights.parts import CURRENT, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd
    from torch import Tensor


class Options(RewardedOptions):
    """Flow-DPO on pairs of samples of one prompt."""

    type: Literal["dpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    mini_batch: int = Field(default=2, ge=2)
    """Number of samples per forward pass, two for each pair. Changes speed and memory; the gradient is the same up to
    rounding."""
    beta: float = Field(default=2000.0, gt=0)
    """Strength with which the policy is held near the reference: higher moves it less for the same preference. Errors
    are means over dimensions, so this is the papers' beta times their number of dimensions. Released code of
    Diffusion-DPO takes means too, with 2000 to 5000."""
    pairs: Literal["best_worst", "all", "file"] = "best_worst"
    """Pairs of a prompt's samples: ``best_worst``, the samples of the highest and of the lowest reward; ``all``,
    every two samples, so that n samples are in n - 1 pairs each; ``file``, the pairs that ``preferences`` names,
    whatever their rewards."""
    preferences: UserPath | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """File of human preferences for ``pairs = "file"``: lines of JSON, or a ``.csv`` with a header, with the ids of
    samples ``winner`` and ``loser``. Every node reads it. Pairs that a rollout lacks are counted, and a rollout that
    has none of them ends the run."""
    preferences_sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$", json_schema_extra={"neutral": ""})
    """Digest of that file. The plan fills it in."""
    preferences_count: int = Field(default=0, ge=0, json_schema_extra={"neutral": 0})
    """Number of pairs in that file. The plan fills it in."""
    min_gap: float = Field(default=0.0, ge=0)
    """Smallest difference of rewards of a pair, in the unit of the weighted sum of rewards. Pairs with a smaller
    difference, and pairs with equal rewards, are left out and counted."""
    timesteps_fraction: float = Field(default=0.99, gt=0, le=1)
    """Share of the rollout's noise levels that each pair is trained on, rounded down: .99 of 10 is 9."""
    update_ref_every_iter: int = Field(default=0, ge=0)
    """Iterations after which the reference becomes a copy of the current policy; 0 keeps the base model."""

    @model_validator(mode="after")
    def _file_of_pairs(self) -> Self:
        if (self.pairs == "file") != (self.preferences is not None):
            raise ValueError(
                "pairs = 'file' needs `preferences`, a file with the columns winner and loser"
                if self.pairs == "file"
                else f"preferences without effect: pairs = {self.pairs!r} takes rewards; set it to 'file'"
            )
        if self.pairs == "file" and self.min_gap:
            raise ValueError(f"min_gap = {self.min_gap:g} without effect: pairs = 'file' looks at no reward")
        return self

    def pinned(self) -> Self:
        """Return the settings with digest, size and absolute path of the file of preferences.

        Raises :class:`ConfigError` if it has another digest than the settings state, or lines that are not preferences.
        """
        if self.preferences is None:
            return self
        preferences, digest = read(self.preferences)
        if self.preferences_sha256 not in ("", digest):
            raise ConfigError(
                f"preferences = {self.preferences!r}: found sha256 {digest}, preferences_sha256 = "
                f"{self.preferences_sha256!r}; restore the file, or leave the digest out"
            )
        path = str(Path(self.preferences).absolute())
        facts = {"preferences_sha256": digest, "preferences_count": len(preferences)}
        return self.model_copy(update={"preferences": path} | facts)


class Algorithm:
    """Rollouts by the current policy. The loss compares the errors of both samples of a pair with the reference's."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.needs = Needs(
            roles=(CURRENT, REFERENCE),
            timesteps_fraction=options.timesteps_fraction,
            unit="pair",
            most_pairs=_one_pair if options.pairs == "best_worst" else every_pair,
            given_pairs=options.preferences_count,
            update_ref_every_iter=options.update_ref_every_iter,
        )

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Return ``samples`` with the columns ``beats``, ``dropped``, ``advantage`` and ``used``.

        ``dropped`` counts the pairs that a sample would have won but that are left out: rewards are equal or differ by
        less than ``min_gap``, or one sample of a pair from the file is not valid. An advantage is the share of its
        pairs that a sample wins minus the share that it loses.
        Samples that are not valid are in no pair. Samples that gates hold back have the lowest reward of their prompt,
        so they win no pair that rewards decide. Raises :class:`ArtifactError` if a valid sample has a reward that is
        not finite, or if no pair of the file has both its samples here.
        """
        rewards, ids = rewards_of(samples, "reward"), samples["sample_id"].tolist()
        beats: list[list[str]] = [[] for _ in ids]
        won, lost, dropped = np.zeros((3, len(ids)), np.int64)
        for better, worse, is_kept in self._given(samples) if self.options.pairs == "file" else self._ranked(samples):
            if is_kept and not np.isnan([rewards[better], rewards[worse]]).any():
                beats[better].append(ids[worse])
                won[better] += 1
                lost[worse] += 1
            else:
                dropped[better] += 1
        used = won + lost > 0
        advantages = np.where(used, (won - lost) / np.maximum(won + lost, 1), np.nan)
        pairs = {BEATS: [*map(" ".join, beats)], DROPPED: dropped}
        return samples.assign(advantage=advantages, used=used, **pairs)

    def _ranked(self, samples: pd.DataFrame) -> Iterator[tuple[int, int, bool]]:
        """Yield the row of the better sample, the row of the worse one, and whether their rewards differ enough.

        The pairs are ``best_worst`` or ``all``, as the options say.
        """
        rewards, prompts = rewards_of(samples, "reward"), samples["prompt_id"].to_numpy()
        held = samples[HELD].to_numpy(bool) if HELD in samples else np.zeros(len(samples), bool)
        for prompt in np.unique(prompts):
            members = np.flatnonzero((prompts == prompt) & ~np.isnan(rewards))
            # The best first; of equal rewards, samples that gates hold back last.
            ranked = members[np.lexsort((held[members], -rewards[members]))].tolist()
            ends = [(ranked[0], ranked[-1])] if len(ranked) > 1 else []
            for better, worse in combinations(ranked, 2) if self.options.pairs == "all" else ends:
                gap = rewards[better] - rewards[worse]
                yield better, worse, bool(gap > 0 and gap >= self.options.min_gap)

    def _given(self, samples: pd.DataFrame) -> Iterator[tuple[int, int, bool]]:
        """Yield the rows of winner and loser, and True, for each pair of the file with both samples here.

        Raises :class:`ArtifactError` if there is none, or if a pair compares samples of different prompts.
        """
        path = self.options.preferences
        assert path is not None
        preferences, _ = read(path, self.options.preferences_sha256)
        place = {name: number for number, name in enumerate(samples["sample_id"])}
        here = [one for one in preferences if one.winner in place and one.loser in place]
        if not here:
            such = f", such as {next(iter(place))}" if place else ""
            raise ArtifactError(
                f"preferences = {path!r} has {len(preferences)} pairs; none has both its samples among the "
                f"{len(place)} samples of this rollout{such}"
            )
        prompts = samples["prompt_id"].tolist()
        for one in here:
            better, worse = place[one.winner], place[one.loser]
            if prompts[better] != prompts[worse]:
                raise ArtifactError(
                    f"preferences = {path!r} compares {one.winner} and {one.loser}, which are of different prompts"
                )
            yield better, worse, True

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch) -> Loss:
        """Return ``-log sigmoid(margin)`` of each pair, for both of its samples: ``[B]`` float32.

        The margin is ``-beta / 2 ((e - e_ref) of the winner - (e - e_ref) of the loser)``, unitless, where ``e`` is the
        mean over generated dimensions of ``(v - (noise - x_0))²`` and ``e_ref`` the same for the reference. By
        the bound of the paper, it approximates how much log-likelihood the winner gained over the reference, minus the
        gain of the loser. Where current and reference are equal the loss is exactly log 2.
        Metrics: ``margin``; ``accuracy``, the share of pairs with a margin above 0; ``winner_error_change`` and
        ``loser_error_change``, ``e - e_ref`` of each. Both may rise; the margin is what trains.
        Source: Flow-DPO, arXiv:2501.13918, with the same weight at all noise levels. Its sum over dimensions is a mean
        here, so ``beta`` is the paper's times the number of dimensions. Diffusion-DPO, arXiv:2311.12908, is the origin.
        """
        reference = velocity(REFERENCE).detach()
        current = velocity(CURRENT)
        # e - e_ref as the mean of one product: a difference of two means would round more, and beta multiplies that.
        off = current + reference - 2 * (batch.noise - batch.x_0)
        change = batch.mean((current - reference) * off)
        winner, loser = change.unflatten(0, (-1, 2)).unbind(1)
        margin = self.options.beta / 2 * (loser - winner)
        losses = margin.new_zeros(margin.shape).logaddexp(-margin)
        metrics = {
            "margin": margin,
            "accuracy": (margin > 0).to(margin.dtype),
            "winner_error_change": winner,
            "loser_error_change": loser,
        }
        return Loss(_of_both(losses), {name: _of_both(value.detach()) for name, value in metrics.items()})


def _one_pair(size: int) -> int:
    return min(1, size // 2)


def _of_both(of_pairs: Tensor) -> Tensor:
    """Repeat the number of each pair for both of its samples: ``[B / 2] -> [B]``."""
    return of_pairs.repeat_interleave(2)
