"""The errors of this project. The ``kind`` of an error decides whether a retry can help."""

import errno
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

RETRYABLE_KINDS = frozenset({"unavailable", "out_of_memory", "killed", "hung", "crash"})
"""Kinds of failure that another attempt may survive; ``config`` and ``data`` errors would only repeat."""

PROGRAM = "cosmos-flows"
"""Name of the command line."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk, an exhausted quota and a file above the size limit."""
MISPLACED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Error numbers of a path without permission, or with a file, folder or link in place of another."""
FREE_SPACE = (
    "`cosmos-flows gc RUN --store STORE` deletes what killed attempts of a run left; free some space and run again"
)
"""Advice for a full disk."""
MAX_MISTAKES = 50
"""Largest number of mistakes that a message lists. It counts further mistakes without listing them."""
SHARED_MEMORY = (
    "this is shared memory (/dev/shm), not a disk; give the container more: `--shm-size` of Docker, or on "
    "Kubernetes an emptyDir of medium Memory mounted there; then run again"
)
"""Advice for full shared memory."""

_FULL_TEXTS = re.compile(
    # Matches only at the beginning of a line or of a quoted message, never inside a path or a prompt.
    r"(?:^|(?<=[:\])>] )|(?<=\())(?:No space left on device|database or disk is full|disk is full"
    r"|Disk quota exceeded|No usable temporary directory found in)(?=$|[:;,.)]|\s*[(\[])"
    r"|(?<![\w/.'\"-])No space left on device \((?:os error )?28\)",
    re.IGNORECASE | re.MULTILINE,
)
"""Texts of a full disk in errors of libraries."""
_SHM = re.compile(r"(?<![\w.-])/dev/shm/|</torch_|\bshared memory(?:\(shm\)| segment| object)")
"""Names of shared memory in errors of NCCL, PyTorch and Python."""

EXIT_CODES = {"config": 64, "diverged": 65, "data": 65, "busy": 75, "unavailable": 75, "off_policy": 78}
"""Exit code by kind (sysexits.h); every other failure exits with 70. Only a run can be ``busy``, not a stage."""


class CosmosRLError(Exception):
    """Base of every error raised on purpose. The message states what was found, what was expected and what to do."""

    kind = "crash"

    @property
    def retryable(self) -> bool:
        """Return whether another attempt can help."""
        return self.kind in RETRYABLE_KINDS

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that ends with this error."""
        return EXIT_CODES.get(self.kind, 70)


class ConfigError(CosmosRLError, ValueError):
    """A mistake in a recipe, a command line or a combination of settings. Never retried."""

    kind = "config"


def mistakes_in(place: str | Path, mistakes: Sequence[str]) -> ConfigError:
    """Return one error that lists the mistakes in a file or folder."""
    return ConfigError(listed(f"{place}:", mistakes))


def listed(first: str, mistakes: Sequence[str]) -> str:
    """Return a message with a line for each mistake after its first line."""
    more = [f"and {len(mistakes) - MAX_MISTAKES} more"] if len(mistakes) > MAX_MISTAKES else []
    return "\n    ".join([first, *mistakes[:MAX_MISTAKES], *more])


