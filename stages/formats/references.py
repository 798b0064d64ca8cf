"""Pictures and clips that prompts refer to, read from a store's pool by the digests of their files; and their sizes."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.storage import store
from stages.artifacts.artifact import Artifact
from stages.artifacts.pool import PICTURES
from stages.artifacts.records import store_of
from stages.artifacts.request import Input
from stages.formats.parts import REFERENCES, Parts, references_in

HELD = 16
"""Most decoded references in memory. Samples of a prompt share them."""


class Pictures:
    """References of the store that a slot is in."""

    def __init__(self, slot: str) -> None:
        self._root = store.join(store_of(slot), "dataset", PICTURES)
        self._decoded = lru_cache(HELD)(self._read)

    def of(self, digests: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Return references, each uint8 RGB ``[frames, height, width, 3]``; a picture has one frame.

        Raises :class:`ArtifactError` for one that is missing or damaged.
        """
        return tuple(self._decoded(one) for one in digests)

    def data(self, digest: str) -> bytes:
        """Return the bytes of a reference's file. Raises :class:`ArtifactError` if it is missing or damaged."""
        data, fault = self.looked_at(digest)
        if fault:
            url = store.join(self._root, digest)
            raise ArtifactError(
                f"{url} is {fault}; restore it, or remove it and make the stage 'references' again (of a prepared "
                "dataset: cosmos-flows preprocess --verify)"
            )
        return data

    def looked_at(self, digest: str) -> tuple[bytes, str]:
        """Return the bytes of a reference's file, and its fault: ``missing``, ``damaged``, or ""."""
        data = store.read_if_exists(store.join(self._root, digest))
        if data is None:
            return b"", "missing"
        return data, "" if sha256(data) == digest else "damaged"

    def _read(self, digest: str) -> np.ndarray:
        return decoded(self.data(digest))


def sizes_of(sources: Iterable[Input], parts: Parts | None = None) -> dict[str, sizes.Pictures]:
    """Return the sizes of each prompt's references, by prompt id, from the settings of artifacts and from parts."""
    made_for = (Artifact(source).manifest.config["prompts"] for source in sources)
    prompts = (prompt for some in made_for for prompt in some)
    found: dict[str, sizes.Pictures] = {}
    found |= {one["id"]: [(ref["height"], ref["width"]) for ref in one.get("references", ())] for one in prompts}
    if parts is not None:
        items = parts.items[parts.items[REFERENCES].notna()].drop_duplicates("prompt_id")
        for prompt, references in zip(items["prompt_id"], items[REFERENCES], strict=True):
            found[prompt] = [(one.height, one.width) for one in references_in(references)]
    return found


def kinds_of(sources: Iterable[Input], model: str, parts: Parts | None = None) -> dict[str, int]:
    """Return a number for the shapes of each prompt's references, by prompt id, without prompts that have none.

    Prompts with equal numbers fit in one forward pass. Prompts come from the settings of ``sources`` and from
    ``parts``.
    """
    referring = {prompt: pictures for prompt, pictures in sizes_of(sources, parts).items() if pictures}
    path = directories.resolve_path(model) if referring else ""
    shapes = {prompt: sizes.reference_tokens(path, pictures) for prompt, pictures in referring.items()}
    numbers = {shape: number for number, shape in enumerate(sorted({*shapes.values()}))}
    return {prompt: numbers[shape] for prompt, shape in shapes.items()}
