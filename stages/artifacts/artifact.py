"""A committed artifact, read with every byte checked."""

from functools import cache, partial
from pathlib import Path
from typing import Any

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import ArtifactError, advised
from stages.artifacts import files
from stages.artifacts.files import read_entry
from stages.artifacts.records import FileEntry, place_of, store_of
from stages.artifacts.request import Input
from stages.artifacts.slots import is_dropped, named_manifest
from stages.contracts import MEDIA, TENSORS

KEPT_BY = {MEDIA: "rollout.keep.media", TENSORS: "rollout.keep.tensors"}
"""The setting that says how many artifacts keep a part; for other parts it is the setting of policies."""


def remaking(slot: str) -> str:
    """Return the command that makes the artifact of a run's slot again; "" for a slot outside of runs."""
    match place_of(slot).split("/"):
        case ["runs", run, stage]:
            return advised("rerun", run, "--stage", stage, store=store_of(slot))
        case ["runs", run, "iterations" | "exports", number, stage] if number.isdecimal():
            words = ("--stage", stage, "--iteration", str(int(number)))
            return advised("rerun", run, *words, store=store_of(slot))
        case _:
            return ""


class Artifact:
    """A committed artifact. Each file is checked against the manifest when it is read, and the manifest against the
    Request.
    """

    def __init__(self, source: Input) -> None:
        self.url = source.url
        self.manifest = named_manifest(source)
        if self.manifest.part_content(*source.parts) != source.content:
            raise ArtifactError(f"{source.url} has other contents than the Request names")
        self.lacks = cache(partial(is_dropped, self.manifest))
        """Function that says whether the files of a part were deleted for good."""

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the files that start with ``prefix``, sorted."""
        return sorted(name for name in self.manifest.files if name.startswith(prefix))

    def _by_size(self) -> list[str]:
        """Return the names of all files, the largest first."""
        return sorted(self.names(), key=lambda name: -self.manifest.files[name].size)

    def read(self, name: str) -> bytes:
        """Read one file. Raises :class:`ArtifactError` if it is missing or its bytes are not the manifest's."""
        return read_entry(self.url, self.entry(name))

    def entry(self, name: str) -> FileEntry:
        """Return the manifest's entry of one file.

        Raises :class:`ArtifactError` if there is no such file, or if its part was deleted.
        """
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.url} has no file {name!r}; it has {', '.join(self.names())}")
        if self.lacks(part := name.partition("/")[0]):
            command = remaking(self.url)
            again = f"invalidate it (`{command}`) and continue the run" if command else "make the artifact again"
            raise ArtifactError(
                f"{name} of {self.url} was deleted, because this run keeps the newest {part} only; keep more "
                f"({KEPT_BY.get(part, 'train.ckpt.max_keep')}); {again}"
            )
        return self.manifest.files[name]

    def json(self, name: str) -> Any:
        """Read one JSON file. Raises ``ValueError`` if it is no JSON."""
        return from_json(self.read(name))

    def bring_to(self, directory: Path, share: int = 0, count: int = 1) -> None:
        """Bring one of ``count`` shares of the files into a local directory, with every byte checked.

        They are links if the store is a directory, and copies otherwise.
        """
        bring = files.copy if "://" in self.url else files.link
        for name in self._by_size()[share::count]:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            bring(self.url, self.entry(name), directory / name)
