"""A policy's parts on disk: ``<part>/<n>.safetensors``. Only names and sizes decide how tensors share files."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.storage.tensor_files import check_tensors, read_tensors
from cosmos_rl_core.storage.tensor_headers import Readable
from cosmos_rl_core.weights.parts import CURRENT, cut
from cosmos_rl_core.weights.policy_weights import PolicyWeights, to_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import scan, stream_of
from stages.artifacts.request import Input
from stages.execution.context import Context, Ranks, told_by_all


def write_part(context: Context[Ranks], part: str, *, tensors: Mapping[str, Tensor], shards: Shards = WHOLE) -> None:
    """Write the files of one part. Collective: all ranks gather each file, and one of them writes it."""
    sizes = {name: math.prod(shards.shape(name, tensor)) * tensor.element_size() for name, tensor in tensors.items()}
    write_files(context, part, sizes=sizes, whole=lambda name: shards.whole(name, tensors[name]))


def write_files(
    context: Context[Ranks], part: str, *, sizes: Mapping[str, int], whole: Callable[[str], Tensor]
) -> None:
    """Write the files in rounds of one file per rank, so that all ranks write at the same time. Collective.

    Files of a round are gathered before any is written: otherwise the others would wait for each write. A rank holds
    one file.
    """
    files, group = list(enumerate(cut(sizes))), context.ranks
    for first in range(0, len(files), group.world_size):
        mine: dict[str, Tensor] = {}
        for index, names in files[first : first + group.world_size]:
            context.progress(f"writing {part}", index, len(files))
            # No variable holds a file of another rank while the next one is gathered.
            if index % group.world_size == group.rank:
                mine = {name: whole(name) for name in names}
            else:
                for name in names:
                    whole(name)
        if mine:
            context.attempt.put(f"{part}/{first + group.rank:05d}.safetensors", to_bytes(mine))
    context.progress(f"writing {part}", len(files), len(files))


Progress = Callable[[str, int, int], None]
"""Called with a phase, a step and the number of steps, like :meth:`stages.execution.context.Context.progress`."""


def read_part(
    source: Input,
    part: str,
    shards: Shards = WHOLE,
    progress: Progress = lambda *_: None,
    *,
    group: Group | None = None,
) -> dict[str, Tensor]:
    """Read one part's tensors, on the CPU; empty if the policy has no such part.

    Of tensors that ``shards`` divides, only this rank's rows are kept; memory also holds one whole tensor at a time.
    ``progress`` is called for every tensor, with the files as steps. The ranks of a ``group`` share the reading
    (:func:`_for_each`), which is then collective.
    """
    tensors: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        # A copy of the rows, so that the other rows are freed.
        tensors[name] = shards.local(name, tensor).clone() if shards.cuts(name) else tensor

    _for_each(source, part, keep, progress, group)
    return tensors


def load_part(
    weights: PolicyWeights,
    source: Input,
    part: str,
    progress: Progress = lambda *_: None,
    *,
    into: str = CURRENT,
    optional: bool = False,
    group: Group | None = None,
) -> None:
    """Copy an artifact's part into an existing part of ``weights``, a tensor at a time. ``group`` as in
    :func:`read_part`.

    If ``optional``, an artifact without the part changes nothing. Raises :class:`ArtifactError` if names, shapes or
    types differ; some tensors may be copied by then.
    """
    own, found = weights.here(into), dict[str, Tensor]()

    def copy(name: str, tensor: Tensor) -> None:
        local = weights.shards.local(name, tensor)
        found[name] = torch.empty_like(local, device="meta")
        if name in own and own[name].shape == local.shape:
            own[name].copy_(local)

    _for_each(source, part, copy, progress, group)
    if found or not optional:
        check_tensors(found, own, "weights of this model")


def _for_each(
    source: Input, part: str, take: Callable[[str, Tensor], None], progress: Progress, group: Group | None
) -> None:
    """Call ``take`` with the name and the tensor of each tensor of a part, in order, on the CPU.

    Ranks read and check the files in rounds of one file per rank, as they wrote them, and send each other the bytes. So
    the store gives every byte once, and its sha256 is computed once. A rank holds one file.
    """
    artifact = Artifact(source)
    names = artifact.names(f"{part}/")

    def of_file(stream: Readable, index: int) -> None:
        for key, tensor in read_tensors(stream):
            take(key, tensor)
            progress(f"reading {part}", index, len(names))

    def done(index: int) -> None:
        progress(f"reading {part}", index + 1, len(names))

    if group is None or group.world_size == 1:
        for index, name in enumerate(names):
            scan(artifact.url, artifact.entry(name), partial(of_file, index=index))
            done(index)
        return
    for first in range(0, len(names), group.world_size):
        some = names[first : first + group.world_size]
        data = _checked(artifact, some[group.rank : group.rank + 1], group)
        for owner, name in enumerate(some):
            blocks = group.blocks_of(owner, data, artifact.entry(name).size)
            of_file(stream_of(blocks), first + owner)
            done(first + owner)


def _checked(artifact: Artifact, own: list[str], group: Group) -> bytes:
    """Return the bytes of this rank's file (empty without a file) after all ranks have checked theirs. Collective."""
    found: list[bytes] = []

    def read() -> None:
        entries = map(artifact.entry, own)
        found.extend(scan(artifact.url, entry, partial(_whole, size=entry.size)) for entry in entries)

    told_by_all(group, read)
    return b"".join(found)


def _whole(stream: Readable, size: int) -> bytes:
    return stream.read(size)
