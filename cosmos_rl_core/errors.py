"""The errors of this project. Each one has a ``kind``, which alone decides whether a retry can help."""

import errno
import re

RETRYABLE_KINDS = frozenset({"unavailable", "out_of_memory", "killed", "hung", "crash"})
"""Kinds of failure that another attempt may survive; ``config`` and ``data`` repeat themselves."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What systems say when there is no space left, for anybody, for this user, or for a file of that size."""
FREE_SPACE = "`cosmos-flows gc RUN` deletes what killed attempts of a run left; free some space and run again"
"""What to do then."""
SHARED_MEMORY = (
    "that is shared memory, /dev/shm, and no disk; give the container more of it: `--shm-size` of Docker, or on "
    "Kubernetes an emptyDir of medium Memory that is mounted there; then run again"
)
"""What to do where the full device is memory that processes share."""

_FULL_TEXTS = re.compile(
    # The beginning of a line, or of what another message quotes: never the middle of a path or of a prompt.
    r"(?:^|(?<=[:\])>] )|(?<=\())(?:No space left on device|database or disk is full|disk is full"
    r"|Disk quota exceeded|No usable temporary directory found in)(?=$|[:;,.)]|\s*[(\[])"
    r"|(?<![\w/.'\"-])No space left on device \((?:os error )?28\)",
    re.IGNORECASE | re.MULTILINE,
)
"""How a full disk reads in errors of libraries."""
_IN_SHARED_MEMORY = re.compile(r"(?<![\w.-])/dev/shm/|</torch_|\bshared memory(?:\(shm\)| segment| object)")
"""Names that NCCL, PyTorch and Python give to what they share."""

EXIT_CODES = {"config": 64, "data": 65, "busy": 75, "unavailable": 75}
"""Exit code by kind (sysexits.h); every other failure exits with 70. No stage is ever ``busy``, only a run."""


class CosmosRLError(Exception):
    """Base of every error raised on purpose. The message says what was found, what was expected and what to do."""

    kind = "crash"

    @property
    def retryable(self) -> bool:
        """Whether trying again can help."""
        return self.kind in RETRYABLE_KINDS

    @property
    def exit_code(self) -> int:
        """The process exit code for this error."""
        return EXIT_CODES.get(self.kind, 70)


class ConfigError(CosmosRLError, ValueError):
    """Somebody wrote it: a recipe, a command line, a combination that cannot work. Never retried."""

    kind = "config"


class ArtifactError(CosmosRLError):
    """The store holds it: a wrong digest, a cut shard, a manifest that lies. Never retried, never rebuilt silently."""

    kind = "data"


class DivergenceError(CosmosRLError):
    """The training left the finite numbers. The same bits would do so again, so it is not tried again."""

    kind = "data"


class DriftError(CosmosRLError):
    """Rollout and update do not compute the same log-probabilities. The same bits would not either: no other try."""

    kind = "data"


class RewardError(CosmosRLError):
    """Too many samples could not be scored; the message names them. A score is never made up in their place."""

    kind = "unavailable"


class UnavailableError(CosmosRLError):
    """Something outside did not answer: a store, a service. Worth another try."""

    kind = "unavailable"


class NoSpaceError(UnavailableError):
    """A store or a disk is full."""


class LeaseError(CosmosRLError):
    """Another process works on the same run, or has taken it over. It is for people to say which one goes on."""

    kind = "busy"


class StageError(CosmosRLError):
    """A stage process failed; carries the process's own kind and words.

    Takes one message only, so that it pickles; the rest is set by :meth:`of`.
    """

    log = ""
    """Last lines of the process's log, where they are all that tells the reason."""

    @classmethod
    def of(cls, kind: str, message: str, log: str = "") -> "StageError":
        """Build the error with the failed process's kind."""
        error = cls(message)
        error.kind = kind
        error.log = log
        return error

    def in_full(self) -> "StageError":
        """Return the same error with the log at the end of its message."""
        return StageError.of(self.kind, f"{self}:\n{self.log}", self.log) if self.log else self

    @property
    def summary(self) -> str:
        """The message without the log."""
        return str(self).removesuffix(f":\n{self.log}")


def no_space(error: BaseException) -> NoSpaceError | None:
    """Return what to tell people where a system's error, or its text in a library's error, is a full disk; else None.

    Errors of values are none, whatever text they quote.
    """
    full = isinstance(error, OSError) and error.errno in FULL
    if not full and not (_is_of_a_library(error) and _FULL_TEXTS.search(str(error)) is not None):
        return None
    remedy = SHARED_MEMORY if _IN_SHARED_MEMORY.search(str(error)) else FREE_SPACE
    return NoSpaceError(f"no space left: {error}; {remedy}")


def _is_of_a_library(error: BaseException) -> bool:
    """Return whether an error's class is one by which libraries pass on what the system told them."""
    if isinstance(error, (OSError, RuntimeError)):
        return not isinstance(error, CosmosRLError)
    return not isinstance(error, (CosmosRLError, ValueError)) and type(error).__module__ != "builtins"
