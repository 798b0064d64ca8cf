"""The outlook of a run: its reward before training and now, the time that is left, its cost so far, its report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from flows.ledger.costs import device_time, duration
from flows.ledger.estimates import Means, like_run, means_of
from flows.ledger.pages import Page, iteration_of, newest_page, some_pages, work_of
from flows.ledger.shape import shape_of
from flows.planning.base import AnyRun
from flows.running.progress import Progress
from stages.reporting.contracts import Report
from stages.scoring.summaries import known_error

if TYPE_CHECKING:
    from flows.library.states import State


@dataclass(frozen=True)
class Score:
    """The mean score of some samples."""

    k: int
    """The policy version, or the iteration of a rollout."""
    mean: float
    standard_error: float | None
    """Standard error of the mean over prompts; None for a single prompt."""

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.standard_error is None else f" ± {self.standard_error:.3f}")


@dataclass(frozen=True)
class Change:
    """A reward before training and now."""

    of: str
    """Name of the reward, such as ``held-out ocr``, or ``ocr of rollouts`` in a run that evaluates nothing."""
    counted: str
    """``policy`` or ``iteration``: the numbers ``k`` count them."""
    before: Score
    after: Score

    def __str__(self) -> str:
        before, after = (f"{score} ({self.counted} {score.k})" for score in (self.before, self.after))
        return f"{self.of}: {before} -> {after}"


@dataclass(frozen=True)
class Outlook:
    """Facts of a run that follow from more than the states of its stages."""

    change: Change | None
    """Change of the headline reward; None without two scores."""
    left_s: float | None
    """Seconds of work that is left, estimated from this run or one of its shape; None if unknown, or at its end."""
    device_s: float | None
    """Device seconds until now; None without a ledger."""
    report: str
    """Address of its report; "" before there is one."""
    others: tuple[Change, ...] = ()
    """Changes of the other rewards."""

    def lines(self) -> list[str]:
        """Return the lines to print."""
        lines = [str(change) for change in (self.change, *self.others) if change is not None]
        spent = [] if self.device_s is None else [f"{device_time(self.device_s)} of device time spent"]
        left = [] if self.left_s is None else [f"about {duration(self.left_s)} of work left"]
        lines += [", ".join([*left, *spent])] * bool(left or spent)
        return lines + [f"report: {self.report}"] * bool(self.report)


def outlook(run: AnyRun, states: Sequence["State"], progress: Progress, means: Callable[[], Means]) -> Outlook:
    """Return the outlook of a run. ``means`` returns the mean of each kind of wave, like :func:`known_means`."""
    report = store.join(run.slots.report, Report.PAGE)
    return Outlook(
        change=change_of(run, states, run.headline_reward),
        left_s=_left_s(states, progress, means),
        device_s=spent_s(run),
        report=report if store.size(report) is not None else "",
        others=tuple(change for label in _others(run) if (change := change_of(run, states, label)) is not None),
    )


def known_means(run: AnyRun) -> Means:
    """Return the mean seconds of each kind of wave, from this run or else from an earlier run of its shape."""
    try:
        own = means_of(some_pages(run.url))
        if any(work.startswith("iteration/") for work in own):
            return own
        like = like_run(run, shape_of(run.plan))
    except ArtifactError:  # `audit` says so
        return {}
    return own if like is None else {**like.means, **own}


def spent_s(run: AnyRun) -> float | None:
    """Return the device seconds of a run until now; None without a ledger, or with a damaged one."""
    try:
        newest = newest_page(run.url)
    except ArtifactError:
        return None
    return None if newest is None else newest.totals.device_s


def iterations_left_s(run: AnyRun, iterations: int, newest: Page | None) -> float | None:
    """Return the seconds of the iterations that are left, each like the mean so far; None if unknown, or at the end.

    ``iterations`` is the number that have ended, ``newest`` the newest page of the ledger.
    """
    left = run.recipe.train.num_iterations - iterations
    if newest is None or iterations == 0 or left <= 0:
        return None
    return round(left * newest.totals.iterations_s / iterations, 1)


def _left_s(states: Sequence["State"], progress: Progress, means: Callable[[], Means]) -> float | None:
    waves = dict.fromkeys(state.step.wave for state in states if state.word != "stands")
    return waves_left_s([*waves], means, progress)


def waves_left_s(waves: Sequence[str], means: Callable[[], Means], progress: Progress | None = None) -> float | None:
    """Return the seconds that some waves will take, less the seconds of the newest so far; None if unknown.

    It is unknown without waves, and if a wave of iterations has no mean. Other waves without a mean are left out.
    """
    if not waves:
        return None
    known, inside = means(), [wave for wave in waves if iteration_of(wave) is not None]
    if any(work_of(wave) not in known for wave in inside):
        return None
    seconds = {wave: known[work_of(wave)].wall_s for wave in waves if work_of(wave) in known}
    if progress is not None and progress.wave in seconds:
        seconds[progress.wave] = max(0.0, seconds[progress.wave] - progress.seconds)
    return round(sum(seconds.values()), 1) if seconds else None


def _others(run: AnyRun) -> list[str]:
    return [reward.fn.label for reward in run.recipe.rewards if reward.fn.label != run.headline_reward]


def change_of(run: AnyRun, states: Sequence["State"], reward: str) -> Change | None:
    """Return a reward of the first and the last judged policy, else of rollouts; None without two scores."""
    for stage, of, counted in (
        (f"evaluate-{reward}", f"held-out {reward}", "policy"),
        (f"reward-{reward}", f"{reward} of rollouts", "iteration"),
    ):
        found = [score for state in states if state.step.stage == stage and (score := score_of(state)) is not None]
        if len(found) > 1:
            return Change(of, counted, found[0], found[-1])
    return None


def score_of(state: "State") -> Score | None:
    """Return the mean score of a stage with a current artifact; None for a stage without scores."""
    if state.word != "stands" or state.manifest is None or state.reward is None:
        return None
    return Score(state.step.k or 0, state.reward, known_error(state.manifest))
