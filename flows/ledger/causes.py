"""Causes in words: what ended a flow, and why an attempt at a stage left no artifact."""

from cosmos_rl_core.errors import first_line
from flows.ledger.pages import Entry

GOES_ON = "; the same command continues it"
WITHOUT_A_WORD = "its flow ended before it could say why, as by kill -9 or with its machine"
_SIGTERM = "ended by SIGTERM, as by a cancellation in Prefect"
_PAUSE = "Pause"
_STOPS = {
    "KeyboardInterrupt": "stopped by Ctrl-C",
    _PAUSE: "suspended in Prefect",
    "TerminationSignal": _SIGTERM,
    "15": _SIGTERM,
}
"""Causes that stop a flow, by the message or else the class of the exception."""
_ASKED = "stopped by "
"""Beginning of the message of :class:`StoppedError`, before the name of somebody."""
_KINDS = {
    "killed": "killed from outside of its run: by SIGKILL, SIGTERM or a scheduler",
    "hung": "reported no progress or exceeded its time limit",
    "out_of_memory": "out of memory",
    "unavailable": "a store or a service did not answer",
    "crash": "crashed",
    "config": "a mistake in settings",
    "data": "data that it refused",
}
"""Kinds of failure."""
_ENDINGS = {
    "running": "Running",
    "finished": "Finished",
    "failed": "Failed",
    "suspended": "Suspended by early warning until somebody approves it",
    "limited": "Reached train.max_gpu_hours; the same command with a higher limit continues it",
    "interrupted": WITHOUT_A_WORD[0].upper() + WITHOUT_A_WORD[1:] + GOES_ON,
    "idle": "No process works on it",
}


def ending(state: str, error: str) -> tuple[str, str, str]:
    """Return three texts: the state on a run's page, a sentence on it without full stop, and the error to show or "".

    ``error`` is what :class:`flows.running.progress.Progress` holds: the message, or else the class of an exception.
    """
    if state != "stopped":
        return state, _ENDINGS[state], error
    cause = stop(error)
    cause = f"{cause[0].upper()}{cause[1:]}"
    if error == _PAUSE:
        return "suspended", f"{cause}; Resume or the same command continues it", ""
    return state, cause + GOES_ON, ""


def stop(error: str) -> str:
    """Return a phrase on what stopped a flow.

    ``error`` is the message, or else the class, of the exception that did; "" if that was not recorded.
    """
    if not error:
        return "stopped with its run; what stopped the run is not recorded"
    if error.startswith(_ASKED):
        return f"stopped with cosmos-flows stop by {error.removeprefix(_ASKED).removesuffix(GOES_ON)}"
    return _STOPS.get(error) or f"ended with its run: {first_line(error)}"


def cause(entry: Entry) -> str:
    """Return why an attempt left no artifact, as its ledger recorded it."""
    if entry.outcome == "stopped":
        return stop(entry.why)
    if entry.outcome == "open":
        return WITHOUT_A_WORD
    return _KINDS.get(entry.outcome, entry.outcome)
