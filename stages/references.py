"""The bytes of the pictures and clips that prompts refer to, in a pool that all runs of a store share."""

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.datasets._base import ItemError, Reference
from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.datasets._references import bytes_of
from cosmos_rl_core.errors import ArtifactError, DatasetError, UnreadableError
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.pool import INDEX, PICTURES, TEXTS, check_not_swept, index_of
from stages.artifacts.records import FileEntry
from stages.artifacts.request import Request
from stages.artifacts.slots import folder_of
from stages.execution.context import Context, Ranks


def run(request: Request, context: Context[Ranks]) -> dict[str, int]:
    """Write ``index.json``: the pool's file of each reference, by its digest.

    Raises :class:`DatasetError` for a file that has gone, or has changed since the run was planned, unless the pool has
    the planned bytes.
    """
    wanted = request.settings(contracts.References).references
    # Written before the stage looks into the pool: no sweep deletes the files that a layout names.
    context.layout({TEXTS: sorted(reference.digest for reference in wanted)})
    root = folder_of(request.slot)
    check_not_swept(root)
    entries: dict[str, FileEntry] = {}
    for number, reference in enumerate(wanted):
        context.progress("storing references", number, len(wanted))
        entries[reference.digest] = _stored(root, reference)
    if context.ranks.rank == 0:
        context.attempt.put_json(INDEX, index_of(entries))
    return {"references": len(entries)}


def _stored(root: str, reference: Reference) -> FileEntry:
    """Return the pool's file of a reference. Write the file if it is missing."""
    path = f"{PICTURES}/{reference.digest}"
    data = store.read_if_exists(url := store.join(root, path))
    if data is None:
        data = _read(reference)
        if not store.put_if_absent(url, data):
            data = store.read(url)
    if sha256(data) != reference.digest:
        raise ArtifactError(f"{url} is damaged; restore it, or remove it to have it read again from {reference.place}")
    return FileEntry(path=path, size=len(data), sha256=reference.digest)


def _read(reference: Reference) -> bytes:
    try:
        data = bytes_of(reference)
    except (OSError, UnreadableError, ItemError) as error:
        raise DatasetError(f"the reference {reference.place} cannot be read: {error}; restore the file") from error
    if sha256(data) != reference.digest:
        other = "" if reference.frame is None else ", or other versions of PyAV and Pillow decode it differently"
        raise DatasetError(
            f"{reference.place} has changed since the run was planned{other}; restore the file, or plan again"
        )
    decoded(data)
    return data
