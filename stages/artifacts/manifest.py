"""What a committed artifact says of itself: its files, where it came from, and whether it stands for a Request."""

from typing import Any, Self

from pydantic import PrivateAttr

from cosmos_rl_core.canonical import digest, sha256
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.outside_plugins import Pin
from cosmos_rl_core.storage.sealed import RESTORE
from stages.artifacts.identity import fingerprint_of, recipe_of
from stages.artifacts.records import FileEntry, Record
from stages.artifacts.request import Input, InputContents, Request, contents_of
from stages.contracts import RECORDS


class Reference(Section):
    """An artifact made elsewhere, by another run's recipe: nothing before it is made again."""

    url: str
    """The other slot."""
    generation: int
    manifest: str
    """Digest of its manifest."""
    fingerprint: str


class Referral(Record):
    """Stands in a slot, in a manifest's place, for an artifact made elsewhere."""

    kind = "manifest"
    reference: Reference


class Manifest(Record):
    """Written last, put-if-absent: its existence means that the artifact is whole."""

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
    """Those outside the package that the settings name."""
    inputs: dict[str, tuple[Input, ...]]
    files: dict[str, FileEntry]
    """By name; the name does not hold the attempt, so equal bytes have equal content."""
    numerics: dict[str, Any]
    summary: dict[str, float | int | str | None] = {}
    """A few numbers for people and progress lines; a record."""
    _slot: str = PrivateAttr(default="")
    _digest: str = PrivateAttr(default="")
    _referred: bool = PrivateAttr(default=False)

    @property
    def slot(self) -> str:
        """The slot it was read from, which its files lie in."""
        return self._slot

    @property
    def digest(self) -> str:
        """Digest of its bytes in the store."""
        return self._digest

    @property
    def referred(self) -> bool:
        """Whether it was reached by a :class:`Reference`; it then stands whatever the Request."""
        return self._referred

    @classmethod
    def unsealed(cls, data: bytes, url: str, slot: str, generation: int) -> Self:
        """As :meth:`Record.unsealed`; raises also if its digests are not those of what it lists."""
        return super().unsealed(data, url, slot, generation).found(slot, data)

    @classmethod
    def checked(cls, body: dict[str, Any], url: str, slot: str, generation: int) -> Self:
        """As :meth:`unsealed`, from the body."""
        manifest = super().checked(body, url, slot, generation)
        if (wrong := manifest._contradiction()) is not None:
            raise ArtifactError(f"{url} contradicts itself: its {wrong} is not that of what it lists; {RESTORE}")
        return manifest

    def found(self, slot: str, data: bytes, *, referred: bool = False) -> Self:
        """Note the slot and the bytes that it was read from, and whether another slot refers to it."""
        self._slot, self._digest, self._referred = slot, sha256(data), referred
        return self

    def _contradiction(self) -> str | None:
        """The field that does not follow from the others, if there is one."""
        recipe = recipe_of(self.stage, self.version, self.iteration, self.seed, self.config, self.plugins)
        if self.recipe != recipe:
            return "recipe"
        if self.fingerprint != fingerprint_of(recipe, self.inputs):
            return "fingerprint"
        if self.content != content_of(self.files):
            return "content"
        in_place = all(entry.path.split("/", 2)[2:] == [name] for name, entry in self.files.items())
        return None if in_place else "path of a file"

    @property
    def input_contents(self) -> InputContents:
        """As :attr:`Request.input_contents`, at the time the artifact was made."""
        return contents_of(self.inputs)

    def part_content(self, *parts: str) -> str:
        """Digest of the result files of these parts; of all of them where none is named."""
        return content_of(self.files, *parts)

    def has_part(self, part: str) -> bool:
        """Whether there are result files under ``<part>/``."""
        return any(name.startswith(f"{part}/") for name in self.files)

    def why_not(self, request: Request) -> str | None:
        """Why this artifact does not stand for ``request``; None if it does (its files are not looked at)."""
        if self.referred:
            return None
        if self.recipe != request.recipe:
            return f"{request.stage} is asked with other settings{_changed(self, request)}"
        if self.input_contents != request.input_contents:
            old, new = self.input_contents, request.input_contents
            roles = sorted(role for role in old.keys() | new.keys() if old.get(role) != new.get(role))
            return f"{', '.join(roles)} changed since {request.stage} was made"
        return None


def content_of(files: dict[str, FileEntry], *parts: str) -> str:
    """Digest over names and digests of the result files (of some parts)."""
    prefixes = tuple(f"{part}/" for part in parts) or ("",)
    return digest({n: f.sha256 for n, f in files.items() if not n.startswith(RECORDS) and n.startswith(prefixes)})


def _changed(manifest: Manifest, request: Request) -> str:
    if manifest.version != request.version:
        return f" (stage version {manifest.version} -> {request.version})"
    new = request.config.identity()
    names = sorted(name for name in new.keys() | manifest.config.keys() if new.get(name) != manifest.config.get(name))
    if [pin.identity() for pin in manifest.plugins] != [pin.identity() for pin in request.named_plugins]:
        names.append("plugins")
    return f" ({', '.join(names)})" if names else " (iteration or seed)"