class Mistakes(list[str]):
    """Messages about a file of settings, each once. The user sees all of them in one error."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        super().__init__(known)
        self.unreached: list[str] = []
        """Messages about services that do not answer. They are no mistakes in the file."""

    def reach(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``work`` like :meth:`catch`.

        If it raises :class:`UnavailableError`, add the message to :attr:`unreached` and return None.
        """
        try:
            return self.catch(work, *args, **kwargs)
        except UnavailableError as error:
            self.unreached.append(str(error))
            return None

    def catch(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``work``. If it raises :class:`ConfigError`, keep the message and return None."""
        try:
            return work(*args, **kwargs)
        except ConfigError as error:
            self.append(str(error))
            return None

    def append(self, message: str) -> None:
        """Add a message, unless it is there."""
        if message not in self:
            super().append(message)


class ArtifactError(CosmosRLError):
    """Damage in the store: a wrong digest, a truncated shard, a wrong manifest. Never retried or rebuilt silently."""

    kind = "data"


class UnreadableError(ArtifactError):
    """A path in a local store that no retry can read: no permission, or a file where a folder is expected."""


class DatasetError(CosmosRLError):
    """Files of a dataset that changed since they were listed, or too many unusable ones. Never retried."""

    kind = "data"


class DivergenceError(CosmosRLError):
    """Non-finite numbers in training. Never retried, because equal bits would diverge again."""

    kind = "diverged"


class RepeatError(CosmosRLError):
    """Work whose second execution gave other bits than the first. Never retried: a retry would not be exact either."""

    kind = "data"


class DriftError(CosmosRLError):
    """Log-probabilities that differ between rollout and update. Never retried, because the difference would return."""

    kind = "data"


class OffPolicyError(CosmosRLError):
    """Stored rollouts too far from the policy that they would train. Never retried: the same rollouts stay as far."""

    kind = "off_policy"


class RewardError(CosmosRLError):
    """Too many samples without a score; the message names them. A missing score is never replaced by a number."""

    kind = "unavailable"


class GateError(CosmosRLError):
    """Too many samples that a gate holds back. Never retried, because equal scores are held back again."""

    kind = "data"


class UnavailableError(CosmosRLError):
    """A store or service that did not answer. Worth another attempt."""

    kind = "unavailable"


class NoSpaceError(UnavailableError):
    """A full store or disk."""


class LeaseError(CosmosRLError):
    """Another process that works on the same run or has taken it over. A person decides which one continues."""

    kind = "busy"


class StoppedError(CosmosRLError):
    """A run that somebody asked to end. The same command continues it."""

    kind = "stopped"

    @property
    def exit_code(self) -> int:
        """Return the code of a process that SIGTERM ended."""
        return 143


class WarningError(CosmosRLError):
    """Scores that exceed a limit of ``early_warning`` with ``on_trip = "stop"``. Equal scores exceed it again."""

    kind = "data"


class ApprovalError(CosmosRLError):
    """Scores that exceed a limit, and that somebody has to approve before the run goes on."""

    kind = "approval"
    evidence = ""
    """Digest of the scores and limits that a person has to approve."""

    @property
    def exit_code(self) -> int:
        """Return a code that no stage ends with."""
        return 77

    @classmethod
    def on(cls, evidence: str, message: str) -> "ApprovalError":
        """Build an error with the digest of the evidence."""
        error = cls(message)
        error.evidence = evidence
        return error


class BudgetError(CosmosRLError):
    """An iteration that would exceed ``train.max_gpu_hours``. The same command with a higher limit goes on."""

    kind = "budget"

    @property
    def exit_code(self) -> int:
        """Return a code that no stage ends with."""
        return 76


class StageError(CosmosRLError):
    """A failed stage process, with the kind and message of that process.

    The constructor accepts only the message, so that pickling works; :meth:`of` sets the other attributes.
    """

    log = ""
    """Last lines of the process's log if nothing else explains the failure, otherwise empty."""
    raised_at = ""
    """Class and place of the Python exception that ended the process, if it is of no known kind; otherwise empty."""
    repeated = False
    """Whether the previous attempt ended with the same exception at the same place. Then a further one would, too."""

    @property
    def retryable(self) -> bool:
        """Return whether another attempt can help."""
        return not self.repeated and super().retryable

    @classmethod
    def of(cls, kind: str, message: str, log: str = "", raised_at: str = "") -> "StageError":
        """Build an error with the failed process's kind."""
        error = cls(message)
        error.kind, error.log, error.raised_at = kind, log, raised_at
        return error

    def again(self) -> "StageError":
        """Return a copy of this error that is marked as :attr:`repeated`, with advice in its message."""
        advice = "the attempt before ended there too, so no other follows; the same command tries again"
        error = StageError.of(self.kind, f"{self}; {advice}", self.log, self.raised_at)
        error.repeated = True
        return error

    def in_full(self) -> "StageError":
        """Return an equal error whose message ends with the log."""
        if not self.log:
            return self
        error = StageError.of(self.kind, f"{self}:\n{self.log}", self.log, self.raised_at)
        error.repeated = self.repeated
        return error

    @property
    def summary(self) -> str:
        """Return the message without the log."""
        return str(self).removesuffix(f":\n{self.log}")


def no_space(error: BaseException) -> NoSpaceError | None:
    """Return an error with advice if ``error`` means a full disk, otherwise None.

    Recognises errors of the system and errors of libraries that quote it. A ``ValueError`` never matches, even if it
    quotes the same text.
    """
    full = isinstance(error, OSError) and error.errno in FULL
    if not full and not (_is_of_a_library(error) and _FULL_TEXTS.search(str(error)) is not None):
        return None
    remedy = SHARED_MEMORY if _SHM.search(str(error)) else FREE_SPACE
    return NoSpaceError(f"no space left: {error}; {remedy}")


def unwritten(path: str | Path, error: OSError) -> ConfigError | NoSpaceError:
    """Return the error of writing a file or folder that a person named."""
    if error.errno in FULL:
        return NoSpaceError(f"no space left to write {path}: {error.strerror}; {FREE_SPACE}")
    return ConfigError(f"cannot write {path}: {error.strerror}; name another")


def misplaced(error: OSError, action: str, url: str) -> CosmosRLError | None:
    """Return the error of an action on a local path if no retry can succeed (see :data:`MISPLACED`), otherwise None.

    A path that cannot be read gives :class:`UnreadableError`, one that cannot be written :class:`ConfigError`.
    """
    if error.errno not in MISPLACED:
        return None
    found = f"cannot {action} {url}: {error.strerror}"
    if action in ("read", "look up", "list"):
        return UnreadableError(f"{found}; let this user read it, or repair or remove the file or folder there")
    return ConfigError(f"{found}; give this user permission, or name another place")


def _is_of_a_library(error: BaseException) -> bool:
    """Return whether libraries use the error's class to report errors of the system."""
    if isinstance(error, CosmosRLError):
        return False
    foreign = type(error).__module__ != "builtins" and not isinstance(error, ValueError)
    return foreign or isinstance(error, (OSError, RuntimeError))


def advised(name: str, *words: str, store: str) -> str:
    """Return a command for a message: ``cosmos-flows approve RUN --store /where/it/is``.

    ``store`` is absolute, so that the command works in any folder of the machine that printed it.
    """
    return shlex.join([PROGRAM, *name.split(), *words, "--store", store])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 run``, ``2 runs``, ``0 policies``, ``3 processes``."""
    if number == 1:
        return f"1 {noun}"
    if re.search("[^aeiou]y$", noun):
        return f"{number} {noun.removesuffix('y')}ies"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor, change a terminal, or reverse the direction of the text; lone surrogates."""


def visible(text: str) -> str:
    """Escape the control characters of a text for people: ``ESC`` becomes ``\\x1b``; newlines and tabs stay."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def first_line(message: object) -> str:
    """Return the first line of a text or of an error's message, without a colon at its end."""
    return (str(message).splitlines() or [""])[0].rstrip(":")
