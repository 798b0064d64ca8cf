"""Let a suspended run go on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.errors import ConfigError
from flows.planning.base import AnyRun
from flows.planning.steps import read_run
from flows.post_train import steps
from flows.terminal.commands import kept
from flows.warning.decisions import Decision, decide, person
from flows.warning.warnings import SHOWN, Warned
from stages.artifacts.slots import current_of


@dataclass(frozen=True)
class Approval:
    """An approved warning."""

    run: str
    warned: Warned
    decision: Decision
    already: bool
    """Whether it had been approved before."""
    command: str = ""
    """The command of the run; "" if it is not known."""

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        yield from (f"iteration {self.warned.k}: {sentence}" for sentence in self.warned.tripped)
        what = f"evidence {self.warned.evidence[:SHOWN]}"
        if self.already:
            yield f"{what} was approved already, by {self.decision.by} at {self.decision.at}"
        else:
            yield f"approved {what}"
        again = f"paste `{self.command}`" if self.command else f"give the command of {self.run} again"
        yield f"to go on, {again}, or resume or retry its flow run"

    def as_json(self) -> dict[str, Any]:
        """Return the approval for scripts: the decision, its run and iteration, and whether it had been made before."""
        said = self.decision.model_dump(mode="json", exclude={"place"})
        return {"run": self.run, "iteration": self.warned.k, "already": self.already, **said}


def warnings_of(run: AnyRun) -> list[Warned]:
    """Return the warnings of a run in the order of iterations, from current artifacts of the stage ``warn``."""
    slots = (step.slot for step in steps(run) if step.kind == "warn")
    manifests = (current_of(slot)[1] for slot in slots)
    return [warned for manifest in manifests if manifest is not None and (warned := Warned.of(manifest)) is not None]


def approve(store_url: str, run_id: str, note: str = "") -> Approval:
    """Approve the warning that a run waits for, naming the digest of its evidence.

    Raises :class:`ConfigError` if the run does not exist or waits for nothing.
    """
    run = read_run(store_url, run_id)
    found = warnings_of(run)
    waits = [warned for warned in found if warned.waits]
    if not waits:
        return _approved_already(run, found)
    warned = waits[-1]
    decision = decide(warned.manifest, "approved", warned.tripped, person(), note)
    return Approval(run_id, warned, decision, False, kept(run))


def _approved_already(run: AnyRun, found: list[Warned]) -> Approval:
    """Return the newest warning if it was approved. Raises :class:`ConfigError` otherwise."""
    run_id = run.plan.run_id
    if not found:
        raise ConfigError(f"{run_id} has nothing to approve: no limit of early_warning tripped")
    warned, decided = found[-1], found[-1].decision
    if decided is None:
        raise ConfigError(f"{run_id} has nothing to approve yet: give its command again, and it is judged")
    if decided.word == "stopped":
        raise ConfigError(
            f"iteration {warned.k} stopped {run_id}, which no approval changes (early_warning.on_trip = 'stop'); to go "
            "on, give its command with other limits, or with `--set early_warning.on_trip=mark`"
        )
    if decided.word == "marked":
        raise ConfigError(f"{run_id} has nothing to approve: what tripped was marked, and the run went on")
    return Approval(run_id, warned, decided, True, kept(run))
