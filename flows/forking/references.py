"""The references of a fork: every artifact of its origin that it begins with, or that its own recipe would make."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows.forking import given
from flows.lineage import forks
from flows.lineage.forks import EVERY, Fork, forks_of
from flows.planning.base import AnyRun
from flows.planning.steps import Step, read_run
from flows.post_train import post_train
from flows.running.wave import SCORERS
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import place_of
from stages.artifacts.slots import current_of, is_dropped, one_look, refer, suppose
from stages.contracts import MEDIA, TENSORS
from stages.registry import trains

ANY_PART: tuple[str, ...] = ()
"""Value in place of parts: all parts that an artifact has."""
AT_ONCE = 8
"""Most references that are written at once."""
_SLOT = re.compile(r"(policy|(?:iterations|exports)/(\d+)/[^/]+)/manifest\.\d+\.json")


def refer_to_origin(run: AnyRun) -> int:
    """Write the references of a fork, and records of it in the folders of the runs that own the artifacts.

    Returns the number of new references; 0 if they were written before: artifacts that the origin makes later are no
    part of a fork, except rollouts that it trains on. After a kill another call writes the rest. Raises
    :class:`ConfigError` if retention deleted parts that the fork reads.
    """
    begins = run.plan.origin
    assert begins is not None
    origin = read_run(run.store_url, begins.run)
    wanted = given.rollouts(run, origin) if begins.stored is not None else {}
    was = _record(origin.url, run)
    if was is not None and EVERY not in was.holds and all(current_of(slot)[1] is not None for slot in wanted):
        return 0
    every = found_in_origin(run)
    # Artifacts that the fork has made itself stay, even if its origin has them by now.
    new = {slot: made for slot, made in every.items() if current_of(slot)[1] is None}
    with one_look():
        for slot, made in new.items():
            suppose(slot, made)
        held = _read_by(run, every)
    owners = {origin.url} | {_owner(run, made) for made in (*every.values(), *held)}
    # Records come before references, so that no artifact is deleted in between.
    for owner in owners:
        forks.note(owner, _with(_record(owner, run), run, begins.at, holds=(EVERY,)))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(refer, new, new.values()):
            pass
    current = [made for slot in every if (made := current_of(slot)[1]) is not None and made.slot != slot]
    for owner in owners:
        read = [made for made in held if _owner(run, made) == owner]
        named = [made for made in (*current, *read) if _owner(run, made) == owner]
        holds = tuple(dict.fromkeys(place_of(made.slot) for made in read))
        forks.note(owner, _with(_record(owner, run), run, begins.at, named, holds))
    if begins.alike:
        _keep_scorers(origin.url, run.url)
    return len(new)


def _record(owner: str, run: AnyRun) -> Fork | None:
    """Return the record of a fork in the folder of a run that has artifacts for it; None before there is one."""
    return next((fork for fork in forks_of(owner) if fork.run == run.plan.run_id), None)


def _with(was: Fork | None, run: AnyRun, at: int, named: Sequence[Manifest] = (), holds: tuple[str, ...] = ()) -> Fork:
    """Return the record ``was`` with references to ``named`` as well. ``holds`` replaces its own, unless EVERY."""
    places = {} if was is None else {place: {*generations} for place, generations in was.references.items()}
    for made in named:
        places.setdefault(place_of(made.slot), set()).add(made.generation)
    references = {place: tuple(sorted(generations)) for place, generations in sorted(places.items())}
    kept = was.holds if was is not None and holds == (EVERY,) else ()
    return Fork(run=run.plan.run_id, at=at, references=references, holds=tuple(dict.fromkeys((*kept, *holds))))


def found_in_origin(run: AnyRun) -> dict[str, Manifest]:
    """Return the artifacts that a fork begins with, by their slots in the fork. Writes nothing."""
    begins = run.plan.origin
    assert begins is not None
    origin = read_run(run.store_url, begins.run)
    unchanged = run.plan.recipe.identity() == origin.plan.recipe.identity()
    with one_look():
        found = dict(_before(origin, begins.at, run.url))
        if begins.stored is not None:
            found |= given.rollouts(run, origin)
            if begins.at == 0:
                # The fork makes policy 0 itself, because its settings may differ.
                found.pop(run.slots.policy(0), None)
        for slot, made in found.items():
            suppose(slot, made)
        for wave in post_train(run):
            own = [step for step in wave.steps if step.slot.startswith(f"{run.url}/") and step.kind != "report"]
            for step in own:
                made = current_of(_moved(step.slot, run.url, origin.url))[1]
                if made is not None and _is_same(made, step) and (unchanged or _is_whole(made)):
                    found[step.slot] = made
                    suppose(step.slot, made)
            if run.plan.generates and any(trains(step.kind) and step.slot not in found for step in own):
                break
    return found


def _read_by(run: AnyRun, found: Mapping[str, Manifest]) -> list[Manifest]:
    """Return the artifacts that the stages of a fork read: the newest policy, the rollouts after it and, if these are
    its origin's, the policies that made them.

    Raises :class:`ConfigError` if one has lost a part.
    """
    newest = next(k for k in itertools.count(run.plan.first) if run.slots.policy(k + 1) not in found)
    until = newest + run.staleness + 1 if run.plan.generates else run.recipe.train.num_iterations
    policies = (run.slots.policy(k) for k in range(max(0, newest - run.staleness), newest + 1))
    rollouts = (run.slots.iteration(k, "rollout") for k in range(newest, until))
    read = [(found[slot], ANY_PART) for slot in policies if slot in found]
    # Updates read the tensors of a stored rollout. Its scores exist, or :mod:`flows.forking.given` looks for its media.
    read += [(found[slot], ANY_PART if run.plan.generates else (TENSORS,)) for slot in rollouts if slot in found]
    if not run.plan.generates:
        read += given.makers(run, range(newest, until))
    for made, parts in read:
        if lost := sorted(part for part in _lost(made) if not parts or part in parts):
            raise ConfigError(
                f"{made.slot} has lost {', '.join(lost)}, which retention of its run deleted; fork at a later policy "
                "version, or keep more (rollout.keep, train.ckpt.max_keep)"
            )
    return [made for made, _ in read]


def _owner(run: AnyRun, made: Manifest) -> str:
    """Return the folder of the run that has an artifact."""
    _, name, *_ = place_of(made.slot).split("/")
    return store.join(run.url.rpartition("/")[0], name)


def _before(origin: AnyRun, at: int, fork_url: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the origin's artifacts up to a policy version, and that version, each after its slot in the fork."""
    slots = {match[1]: match[2] for name in store.listed(origin.url) if (match := _SLOT.fullmatch(name))}
    for slot, number in sorted(slots.items()):
        made = current_of(store.join(origin.url, slot))[1] if number is None or int(number) < at else None
        if made is not None:
            yield store.join(fork_url, slot), made


def _is_same(made: Manifest, step: Step) -> bool:
    """Return whether an artifact is current for a step; False while an input of the step is missing."""
    try:
        return made.why_not(step.request()) is None
    except ArtifactError:
        return False


def _lost(made: Manifest) -> Iterator[str]:
    yield from (part for part in {name.partition("/")[0] for name in made.files} if is_dropped(made, part))


def _is_whole(made: Manifest) -> bool:
    """Return False for a rollout that lost media or tensors, which the fork may read; True for any other artifact."""
    return not (made.stage == "rollout" and {*_lost(made)} & {MEDIA, TENSORS})


def _moved(slot: str, old: str, new: str) -> str:
    return new + slot.removeprefix(old)


def _keep_scorers(origin_url: str, fork_url: str) -> None:
    """Pin for the fork the scorers of services that its origin has pinned."""
    folder = store.join(origin_url, SCORERS)
    for name in store.names(folder):
        store.put_if_absent(store.join(fork_url, SCORERS, name), store.read(store.join(folder, name)))
