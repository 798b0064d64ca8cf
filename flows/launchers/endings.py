"""Classify the end of a stage process without an error file, by its exit code and the last lines of its log.

Only lines in the exact form of a runtime or a scheduler count, because a log also quotes prompts.
"""

import re
from collections.abc import Sequence

from cosmos_rl_core.errors import EXIT_CODES
from cosmos_rl_core.foreign_errors import means_out_of_memory
from flows.launchers._base import JobState

KIND_OF_EXIT = {code: kind for kind, code in EXIT_CODES.items()}
"""Kind of failure by the runner's exit code, which is set even if the error file could not be written."""
READ = 2000
"""Number of last lines of a log that are read: each rank may add a trace of its C++ frames."""

_PREFIX = re.compile(r"(?:\d+: ?)?(\[rank\d+\]: |\[[a-z_]+\d+\]:)?")
"""Prefix of a rank's line by srun, PyTorch or torchrun."""
_KILLED = re.compile(r"^\s*exitcode\s*:\s*-9\b", re.MULTILINE)
_EXITED = re.compile(r"\s*exitcode\s*:\s*(-?\d+)\b")
_OUT_OF_MEMORY = re.compile(
    r"^slurmstepd(?:-[\w.-]+)?: (?:error: )?.*\bDetected \d+ oom[-_]kill event"
    r"|^srun: error: \S+: tasks? [\d,-]+: Out Of Memory"
    # Last lines of Rust and OpenMP before they abort.
    r"|^memory allocation of \d+ bytes failed$|^libgomp: Out of memory allocating \d+ bytes",
    re.MULTILINE,
)
_ABORTED = re.compile(r"^terminate called after throwing an instance of '([^']*)", re.MULTILINE)
_ABORTED_FOR_MEMORY = re.compile(r"(?:[\w<: ]*\W)?(?:bad_alloc|OutOfMemoryError|out_of_memory)>*")
"""Names of C++ classes."""
_SAYS = r"(?:\s+what\(\):)+\s+"
_NEXT = rf"\s*$|{_SAYS}|Exception raised from |frame #\d+:|terminate called "
_WHAT = re.compile(rf"^{_SAYS}(.*(?:\n(?!{_NEXT}).*)*)", re.MULTILINE)
"""Message of an uncaught C++ error, without the trace below it."""
_RAISED = re.compile(
    r"^((?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s+)?"
    r"Traceback \(most recent call last\):\n(?:  .*\n)+([A-Za-z_][\w.]*)(?:: (.*))?$",
    re.MULTILINE,
)
"""Link to the traceback before, class and message of a Python error."""


def kind_of(state: JobState, log: Sequence[str]) -> str:
    """Return the kind of failure of a process that ended with ``state`` and wrote the lines ``log``."""
    ranks: dict[str, str] = {}
    for match in filter(None, map(_PREFIX.match, log[-READ:])):
        ranks[match[1]] = ranks.get(match[1], "") + match.string[match.end() :] + "\n"
    if any(map(_ran_out_of_memory, ranks.values())):
        return "out_of_memory"
    # Torchrun always exits with 1. Only its report tells how a worker ended.
    if state.killed or any(map(_KILLED.search, ranks.values())):
        return "killed"
    return KIND_OF_EXIT.get(state.exit_code or 0, "crash")


def exits_of_ranks(log: Sequence[str]) -> set[int]:
    """Return the exit codes in torchrun's report, which lists ranks that ended by themselves, not by its SIGTERM."""
    lines = (match.string[match.end() :] for match in filter(None, map(_PREFIX.match, log[-READ:])))
    return {int(found[1]) for found in map(_EXITED.match, lines) if found is not None}


def _ran_out_of_memory(text: str) -> bool:
    """Return whether a rank's lines report it: by a scheduler, C++, Rust, or the last Python error with its causes."""
    aborted = list(_ABORTED.finditer(text))
    if _OUT_OF_MEMORY.search(text) or any(_ABORTED_FOR_MEMORY.fullmatch(match[1]) for match in aborted):
        return True
    # After the first abort, lines of several processes may be mixed.
    messages = _WHAT.findall(text, aborted[0].end()) if aborted else ()
    raised = False
    for follows, name, message in _RAISED.findall(text):
        # Torchrun's own error comes after its workers' errors.
        if not name.endswith("ChildFailedError"):
            raised = means_out_of_memory(name, message) or (raised and bool(follows))
    return raised or any(means_out_of_memory("RuntimeError", message) for message in messages)
