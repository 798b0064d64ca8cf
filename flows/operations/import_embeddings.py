"""The import of embeddings that cosmos-rl's scripts pickled."""

from pathlib import Path

from cosmos_rl_core.importers import pickled_embeddings


def import_embeddings(folder: str, directory: str) -> str:
    """Convert a folder's pickled embeddings to safetensors; return what was done, as one line."""
    index = pickled_embeddings.import_embeddings(Path(folder), Path(directory))
    captioned = sum(entry["caption_sha256"] is not None for entry in index.values())
    return f"{directory}: {len(index)} embeddings, {captioned} with the digest of their caption"
