"""Embeddings of frames and references by any model of pictures, and their cosines. Without torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._base.pixels import frames_of, no_reference
from cosmos_rl_core.rewards._batches import each, in_batches

Embeddings = np.ndarray | Exception
"""Embeddings of a sample's frames, float64 ``[frames, dimensions]``, or the error that says why it has none."""


class Embedder(Protocol):
    """A model of pictures."""

    def images(self, samples: Sequence[Sample]) -> list[Embeddings]:
        """Return the embeddings of each sample's frames, or the sample's error."""
        ...


def embedded(
    samples: Sequence[Sample], size: int, forward: Callable[[list[np.ndarray]], Sequence[np.ndarray]]
) -> list[Embeddings]:
    """Return the embeddings of each sample's frames, or the sample's error. ``forward`` always gets ``size`` frames."""
    checked = each(samples, frames_of)
    flat = [frame for frames in checked if not isinstance(frames, Exception) for frame in frames]
    found = iter(in_batches(flat, size, forward))
    return [
        frames if isinstance(frames, Exception) else np.stack([np.asarray(next(found)) for _ in frames])
        for frames in checked
    ]


def similarities(embedder: Embedder, samples: Sequence[Sample]) -> list[float | Exception]:
    """Return for each sample the mean cosine of its frames with its prompt's references, or its error.

    The mean is over all pairs of a frame of the sample and a frame of a reference.
    """
    # Samples of a prompt have the same references, which are embedded once.
    pictures = {id(one): Sample(s.sample_id, s.prompt_id, s.prompt, one) for s in samples for one in s.references}
    shown = dict(zip(pictures, embedder.images([*pictures.values()]), strict=True))
    return [
        _compared(sample, frames, [shown[id(one)] for one in sample.references])
        for sample, frames in zip(samples, embedder.images(samples), strict=True)
    ]


def _compared(sample: Sample, frames: Embeddings, references: Sequence[Embeddings]) -> float | Exception:
    found = [frames, *references]
    if (wrong := next((one for one in found if isinstance(one, Exception)), None)) is not None:
        return wrong
    if not references:
        return no_reference(sample)
    own, *others = (normalised(one) for one in found if not isinstance(one, Exception))
    return float(np.concatenate([(own @ other.T).ravel() for other in others]).mean())


def normalised(embeddings: np.ndarray) -> np.ndarray:
    """Return embeddings ``[n, dimensions]`` divided by their lengths."""
    return embeddings / np.sqrt((embeddings * embeddings).sum(axis=1, keepdims=True))


def resolve(name: str, what: str) -> str:
    """Return the absolute path of a folder, or of a repository of the Hugging Face hub in the local cache.

    ``what`` says in errors what the folder should hold.
    """
    path = Path(name)
    return str((path if path.is_dir() else directories.cached_path(name, what)).resolve())


def packages() -> str:
    """Return the packages that compute embeddings, with versions; torch's without its build, such as ``+cpu``."""
    torch = version("torch").partition("+")[0]
    return f"transformers {version('transformers')}, torch {torch}, pillow {version('pillow')}"
