"""Run one stage from its request: ``python -m stages.execution.runner request.json``.

Under ``torch.distributed.run`` the process is one rank of the stage. Rank 0 commits the artifact. A failure writes
``error.<rank>.json`` next to the request.
Exit codes: 0 success, or the artifact is current; 64 config; 65 data; 75 unavailable; 70 any other failure.
"""

import argparse
import importlib
import os
import sys
import time
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.canonical import differences
from cosmos_rl_core.errors import ConfigError, CosmosRLError, NoSpaceError, counted
from cosmos_rl_core.imports import uncollected, without_torchvision_warnings
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.processes import die_with_parent, show_stacks_on_signal
from cosmos_rl_core.storage import store
from stages.artifacts.attempt import Attempt
from stages.artifacts.garbage import clear
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import FileEntry, Layout, Pinned
from stages.artifacts.request import Request
from stages.artifacts.slots import read_manifest
from stages.execution.context import Alone, Context, Ranks
from stages.execution.execution import Execution
from stages.execution.handing import HandedUnits, LeftError
from stages.execution.outcome import Outcome, failure_of
from stages.registry import module_of

SUMMARY = "Run one stage from request.json, with the settings of execution.json next to it."
REASON_TIMEOUT_S = 10.0
"""Seconds for which a rank that lost another one waits for the error file of that rank."""


def main(argv: list[str] | None = None) -> int:
    """Run the stage and return the exit code."""
    die_with_parent()
    show_stacks_on_signal()
    without_torchvision_warnings()
    parser = argparse.ArgumentParser(prog="python -m stages.execution.runner", description=SUMMARY)
    parser.add_argument("request", help="path of the request (JSON)")
    path = Path(parser.parse_args(argv).request)
    outcome = Outcome(path.parent, own_rank())
    try:
        execute(_read(path), _execution(path), outcome)
        outcome.finish()
    except LeftError as left:
        _tell(str(left))
    except Exception as error:
        return report(error, outcome)
    return 0


def report(error: Exception, outcome: Outcome) -> int:
    """Write the error file and the log of a rank that failed, and return its exit code."""
    distributed = sys.modules.get("cosmos_rl_core.parallel.distributed")
    failure = failure_of(error, collective=distributed is not None and distributed.is_collective(error))
    try:
        outcome.failed(failure)
        outcome.finish()
    except OSError as full:  # the log still has the message, and the exit code the kind
        _tell(f"the error file could not be written: {full}")
    _tell(failure.traceback if failure.kind == "crash" else f"{failure.kind}: {failure.message}")
    if failure.collective:
        # When this rank ends, torchrun ends the others of its node, which may not have written their errors yet.
        outcome.wait_for_reason(REASON_TIMEOUT_S)
    return failure.exit_code


def _tell(text: str) -> None:
    # A log on a full disk takes no text, and the exit code still tells the kind.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _read(path: Path) -> Request:
    """Return the Request. Import the plugins that it names first, because they validate their own settings."""
    data = path.read_bytes()
    outside_plugins.use(outside_plugins.named_in(data), verify=True)
    return Request.model_validate_json(data)


def _execution(request: Path) -> Execution:
    """Return the execution. Raises :class:`ConfigError` if the process group has another size."""
    execution = Execution.read(request)
    found, expected = int(os.environ.get("WORLD_SIZE", "1")), execution.parallelism.world_size
    if found != expected:
        raise ConfigError(
            f"{Execution.path_for(request)} is for {expected} ranks, this process group has {found}; start {expected}, "
            "or change parallelism.world_size"
        )
    return execution


def execute(request: Request, execution: Execution, outcome: Outcome) -> Manifest:
    """Make the Request's artifact unless it is current, and return its manifest on every rank.

    Raises :class:`LeftError` in a worker of an elastic stage that leaves the rest to others.
    """
    started_s = time.monotonic()
    outcome.progress("starting", 0, 1)
    require_own_version(request)
    ranks, found = joined(request, execution)
    if execution.units is None:
        return _make(request, execution, outcome, ranks, found, None, started_s)
    try:
        with closing(HandedUnits(Path(execution.units), execution.worker, ranks, found)) as handed:
            return _make(request, execution, outcome, ranks, found, handed, started_s)
    except LeftError:
        ranks.close()
        raise


