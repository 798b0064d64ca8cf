"""Estimates of a run's time and device hours, from the ledger of an earlier run of the same shape, or its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cosmos_rl_core.errors import ArtifactError, counted
from cosmos_rl_core.storage import store
from flows.ledger.costs import device_time, duration
from flows.ledger.pages import Page, iteration_of, some_pages, url_of, work_of
from flows.ledger.shape import shape_of
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.plan import run_url
from flows.planning.run import run_of
from flows.post_train import post_train


class Mean(NamedTuple):
    """Averages of a wave."""

    wall_s: float
    device_s: float


Means = Mapping[str, Mean]
"""Means by the name of a wave without numbers (:func:`flows.ledger.pages.work_of`)."""


@dataclass(frozen=True)
class Like:
    """Another run of the same shape."""

    run: str
    means: Means

    @property
    def iteration_device_s(self) -> float:
        """Return the device seconds of an iteration."""
        return sum(mean.device_s for work, mean in self.means.items() if work.startswith("iteration/"))


@dataclass(frozen=True)
class Estimate:
    """The time and the device hours that a run will take, like another run."""

    like: str
    """Id of that run."""
    iteration_s: float
    iteration_device_s: float
    total_s: float
    total_device_s: float
    iterations: int
    unknown: tuple[str, ...]
    """Waves that the other run did not have; they are not counted."""

    def lines(self) -> list[str]:
        """Return the estimate in words."""
        each = f"{duration(self.iteration_s)}, {device_time(self.iteration_device_s)} of device time"
        total = f"{duration(self.total_s)}, {device_time(self.total_device_s)} of device time"
        lines = [
            f"an iteration like {self.like}'s: {each}",
            f"{counted(self.iterations, 'iteration')} in all, with preparation and evaluations: {total}",
        ]
        return lines + ([f"not counted, because {self.like} had none: {', '.join(self.unknown)}"] * bool(self.unknown))


def means_of(found: Iterable[Page]) -> dict[str, Mean]:
    """Return the means of waves whose attempts all made their artifacts."""
    every: dict[str, list[Page]] = {}
    for page in found:
        if page.state == "closed" and not any(entry.failed for entry in page.entries):
            every.setdefault(work_of(page.wave), []).append(page)
    return {
        work: Mean(sum(page.wall_s for page in some) / len(some), sum(page.device_s for page in some) / len(some))
        for work, some in every.items()
    }


def like_run(run: AnyRun, shape: str) -> Like | None:
    """Return the newest other run of the store whose first stage was of this shape; None without any."""
    root = store.join(store.absolute(run.store_url), "runs")
    names = sorted(store.names(root) - {run.plan.run_id})
    first = store.ahead(names, lambda name: _first_page(run_url(run.store_url, name)))
    same = [(page.began, name) for name, page in first if page is not None and page.shape == shape]
    for _, name in sorted(same, reverse=True):
        try:
            means = means_of(page for page in some_pages(run_url(run.store_url, name)) if page.shape == shape)
        except ArtifactError:
            continue  # `audit` of that run says so
        if any(work.startswith("iteration/") for work in means):
            return Like(name, means)
    return None


def _first_page(url: str) -> Page | None:
    try:
        data = store.read_if_exists(url_of(url, 0))
        return None if data is None else Page.unsealed(data, url, 0)
    except ArtifactError:
        return None


def estimate(plan: AnyPlan, store_url: str) -> Estimate | None:
    """Return the time and device hours of a whole run of this plan; None if the store has no other run of its shape."""
    run = run_of(plan, store_url)
    if (like := like_run(run, shape_of(plan))) is None:
        return None
    waves = [wave.name for wave in post_train(run)]
    inside = [wave for wave in waves if iteration_of(wave) is not None]
    count = plan.recipe.train.num_iterations
    total, parts = _sum(waves, like.means), _sum(inside, like.means)
    unknown = dict.fromkeys(work for work in map(work_of, waves) if work not in like.means)
    return Estimate(
        like=like.run,
        iteration_s=round(parts.wall_s / count, 3),
        iteration_device_s=round(parts.device_s / count, 3),
        total_s=round(total.wall_s, 3),
        total_device_s=round(total.device_s, 3),
        iterations=count,
        unknown=tuple(unknown),
    )


def _sum(waves: Sequence[str], means: Means) -> Mean:
    known = [means[work] for work in map(work_of, waves) if work in means]
    return Mean(sum(mean.wall_s for mean in known), sum(mean.device_s for mean in known))
