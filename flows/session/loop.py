"""The loop: a run is taken through its waves, and each iteration ends with a head."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby

from flows.heads.heads import Heads
from flows.planning.base import AnyRun
from flows.planning.steps import Wave
from flows.post_train import post_train
from flows.session.current_waves import Take, left
from stages.artifacts.manifest import Manifest
from stages.registry import trains

NameOf = Callable[[Wave], str]
Grouped = Callable[[str, Callable[[], None]], None]
BLOCK = 50
"""Number of iterations in a group, in runs of more iterations."""


def _plainly(name: str, work: Callable[[], None]) -> None:
    work()


def make(
    run: AnyRun,
    launch: Callable[..., list[Manifest]],
    grouped: Grouped = _plainly,
    take: Take | None = None,
) -> Manifest:
    """Take the base policy through every wave. ``launch(name, *requests)`` makes a wave and returns its manifests.

    Each iteration ends with a head, which names all that was made. ``grouped`` is called with the name of each group of
    waves and with the work that makes them. With ``take``, waves that are already made are taken together instead.
    Returns the manifest of the report.
    """
    manifests: list[Manifest] = []
    heads = Heads(run)

    def ended(wave: Wave, found: Sequence[Manifest]) -> None:
        manifests[:] = found
        heads.add(manifests)
        trained = wave.steps[0]
        if trains(trained.kind) and trained.k is not None:
            heads.touch(run.drop_old_state(trained.k + 1))
            heads.write(trained.k)

    def one(wave: Wave) -> None:
        ended(wave, launch(wave.name, *(step.request() for step in wave.steps)))

    waves = post_train(run)
    if take is not None:
        waves = left([*waves], take, ended)
    _walk(waves, (partial(_block, run), partial(_group, run)), one, grouped)
    heads.write(None)
    return manifests[0]


def _walk(waves: Iterable[Wave], levels: Sequence[NameOf], work: Callable[[Wave], None], grouped: Grouped) -> None:
    """Work on every wave, in order, inside the groups of each level. Waves with an empty name are in no group."""
    if not levels:
        for wave in waves:
            work(wave)
        return
    for name, some in groupby(waves, key=levels[0]):
        inside = partial(_walk, some, levels[1:], work, grouped)
        grouped(name, inside) if name else inside()


def _block(run: AnyRun, wave: Wave) -> str:
    """Return the name of a wave's block of iterations, such as ``iterations-0050-0099``; "" in short runs."""
    k, last = wave.steps[0].k, run.recipe.train.num_iterations - 1
    if last < BLOCK or k is None:
        return ""
    # A policy is evaluated after the iteration that made it.
    k -= wave.parent.startswith("policy-")
    first = k - k % BLOCK
    return f"iterations-{first:04d}-{min(first + BLOCK - 1, last):04d}" if k >= 0 else ""


def _group(run: AnyRun, wave: Wave) -> str:
    """Return the iteration or the policy version of a wave; "" where an iteration is a single stage."""
    alone = wave.parent.startswith("iteration-") and not run.trains_on_rewards
    return "" if alone else wave.parent
