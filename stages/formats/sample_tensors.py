"""Stored tensors of samples and policies, each read on access with every byte checked."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage.tensor_files import decode
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.contracts import TENSORS
from stages.execution.context import Context, Ranks
from stages.formats.members import KEPT_BYTES, Members
from stages.formats.samples import all_rows, key_of, place_of, unit_name


class SampleTensors:
    """Tensors by key (see :func:`key_of`) and name, unbatched, on the CPU, each read when it is accessed.

    At most ``kept_bytes`` of each rollout stay in memory. The ranks of a ``context`` share the first reading of the
    units, because any rank may need samples of any unit; then it is collective. Raises :class:`ArtifactError` at once
    if a rollout lacks one of the samples.
    """

    def __init__(
        self,
        rollouts: Sequence[Input],
        keys: Collection[str],
        kept_bytes: int = KEPT_BYTES,
        context: Context[Ranks] | None = None,
    ) -> None:
        artifacts = [Artifact(rollout) for rollout in rollouts]
        self._rows = {
            key_of(place, row["sample_id"]): row
            for place, artifact in enumerate(artifacts)
            for row in all_rows(artifact)
        }
        if missing := sorted(set(keys) - self._rows.keys()):
            raise ArtifactError(f"the rollouts hold no tensors of {len(missing)} samples, e.g. {missing[0]}")
        self._members = [Members(artifact, kept_bytes) for artifact in artifacts]
        if context is not None:
            self._scan_together(keys, context)

    def row(self, key: str) -> dict[str, Any]:
        """Return a sample's row of the index: prompt, seeds, noise levels."""
        return self._rows[key]

    def _scan_together(self, keys: Iterable[str], context: Context[Ranks]) -> None:
        units: list[set[str]] = [set() for _ in self._members]
        for key in keys:
            units[place_of(key)[0]].add(unit_name(TENSORS, self._rows[key]["unit"]))
        for members, names in zip(self._members, units, strict=True):
            members.scan_together(names, context)

    def __getitem__(self, key: str) -> Mapping[str, Tensor]:
        place, sample_id = place_of(key)
        unit = unit_name(TENSORS, self._rows[key]["unit"])
        return _Tensors(self._members[place], [(unit, f"{sample_id}.safetensors")])


class _Tensors(Mapping[str, Tensor]):
    """The tensors of some safetensors members, by name."""

    def __init__(self, members: Members, places: Iterable[tuple[str, str]]) -> None:
        self._members = members
        self._pieces = {name: (*at, piece) for at in places for name, piece in members.tensors(*at).items()}

    def __getitem__(self, name: str) -> Tensor:
        file, member, piece = self._pieces[name]
        return decode(self._members.read(file, member, piece), piece.dtype, piece.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def part_tensors(source: Input, part: str) -> Mapping[str, Tensor]:
    """Return the tensors of one part of a policy by name, on the CPU; none of them is kept in memory."""
    artifact = Artifact(source)
    return _Tensors(Members(artifact, kept_bytes=0), [(file, file) for file in artifact.names(f"{part}/")])