def _make(
    request: Request,
    execution: Execution,
    outcome: Outcome,
    ranks: Ranks,
    found: dict[str, Any],
    handed: HandedUnits | None,
    started_s: float,
) -> Manifest:
    begun: list[Any] | None = None
    if ranks.rank == 0:
        generation, attempt_id, already = Attempt.begin(request, outcome.note)
        unfinished = Layout.read(request.slot, generation)
        halvings = (0 if unfinished is None else unfinished.halvings) + execution.halve
        begun = [generation, attempt_id, already is not None, halvings]
    generation, attempt_id, is_current, halvings = ranks.broadcast(begun)
    if not is_current:
        changes = _check_numerics(request, found, execution, outcome) if ranks.rank == 0 else []
        attempt = Attempt(request, found, generation, attempt_id)
        if handed is not None:
            attempt.told = handed.made
        try:
            with uncollected():
                stage = importlib.import_module(module_of(request.stage))
            outcome.clock.turn("load")
            summary = stage.run(request, Context(attempt, ranks, outcome, halvings, execution, handed)) or {}
            if (count := attempt.adopted) > 0:
                outcome.note(f"{counted(count, 'finished shard')} of an earlier attempt adopted")
            files = _gather_files(ranks, attempt)
            outcome.clock.finished(ranks.gather(outcome.clock.moved())[1:])
            if ranks.rank == 0:
                summary["seconds"] = round(time.monotonic() - started_s, 3)
                summary |= {"numerics_changed": ", ".join(changes)} if changes else {}
                # Before the commit: a kill between the two must not leave an artifact without pinned numerics.
                if execution.numerics_record is not None:
                    pinned = Pinned(stage=request.stage, numerics=found).sealed()
                    store.put_if_absent(execution.numerics_record, pinned)
                attempt.commit(files, summary, outcome.note)
        except NoSpaceError:
            # Otherwise each attempt would use more of the full store.
            with suppress(CosmosRLError):
                clear(request.slot, attempt.id)
            raise
        generation = ranks.broadcast(attempt.generation)
    # Not after an error: leaving a group whose other ranks wait may block, and would delay the error.
    ranks.close()
    manifest = read_manifest(request.slot, generation)
    assert manifest is not None
    return manifest


def require_own_version(request: Request) -> None:
    """Raise :class:`ConfigError` if the Request needs another version of the stage than this code has."""
    if request.version != request.config.version:
        raise ConfigError(
            f"this code has version {request.config.version} of {request.stage}, the request needs version "
            f"{request.version}: use the code that the run began with, or repeat the run's command with --remake"
        )


def _gather_files(ranks: Ranks, attempt: Attempt) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    written = {name: entry.model_dump() for name, entry in attempt.files.items()}
    for name, entry in chain.from_iterable(found.items() for found in ranks.gather(written)):
        if name in files and files[name].sha256 != entry["sha256"]:
            raise RuntimeError(f"two ranks wrote different bytes for {name}")
        files[name] = FileEntry.model_validate(entry)
    return files


def own_rank() -> int:
    """Return the number of this process among the ranks that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def joined(request: Request, execution: Execution) -> tuple[Ranks, dict[str, Any]]:
    """Set up this process, join the other ranks of a Request, and return the ranks and the numerics."""
    if not request.config.torch:
        return Alone(), numerics()
    # Imported here, so that light stages never load torch.
    with uncollected():
        torch_runtime = importlib.import_module("stages.execution.torch_runtime")
    ranks = torch_runtime.start(execution)
    return ranks, torch_runtime.numerics(ranks, getattr(request.config, "param_dtype", "float32"))


def _check_numerics(request: Request, found: dict[str, Any], how: Execution, outcome: Outcome) -> list[str]:
    """Return how the numerics differ from this stage's first artifact in the run.

    Raises :class:`ConfigError` if they differ and changes are not allowed.
    """
    if how.numerics_record is None:
        return []
    pinned = Pinned.read(how.numerics_record, request.stage)
    changes = [] if pinned is None else differences(pinned.numerics, found)
    if changes and not how.allow_numerics_change:
        raise ConfigError(
            f"this run began {request.stage} under other numerics ({', '.join(changes)}); its results would "
            "differ from an uninterrupted run's. Continue under the old numerics, or accept the change with "
            "--allow-numerics-change"
        )
    if changes:
        outcome.note(f"allowed change of numerics: {', '.join(changes)}")
    return changes


def leave(code: int) -> NoReturn:
    """End this process with an exit code, without cleaning up: what counts is in the store and in files by now.

    Python would take a second to take torch's modules down. After a failure, pending NCCL work or a waiting thread
    could block the exit.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
