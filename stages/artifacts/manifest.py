"""The manifest of a committed artifact: its files, its origin, and whether it is current for a Request."""

from typing import Any, Self

from pydantic import Field

from cosmos_rl_core.canonical import digest, sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.outside_plugins import Pin
from cosmos_rl_core.storage.sealed import RESTORE
from stages.artifacts.records import FileEntry, Record
from stages.artifacts.request import Input, Request, contents_of, fingerprint_of, recipe_of
from stages.contracts import RECORDS


class Manifest(Record):
    """The record that is written last, by put-if-absent. Once it exists, the artifact is complete."""

    kind = "manifest"
    stage: str
    version: int
    attempt: str
    """Random id of the attempt that committed."""
    recipe: str
    fingerprint: str
    content: str
    iteration: int | None
    seed: int
    config: dict[str, Any]
    plugins: tuple[Pin, ...] = ()
    """The outside plugins that the settings name."""
    inputs: dict[str, tuple[Input, ...]]
    files: dict[str, FileEntry]
    """Files by name. The attempt is not in the name, so equal bytes have equal content."""
    numerics: dict[str, Any]
    summary: dict[str, float | int | str | None] = {}
    """A few numbers for people and progress lines. They are a record, and no part of the content."""
    slot: str = Field(default="", exclude=True)
    """The slot that it was read from, where its files are."""
    digest: str = Field(default="", exclude=True)
    """Digest of its bytes in the store."""

    @classmethod
    def unsealed(cls, data: bytes, url: str, slot: str, generation: int) -> Self:
        """Return the manifest that ``data`` holds, like :meth:`Record.unsealed`.

        Raises :class:`ArtifactError` also if its digests do not follow from what it lists.
        """
        return super().unsealed(data, url, slot, generation).found(slot, data)

    @classmethod
    def checked(cls, body: dict[str, Any], url: str, slot: str, generation: int) -> Self:
        """Return the manifest of an unsealed body, like :meth:`unsealed`."""
        manifest = super().checked(body, url, slot, generation)
        if (wrong := manifest._contradiction()) is not None:
            raise ArtifactError(f"{url} contradicts itself: its {wrong} does not match what it lists; {RESTORE}")
        return manifest

    def found(self, slot: str, data: bytes) -> Self:
        """Return the manifest with the slot that it was read from, and the digest of the bytes that were read."""
        return self.model_copy(update={"slot": slot, "digest": sha256(data)})

    def _contradiction(self) -> str | None:
        """Return the field that does not follow from the others; None if all do."""
        recipe = recipe_of(self.stage, self.version, self.iteration, self.seed, self.config, self.plugins)
        if self.recipe != recipe:
            return "recipe"
        if self.fingerprint != fingerprint_of(recipe, self.inputs):
            return "fingerprint"
        if self.content != content_of(self.files):
            return "content"
        in_place = all(entry.path.split("/", 2)[2:] == [name] for name, entry in self.files.items())
        return None if in_place else "path of a file"

    def part_content(self, *parts: str) -> str:
        """Return the digest of the files of these parts, or of all result files if none is named."""
        return content_of(self.files, *parts)

    def has_part(self, part: str) -> bool:
        """Return whether there are files under ``<part>/``, or a file of this name."""
        return any(name == part or name.startswith(f"{part}/") for name in self.files)

    def why_not(self, request: Request) -> str | None:
        """Return why this artifact is not current for ``request``; None if it is. Does not look at its files."""
        if self.recipe != request.recipe:
            return f"the settings of {request.stage} changed{_changed(self, request)}"
        if (old := contents_of(self.inputs)) != (new := request.input_contents):
            roles = sorted(r for r in old.keys() | new.keys() if old.get(r) != new.get(r))
            return f"{', '.join(roles)} changed since {request.stage} was made"
        return None


def content_of(files: dict[str, FileEntry], *parts: str) -> str:
    """Return the digest of the names and digests of all result files, or of the files of some parts.

    A part is a folder or one file. A record counts only if ``parts`` names it, for a stage that reads it.
    """
    prefixes = tuple(f"{part}/" for part in parts)
    if parts:
        names = [name for name in files if name in parts or name.startswith(prefixes)]
    else:
        names = [name for name in files if not name.startswith(RECORDS)]
    return digest({name: files[name].sha256 for name in names})


def _changed(manifest: Manifest, request: Request) -> str:
    if manifest.version != request.version:
        return f" (stage version {manifest.version} -> {request.version})"
    old, new = manifest.config, request.config.identity()
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    made_with, asked = ([pin.identity() for pin in p] for p in (manifest.plugins, request.named_plugins))
    names += ["plugins"] if made_with != asked else []
    return f" ({', '.join(names)})" if names else " (iteration or seed)"


def seconds_of(manifest: Manifest | None) -> float | None:
    """Return the seconds that a stage took; None if its artifact does not exist or did not record them."""
    seconds = manifest.summary.get("seconds") if manifest else None
    return float(seconds) if isinstance(seconds, int | float) else None
