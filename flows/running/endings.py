"""Classify the end of a stage process without an error file, by its exit code and the last lines of its log.

Only lines in the exact form of a runtime or a scheduler count, because a log also quotes prompts.
"""

import re
from collections.abc import Iterator, Sequence

from cosmos_rl_core.errors import EXIT_CODES
from cosmos_rl_core.foreign_errors import means_out_of_memory
from flows.launchers._base import JobState

KIND_OF_EXIT = {code: kind for kind, code in EXIT_CODES.items()}
"""Kind of failure by the runner's exit code, which is set even if the error file could not be written."""
READ = 2000
"""Number of last lines of a log that are read: each rank may add a trace of its C++ frames."""

_PREFIX = re.compile(r"(?:\d+: ?)?(\[[a-z_]+\d+\]: ?)?")
"""Prefix of a rank's line by srun, torchrun or PyTorch."""
_KILLED = re.compile(r"\s*exitcode\s*:\s*-9\b")
_KILLED_FOR_MEMORY = re.compile(
    r"slurmstepd(?:-[\w.-]+)?: (?:error: )?.*\bDetected \d+ oom[-_]kill event"
    r"|srun: error: \S+: tasks? [\d,-]+: Out Of Memory"
)
_ABORTED = re.compile(r"terminate called after throwing an instance of '([^']*)")
_ABORTED_FOR_MEMORY = re.compile(r"(?:[\w<: ]*\W)?(?:bad_alloc|OutOfMemoryError|out_of_memory)>*")
"""Names of C++ classes."""
_WHAT = re.compile(r"(?:\s+what\(\):)+\s+(.*)")
_END_OF_WHAT = re.compile(r"\s*$|Exception raised from |frame #\d+:|terminate called ")
_OUT_OF_ROOM = re.compile(r"memory allocation of \d+ bytes failed$|libgomp: Out of memory allocating \d+ bytes")
"""Last lines of Rust and OpenMP before they abort."""
_TRACEBACK = "Traceback (most recent call last):"
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
"""The line below the frames of a traceback: a class and a message."""


def kind_of(state: JobState, log: Sequence[str]) -> str:
    """Return the kind of failure of a process that ended with ``state`` and wrote the lines ``log``."""
    prefixes, lines = _without_prefixes(log[-READ:])
    memory = any(map(_KILLED_FOR_MEMORY.match, lines))
    if memory or _aborted_for_memory(lines) or _raised_for_memory(prefixes, lines):
        return "out_of_memory"
    # Torchrun always exits with 1. Only its report tells how a worker ended.
    if state.killed or any(map(_KILLED.match, lines)):
        return "killed"
    return KIND_OF_EXIT.get(state.exit_code or 0, "crash")


def _without_prefixes(log: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the rank's prefix, which may be empty, and the rest of each line."""
    found = [match for line in log if (match := _PREFIX.match(line)) is not None]
    return [match[1] or "" for match in found], [match.string[match.end() :] for match in found]


def _aborted_for_memory(lines: Sequence[str]) -> bool:
    """Return whether code in C++ or Rust ran out of memory and aborted the process, which leaves no error file."""
    if any(map(_OUT_OF_ROOM.match, lines)):
        return True
    aborted = {i: match[1] for i, line in enumerate(lines) if (match := _ABORTED.match(line))}
    if any(map(_ABORTED_FOR_MEMORY.fullmatch, aborted.values())):
        return True
    # After the first abort, lines of several ranks may be mixed.
    texts = _what(lines[min(aborted) + 1 :]) if aborted else ()
    return any(means_out_of_memory("RuntimeError", text) for text in texts)


def _what(lines: Sequence[str]) -> Iterator[str]:
    """Yield the message of each uncaught C++ error, without the trace below it."""
    for i, line in enumerate(lines):
        if (match := _WHAT.match(line)) is not None:
            text = [match[1]]
            for more in lines[i + 1 :]:
                if _END_OF_WHAT.match(more) or _WHAT.match(more):
                    break
                text.append(more)
            yield "\n".join(text)


def _raised_for_memory(prefixes: Sequence[str], lines: Sequence[str]) -> bool:
    """Return whether the last Python error of a rank, or one of its causes, is an exhausted memory."""
    last: dict[str, bool] = {}
    led_to_another: set[str] = set()
    for prefix, name, text in _errors(prefixes, lines):
        if name is None:
            led_to_another.add(prefix)
        # Torchrun's own comes after those of its workers.
        elif name.rpartition(".")[2] != "ChildFailedError":
            before = prefix in led_to_another and last.get(prefix, False)
            last[prefix] = before or means_out_of_memory(name, text)
            led_to_another.discard(prefix)
    return any(last.values())


def _errors(prefixes: Sequence[str], lines: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """Yield prefix, class and message of each traceback. A class of None stands for the link to the next traceback."""
    frames: dict[str, int] = {}
    for prefix, line in zip(prefixes, lines, strict=True):
        if line == _TRACEBACK:
            frames[prefix] = 0
        elif prefix in frames and line.startswith("  "):
            frames[prefix] += 1
        elif line in _LINKS:
            yield prefix, None, ""
        elif frames.pop(prefix, 0) and (raised := _RAISED.match(line)) is not None:
            yield prefix, raised[1], raised[2] or ""
