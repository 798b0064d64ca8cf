"""The errors of this project. Each one has a ``kind``, which alone decides whether a retry can help."""

import errno

RETRYABLE_KINDS = frozenset({"unavailable", "out_of_memory", "killed", "hung", "crash"})
"""Kinds of failure that another attempt may survive; ``config`` and ``data`` repeat themselves."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What systems say when there is no space left, for anybody, for this user, or for a file of that size."""
FREE_SPACE = "`cosmos-flows gc RUN` deletes what killed attempts of a run left; free some space and run again"
"""What to do then."""

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
    """What to tell people where a system's error, or its text in a library's error, says that a disk is full."""
    texts = ("no space left on device", "disk is full", "disk quota exceeded", "no usable temporary directory")
    full = isinstance(error, OSError) and error.errno in FULL
    if not full and (isinstance(error, CosmosRLError) or not any(text in str(error).lower() for text in texts)):
        return None
    return NoSpaceError(f"no space left: {error}; {FREE_SPACE}")
