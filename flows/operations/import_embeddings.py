"""The import of embeddings that cosmos-rl's scripts pickled."""

from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.importers import pickled_embeddings


@dataclass(frozen=True)
class Imported:
    """Embeddings in safetensors files."""

    directory: str
    embeddings: int
    captioned: int
    """Number of embeddings with the digest of their caption."""

    def __str__(self) -> str:
        return f"{self.directory}: {self.embeddings} embeddings, {self.captioned} with the digest of their caption"


def import_embeddings(folder: str, directory: str) -> Imported:
    """Convert a folder's pickled embeddings to safetensors."""
    index = pickled_embeddings.import_embeddings(Path(folder), Path(directory))
    captioned = sum(entry["caption_sha256"] is not None for entry in index.values())
    return Imported(directory, len(index), captioned)
