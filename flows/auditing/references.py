"""References of a fork: the artifacts that it names, and its records in the runs that own them."""

from collections.abc import Callable, Iterable

from cosmos_rl_core.storage import store
from flows.auditing.checks.faults import Findings
from flows.auditing.slot import Slot
from flows.heads.heads import slots_in
from flows.lineage.forks import FORKS, forks_of, refers
from flows.planning.base import AnyRun
from flows.planning.steps import Step
from stages.artifacts.records import place_of, store_of

Look = Callable[[str], Slot]
"""Function that reads the slot with a URL."""


def begun_with(run: AnyRun, every: Iterable[Step], findings: Findings) -> list[Slot]:
    """Return the slots of a fork that refer to artifacts which its origin made before the fork began.

    Slots that no step has and that hold files are left out: these are listed with the files that nothing names.
    """
    if run.plan.origin is None:
        return []
    others = {store.join(run.url, slot) for slot in slots_in(run.url)} - {step.slot for step in every}
    found = (Slot(url, findings) for url in sorted(others))
    return [slot for slot in found if slot.manifests and not slot.own]


def check(run: AnyRun, slots: Iterable[Slot], look: Look, findings: Findings) -> None:
    """Check the artifacts that slots refer to, and the record of the fork in each run that owns one of them."""
    for slot in slots:
        made = slot.current
        if made is None or made.slot == slot.url:
            continue
        look(made.slot).need(made.generation)
        _, owner, *_ = place_of(made.slot).split("/")
        folder = store.join(store_of(made.slot), "runs", owner)
        with findings.catching(store.join(folder, FORKS), "fork"):
            own = [fork for fork in forks_of(folder) if fork.run == run.plan.run_id]
            if not refers(own, made.slot, made.generation):
                told = f"none of {run.plan.run_id} names {place_of(made.slot)}: `gc` may delete its files"
                findings.add(store.join(folder, FORKS), "references", told)


def check_forks(run: AnyRun, findings: Findings) -> None:
    """Check that the records of a run's forks can be read."""
    with findings.catching(store.join(run.url, FORKS), "fork"):
        list(forks_of(run.url))
