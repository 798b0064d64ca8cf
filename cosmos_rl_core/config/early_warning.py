"""Early warning: limits on the scores of rollouts, judged before each update."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from pydantic import Field, model_validator

from cosmos_rl_core.config.base import Section

OnTrip = Literal["mark", "suspend", "stop"]
STATISTICS = "pixel_statistics"
"""Reward whose scores are monitored by default."""
FRAMES_OF_FLICKER = 3
"""Fewest frames of a video that has the statistic ``flicker``."""


class Limit(Section):
    """Bounds on the mean of one score over the samples of an iteration. It trips if the mean is outside of one."""

    reward: str
    """The reward that gives the score, by its name in ``[[rewards]]``."""
    score: str | None = None
    """Name of one of the scores that the reward returns. Default: the score that has the reward's name."""
    below: float | None = None
    """Trip if the mean is below this number."""
    above: float | None = None
    """Trip if the mean is above this number."""
    fall: float | None = Field(default=None, gt=0)
    """Trip if the mean is lower than at iteration 0 by more than this many standard errors of their difference.
    Standard errors are taken over prompts, because samples of one prompt are alike."""
    rise: float | None = Field(default=None, gt=0)
    """Trip if the mean is higher than at iteration 0 by more than this many standard errors of their
    difference."""

    @property
    def name(self) -> str:
        """Return the name of the score among the reward's scores."""
        return self.score or self.reward

    @model_validator(mode="after")
    def _bounds(self) -> "Limit":
        if self.below is self.above is self.fall is self.rise is None:
            raise ValueError(f"the limit on {self.reward} has no bound; give it below, above, fall or rise")
        return self


class EarlyWarningConfig(Section):
    """Limits on the scores of every rollout, judged when it is scored and before the update that trains on it. Can be
    changed when a run is continued; scores that were already judged are then judged again."""

    on_trip: OnTrip = "mark"
    """Effect of a limit that trips. ``mark`` records it and goes on. ``suspend`` ends the process; the run goes on
    after ``cosmos-flows approve RUN``. ``stop`` ends the run as failed."""
    statistics: bool = True
    """Whether the statistics of pixels of every rollout are monitored, with limits of their own: the reward
    ``pixel_statistics``. A limit on one of its scores replaces the default one."""
    limits: tuple[Limit, ...] = ()
    """The limits, each a table ``[[early_warning.limits]]``."""


DRIFT = 8.0
"""Standard errors of the default limits. docs/results.md has how often they trip in runs with honest rewards."""
_BOTH = {"fall": DRIFT, "rise": DRIFT}
DEFAULTS: dict[str, dict[str, float]] = {
    **dict.fromkeys(("luma", "contrast", "edge_density", "colour_entropy", "fine_energy", "flicker"), _BOTH),
    # Fewer artefacts, and more differences between the samples of a prompt, are no warning.
    "grid_energy": {"rise": DRIFT},
    "group_diversity": {"fall": DRIFT},
    # Only a rise: the limits on contrast and luma notice pictures that get calmer.
    "block_deviation": {"rise": DRIFT},
    "border_deviation": {"rise": DRIFT},
    "block_contrast": {"rise": DRIFT},
}
"""Limits on the statistics of pixels."""


def with_defaults(warning: EarlyWarningConfig | None, frames: int) -> EarlyWarningConfig:
    """Return the settings as a plan keeps them: with default limits on statistics of samples of ``frames`` frames."""
    warning = warning or EarlyWarningConfig()
    if not warning.statistics:
        return warning
    own = {(limit.reward, limit.name) for limit in warning.limits}
    absent = {"flicker"} if frames < FRAMES_OF_FLICKER else set[str]()
    names = [name for name in DEFAULTS if name not in absent and (STATISTICS, name) not in own]
    defaults = (Limit.model_validate({"reward": STATISTICS, "score": name, **DEFAULTS[name]}) for name in names)
    return warning.model_copy(update={"limits": (*warning.limits, *defaults)})


def mistakes(warning: EarlyWarningConfig, rewards: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield a sentence for each limit on an unknown score, and for each score with two limits.

    ``rewards`` has the declared scores of each reward of the recipe; it is empty for a reward that declares none.
    """
    seen: set[tuple[str, str]] = set()
    scores = {**({STATISTICS: DEFAULTS} if warning.statistics else {}), **rewards}
    for limit in warning.limits:
        known = scores.get(limit.reward)
        if known is None:
            there = ", ".join([*rewards, *(scores.keys() - rewards.keys())]) or "none"
            yield f"early_warning.limits: there is no reward {limit.reward!r}; known: {there}"
        elif known and limit.name not in (limit.reward, *known):
            named = ", ".join(known)
            yield f"early_warning.limits: {limit.reward} gives no score {limit.name!r}; known: {named}"
        if (limit.reward, limit.name) in seen:
            yield f"early_warning.limits: two limits on {limit.name!r} of {limit.reward!r}; give all bounds in one"
        seen.add((limit.reward, limit.name))
