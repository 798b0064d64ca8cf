"""The gate before each update. It lets a run continue or ends its process, by limits that tripped and decisions."""

from collections.abc import Callable, Sequence

from cosmos_rl_core.config.early_warning import OnTrip
from cosmos_rl_core.errors import ApprovalError, WarningError
from flows.planning.base import AnyRun
from flows.planning.steps import find
from flows.post_train import steps
from flows.running import events, pauses
from flows.terminal.commands import about, to_go_on
from flows.warning.decisions import Word, decide
from flows.warning.warnings import Warned
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_manifest

BY_RECIPE = "the recipe"


def pass_gate(run: AnyRun, manifests: Sequence[Manifest], note: Callable[[str], None]) -> None:
    """Return if the run may continue after these artifacts, which may include warnings.

    Raises :class:`ApprovalError` if a person has to approve a warning, and :class:`WarningError` if the run ends.
    """
    on_trip = run.plan.early_warning.on_trip if run.plan.early_warning else "mark"
    for manifest in manifests:
        if manifest.stage == "warn" and (warned := Warned.of(manifest)) is not None:
            _pass_or_end(run, warned, on_trip, note)


def _pass_or_end(run: AnyRun, warned: Warned, on_trip: OnTrip, note: Callable[[str], None]) -> None:
    decided = warned.decision
    if decided is not None and decided.lets_pass and not _asks_now(run, warned, on_trip):
        return
    if decided is not None and decided.word == "suspended" and (said := pauses.resumed(warned.evidence)) is not None:
        note(f"iteration {warned.k}: {decide(warned.manifest, 'approved', warned.tripped, *said)}")
        return
    said = "\n  ".join([f"iteration {warned.k} exceeds its limits:", *warned.tripped, f"samples: {warned.page}"])
    if on_trip == "mark":
        _decide(run, warned, "marked")
        note(said)
    elif on_trip == "stop":
        _decide(run, warned, "stopped")
        change = "to go on all the same, change early_warning in the recipe"
        change += f", or: {command}" if (command := to_go_on(run, "stopped")) else ""
        raise WarningError(f"{said}\n  the run is stopped (early_warning.on_trip = 'stop'); {change}")
    else:
        _decide(run, warned, "suspended")
        command = about(run.store_url, "approve", run.plan.run_id)
        go_on = f"look at them, then `{command}`, or Resume in Prefect, lets the run go on"
        raise ApprovalError.on(warned.evidence, f"{said}\n  the run is suspended; {go_on}")


def _decide(run: AnyRun, warned: Warned, word: Word) -> None:
    """Write the recipe's decision, and emit an event unless the last decision was the same."""
    decide(warned.manifest, word, warned.tripped, BY_RECIPE)
    if warned.decision is None or warned.decision.word != word:
        events.warning_tripped(run, warned.k, warned.tripped, word, warned.page)


def _asks_now(run: AnyRun, warned: Warned, on_trip: OnTrip) -> bool:
    """Return whether the recipe now holds back a warning that it had only marked, and the update is not made yet.

    Nobody has looked at a warning that was only marked. After the update was made, nothing can be held back.
    """
    update = find(steps(run), run.plan.run_id, "update", warned.k)
    marked = warned.decision is not None and warned.decision.word == "marked"
    return marked and on_trip != "mark" and current_manifest(update.request()) is None
