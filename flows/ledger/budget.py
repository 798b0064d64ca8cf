"""The limit of a run's device hours, ``train.max_gpu_hours``."""

from collections.abc import Sequence

from cosmos_rl_core.errors import BudgetError
from flows.ledger.estimates import like_run
from flows.ledger.ledger import Ledger
from flows.ledger.pages import HOUR_S, iteration_of
from flows.planning.base import AnyRun
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest

RECENT = 3
"""Number of newest iterations; the next one is predicted to cost as much as the most expensive of them."""


class Budget:
    """The device hours that are left, checked before each wave."""

    def __init__(self, run: AnyRun, ledger: Ledger) -> None:
        self._run, self._ledger = run, ledger
        self._allowed: set[int] = set()
        """Iterations that fit into the limit."""

    def check(self, wave: str, requests: Sequence[Request]) -> None:
        """Raise :class:`BudgetError` before the first stage of an iteration that would exceed the limit.

        Waves that belong to no iteration always pass.
        """
        limit_h, k = self._run.recipe.train.max_gpu_hours, iteration_of(wave)
        if limit_h is None or k is None:
            return
        if k in self._allowed or all(current_manifest(request) is not None for request in requests):
            return
        spent_s = self._ledger.totals.device_s
        here_s, others_s = self._of_iterations(k)
        next_s = max(0.0, max(others_s, default=0.0) - here_s)
        if spent_s + next_s > limit_h * HOUR_S or spent_s >= limit_h * HOUR_S:
            known = f", and an iteration takes {_hours(next_s)}" if next_s else ""
            raise BudgetError(
                f"iteration {k} would exceed train.max_gpu_hours = {limit_h:g}: {_hours(spent_s)} are spent{known}; "
                "everything made stays. To go on, repeat the command with a higher --set train.max_gpu_hours"
            )
        self._allowed.add(k)

    def _of_iterations(self, k: int) -> tuple[float, list[float]]:
        """Return the device seconds of iteration k so far, and of the newest before it, or of one of another run."""
        known = self._ledger.iterations
        others = [known[i] for i in sorted(known) if i < k][-RECENT:]
        if not others and (like := like_run(self._run, self._ledger.shape)) is not None:
            others = [like.iteration_device_s]
        return known.get(k, 0.0), others


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR_S:.3g} device hours"
