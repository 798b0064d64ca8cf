"""Scorers by CLIP models of transformers: their settings, the identity of their files, and cosines. Without torch.

Torch is loaded with the model, for the first sample that is scored.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._batches import in_batches
from cosmos_rl_core.rewards._embeddings import Embeddings, embedded, normalised, packages, resolve
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms import _folders

CONFIG, IMAGES = "config.json", "preprocessor_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")
"""Files of tokenizers of CLIP. Each has some of them."""
WHAT = "a CLIP model of transformers"
"""Words for the contents of the folders in errors."""
H14 = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
L14 = "openai/clip-vit-large-patch14"


class ClipOptions(RewardOptions):
    """Base of the ``Options`` of scorers by a CLIP model."""

    model: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the CLIP model in the layout of transformers, or its name on the Hugging Face hub, ``owner/name`` or
    ``owner/name@revision``, which is in the local cache. Scores depend on its files, not on their path."""
    processor: UserPath | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Folder or name with the tokenizer and the image settings. Default: ``model``."""
    batch_size: int = Field(default=8, ge=1)
    """Number of images or texts in every forward pass; fewer are padded. Part of the identity, because it changes the
    last bits."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of the computations of the model. The cosines are float64."""


Fit = Callable[[np.ndarray, int], np.ndarray]
"""Cuts or pads a frame ``[height, width, 3]`` to a square, given the side in pixels that the model takes."""


class Clip:
    """A CLIP model on the current GPU if there is one. It is loaded when it is first asked for embeddings."""

    def __init__(self, options: ClipOptions, fit: Fit | None = None) -> None:
        """Take the settings, and a function that fits frames to the model's size; None crops them to their centre."""
        self._options, self._fit = options, fit

    @property
    def folders(self) -> tuple[str, str]:
        """Return the absolute paths of the folder of the model, and of the folder of tokenizer and image settings."""
        options = self._options
        return resolve(options.model, WHAT), resolve(options.processor or options.model, WHAT)

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digest of all files that decide embeddings.

        Raises :class:`ConfigError` if a file is missing.
        """
        model, processor = self.folders
        files = {f"model/{name}": Path(model, name) for name in (CONFIG, *_folders.weight_files(model))}
        found = [name for name in TOKENIZER if Path(processor, name).is_file()]
        files |= {f"processor/{name}": Path(processor, name) for name in (IMAGES, *found)}
        if missing := [str(path) for path in files.values() if not path.is_file()]:
            raise ConfigError(f"a CLIP model needs {', '.join(missing)}; fetch {'it' if len(missing) == 1 else 'them'}")
        if not found:
            raise ConfigError(f"{processor} has no tokenizer; expected some of {', '.join(TOKENIZER)}")
        return f"{packages()}, sha256:{files_digest(files)[:16]}"

    def images(self, samples: Sequence[Sample]) -> list[Embeddings]:
        """Return the embeddings of each sample's frames, float64 ``[frames, dimensions]``, or the sample's error."""
        return embedded(samples, self._options.batch_size, self._embedded)

    def texts(self, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the embedding of each prompt, float64 ``[dimensions]``; equal prompts are computed once."""
        unique = [*dict.fromkeys(prompts)]
        found = in_batches(unique, self._options.batch_size, self._loaded.texts)
        return {prompt: np.asarray(row) for prompt, row in zip(unique, found, strict=True)}

    def cosines(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Return the cosine of each sample's frames and its prompt, averaged over frames, or the sample's error."""
        if not samples:
            return []
        pictures, texts = self.images(samples), self.texts([sample.prompt for sample in samples])
        return [
            found if isinstance(found, Exception) else _cosine(found, texts[sample.prompt])
            for sample, found in zip(samples, pictures, strict=True)
        ]

    @property
    def logit_scale(self) -> float:
        """Return the factor by which the model multiplies cosines to make logits."""
        return self._loaded.logit_scale

    def _embedded(self, frames: list[np.ndarray]) -> list[np.ndarray]:
        loaded = self._loaded
        return [*loaded.images([self._fit(frame, loaded.side) for frame in frames] if self._fit else frames)]

    @cached_property
    def _loaded(self) -> Any:
        # Imported here, so that planning never loads torch.
        models = import_module("cosmos_rl_core.rewards._clip.model")
        return models.load(*self.folders, self._options.param_dtype)


class ClipReward:
    """Base of rewards that are functions of the cosine of picture and prompt, averaged over video frames."""

    def __init__(self, options: ClipOptions) -> None:
        self._clip = Clip(options)

    @property
    def version(self) -> str:
        """Return the versions of the packages and the digest of the model's files."""
        return self._clip.version

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: every prompt can be scored. Long ones are cut at the model's number of tokens."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        found = self._clip.cosines(samples)
        return [one if isinstance(one, Exception) else self.scores(one) for one in found]

    def scores(self, cosine: float) -> dict[str, float]:
        """Return the scores by name, computed from the cosine of picture and prompt."""
        raise NotImplementedError


def _cosine(frames: np.ndarray, text: np.ndarray) -> float:
    """Return the mean cosine of embeddings ``[frames, dimensions]`` and one ``[dimensions]``."""
    return float(
        np.mean([float((row * text).sum()) for row in normalised(frames)]) / np.sqrt(float((text * text).sum()))
    )
