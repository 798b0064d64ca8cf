"""Weights of two runs: how far each moved, how far they are apart, and which tensors differ most."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from cosmos_rl_core.estimates.digits import number
from cosmos_rl_core.storage.tensor_headers import Entry, read_header
from cosmos_rl_core.weights.arrays import array
from cosmos_rl_core.weights.parts import CURRENT
from flows.comparing.side import Side
from flows.planning.base import AnyRun
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_of, input_of

NUMBERS = 2**22
"""Numbers of a tensor that are turned into float64 at a time."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of both policies."""

    name: str
    apart: float
    """Norm of B - A."""
    moved: float
    """Norm of the difference of A from its version 0."""

    @property
    def share(self) -> float:
        """Return how far the runs are apart, in units of how far A moved."""
        if self.moved:
            return self.apart / self.moved
        return math.inf if self.apart else 0.0


@dataclass(frozen=True)
class Weights:
    """The trained weights of a policy version of both runs."""

    version: int
    words: str
    apart: float = math.nan
    """Norm of B - A."""
    moved_a: float = math.nan
    """Norm of the difference of A from its version 0."""
    moved_b: float = math.nan
    began: float = math.nan
    """Norm of B - A at version 0."""
    cosine: float = math.nan
    """Cosine of the angle between both moves."""
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    """The tensors that differ, the tensors that are farthest apart first."""


def weights(a: Side, b: Side) -> Weights | None:
    """Compare the trained weights of the newest policy version of both runs; None before there is one.

    Every byte that is read is checked. One file of each of four policies is in memory at a time.
    """
    version = min(a.trained, b.trained)
    found = [_Policy.open(one.run, k) for one in (a, b) for k in (0, version)]
    policies = [one for one in found if one is not None]
    if len(policies) < len(found):
        return None
    if policies[1].content == policies[3].content:
        return Weights(version, "equal byte for byte", apart=0.0)
    if (other := _other_tensors(*policies)) is not None:
        return Weights(version, other)
    return _measured(version, policies)


@dataclass(frozen=True)
class Moved:
    """The distance of the trained weights of a policy version from version 0."""

    norm: float
    """Norm of the difference of all numbers."""
    of: float
    """Norm of the numbers of version 0."""

    def __str__(self) -> str:
        share = f", {self.norm / self.of:.2%} of their norm there" if self.of else ""
        return f"{number(self.norm)} from policy 0{share}"


def moved(run: AnyRun, version: int, most_bytes: int) -> Moved | None:
    """Return how far a version is from version 0; None without both, or if the files of one exceed ``most_bytes``.

    Every byte that is read is checked.
    """
    found = [_Policy.open(run, k) for k in ((0, version) if version else ())]
    policies = [one for one in found if one is not None and one.size <= most_bytes]
    return _moved(*policies) if len(policies) == 2 else None


@lru_cache(maxsize=256)
def _moved(first: "_Policy", last: "_Policy") -> Moved | None:
    """Return how far a policy moved; None for different tensors. Policies of equal bytes are read once."""
    if first.shapes != last.shapes:
        return None
    total, length = _Sums(), 0.0
    for _, (a_0, a) in _arrays(first, last):
        total.add(a_0, a, a_0, a)
        length += float(np.vdot(a_0.astype("float64"), a_0.astype("float64")))
    return Moved(math.sqrt(total.moved_a), math.sqrt(length))


@dataclass(frozen=True)
class _Policy:
    """The part ``current`` of a policy version. Two are equal if their bytes are."""

    artifact: Artifact = field(compare=False)
    content: str

    @classmethod
    def open(cls, run: AnyRun, version: int) -> "_Policy | None":
        slot = run.slots.policy(version)
        if current_of(slot)[1] is None:
            return None
        artifact = Artifact(input_of(slot))
        return None if artifact.lacks(CURRENT) else cls(artifact, artifact.manifest.part_content(CURRENT))

    @property
    def files(self) -> list[str]:
        return self.artifact.names(f"{CURRENT}/")

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(self.artifact.entry(name).size for name in self.files)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {one.name: one.shape for name in self.files for one in _tensors(self.artifact.read(name))}


def _tensors(data: bytes) -> list[Entry]:
    return read_header(io.BytesIO(data))


def _other_tensors(*policies: _Policy) -> str | None:
    """Return in words why weights cannot be compared tensor by tensor; None if they can."""
    first, *others = (policy.shapes for policy in policies)
    if all(other == first for other in others):
        return None
    last_a, last_b = policies[1].shapes, policies[3].shapes
    differing = {name for name in last_a.keys() & last_b.keys() if last_a[name] != last_b[name]}
    counts = f"{len(last_a.keys() - last_b.keys())} only in A, {len(last_b.keys() - last_a.keys())} only in B"
    return f"other tensors: {counts}, {len(differing)} of another shape"


@dataclass
class _Sums:
    """Sums over all elements of tensors: squares of the distance of two runs and of each move, and their product."""

    apart: float = 0.0
    began: float = 0.0
    moved_a: float = 0.0
    moved_b: float = 0.0
    both: float = 0.0

    def add(self, a_0: np.ndarray, a: np.ndarray, b_0: np.ndarray, b: np.ndarray) -> None:
        flat = [one.reshape(-1) for one in (a_0, a, b_0, b)]
        for start in range(0, a.size, NUMBERS):
            a_0, a, b_0, b = (one[start : start + NUMBERS].astype("float64") for one in flat)
            move_a, move_b, gap, first = a - a_0, b - b_0, b - a, b_0 - a_0
            self.apart += float(gap @ gap)
            self.began += float(first @ first)
            self.moved_a += float(move_a @ move_a)
            self.moved_b += float(move_b @ move_b)
            self.both += float(move_a @ move_b)

    def plus(self, other: "_Sums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def _measured(version: int, policies: list[_Policy]) -> Weights:
    total, tensors = _Sums(), list[Tensor]()
    for name, sums in _each(policies):
        total.plus(sums)
        if sums.apart:
            tensors.append(Tensor(name, math.sqrt(sums.apart), math.sqrt(sums.moved_a)))
    moved_a, moved_b = math.sqrt(total.moved_a), math.sqrt(total.moved_b)
    return Weights(
        version,
        f"{len(tensors)} of {len(policies[0].shapes)} tensors differ",
        apart=math.sqrt(total.apart),
        began=math.sqrt(total.began),
        moved_a=moved_a,
        moved_b=moved_b,
        cosine=total.both / (moved_a * moved_b) if moved_a and moved_b else math.nan,
        tensors=sorted(tensors, key=lambda one: -one.apart),
    )


def _each(policies: list[_Policy]) -> Iterator[tuple[str, _Sums]]:
    """Yield the sums of each tensor."""
    for name, (a_0, a, b_0, b) in _arrays(*policies):
        sums = _Sums()
        sums.add(a_0, a, b_0, b)
        yield name, sums


def _arrays(*policies: _Policy) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield each tensor of policies of equal shapes, which have equal files."""
    for file in policies[0].files:
        data = [policy.artifact.read(file) for policy in policies]
        for entries in zip(*map(_tensors, data), strict=True):
            found = [array(d[e.start : e.end], e.dtype, e.shape) for d, e in zip(data, entries, strict=True)]
            yield entries[0].name, found
