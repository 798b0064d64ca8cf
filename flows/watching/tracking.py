"""Write a run's ``metrics.jsonl`` and send its numbers to the console and wandb. Only damaged files end the run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from cosmos_rl_core.errors import ArtifactError, CosmosRLError, UnreadableError
from cosmos_rl_core.storage import store
from flows.planning.base import AnyRun
from flows.planning.plan import METRICS_FILE
from flows.watching.metrics import Line, MetricsFile, steps_after, wave_lines
from flows.watching.wandb_run import Wandb
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.reporting.contracts import Fragment

Note = Callable[[str], None]


class Tracker:
    """A follower of a run: :meth:`done` is called after each wave, in the order of the loop."""

    def __init__(self, run: AnyRun, note: Note) -> None:
        self._headline = run.headline_reward
        self._note = note
        self._steps = 0
        self._seen: set[str] = set()
        self.rests = False
        """Whether the file in the store is known to have all lines."""
        self.finished: str | None = None
        """Digest of the file of the finished run, once it is written; None if the file lacks anything."""
        self._whole = True
        url = store.join(run.url, METRICS_FILE)
        self._file = MetricsFile(url, self._try(partial(store.read_if_exists, url)) or b"")
        logger = run.recipe.logging.logger
        self._prints = "console" in logger
        self._wandb = Wandb(run, note) if "wandb" in logger else None
        self.sends = self._wandb is not None
        """Whether wandb gets the lines too, from every process that works on the run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.rests:
            self._try(partial(self._file.write, whole=kind is None))
            self.finished = self._file.digest if self._whole and kind is None else None
        if self._wandb is not None:
            self._wandb.finish(failed=kind is not None)

    def done(self, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
        """Add the numbers of a wave that was made. Writes the file after an update or an evaluation."""
        lines = self.passed(requests, manifests)
        if any(steps_after(request) is not None for request in requests) or (lines and lines[-1].is_evaluation):
            self._try(self._file.write)

    def taken(self) -> None:
        """Write the lines of waves that were already current, which the file of a new fork lacks."""
        self._try(self._file.write)

    def passed(self, requests: Sequence[Request], manifests: Sequence[Manifest]) -> list[Line]:
        """Add the numbers of a current wave, and return its lines. They are written with later ones."""
        pairs = [pair for pair in zip(requests, manifests, strict=True) if pair[1].digest not in self._seen]
        self._seen |= {manifest.digest for _, manifest in pairs}
        lines = self._try(partial(wave_lines, pairs, self._steps, self._headline)) or []
        self._steps = max(self._steps, *(steps_after(request) or 0 for request in requests))
        if self._wandb is not None:
            self._wandb.log(lines)
            for request, manifest in pairs:
                if isinstance(config := request.config, Fragment):
                    self._wandb.show(Line("fragment", request.iteration or 0, self._steps, {}), manifest, config)
        new = [line for line in lines if self._file.add(line.encode())]
        if self._prints:
            for line in new:
                self._note(f"  {'  '.join(_shown(key, value) for key, value in line.known)}")
        return lines

    def _try(self, action: Callable[[], Any]) -> Any:
        """Return the action's result; warn and return None if the store does not answer or the file cannot be read.

        Raises :class:`ArtifactError` if a table is damaged.
        """
        try:
            return action()
        except CosmosRLError as error:
            if isinstance(error, ArtifactError) and not isinstance(error, UnreadableError):
                raise
            self._whole = False
            advice = "the same command again completes it"
            self._note(f"warning: {METRICS_FILE} is not complete; {advice}: {error}")
            return None


def _shown(key: str, value: Any) -> str:
    return f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
