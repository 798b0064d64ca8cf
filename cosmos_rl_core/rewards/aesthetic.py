"""Beauty of pictures as people rated them: a linear head or a perceptron on CLIP embeddings of LAION's predictors."""

from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors.numpy
from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._clip.scorers import L14, Clip, ClipOptions
from cosmos_rl_core.rewards._embeddings import normalised
from cosmos_rl_core.storage.file_digests import Remembered

HEAD = "head.safetensors"
LINEAR = ("",)
PERCEPTRON = tuple(f"layers.{i}." for i in (0, 2, 4, 6, 7))
"""Beginnings of the names of the perceptron's weights. It has no activations; the missing numbers are dropouts."""
Layers = list[tuple[np.ndarray, np.ndarray]]


class Options(ClipOptions):
    """The CLIP model, and the head on its embeddings."""

    facts = Facts(
        input="image",
        scores={"aesthetic": "a rating; about 1 to 10"},
        source="christophschuhmann/improved-aesthetic-predictor (sac+logos+ava1-l14-linearMSE); LAION-AI/"
        "aesthetic-predictor (linear)",
        torch=True,
        batches=("batch_size",),
        evidence="tiny weights",
    )
    name: Literal["aesthetic"] = "aesthetic"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(default=L14, min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the CLIP model in the layout of transformers, or its name on the Hugging Face hub, ``owner/name`` or
    ``owner/name@revision``, which is in the local cache. Scores depend on its files, not on their path."""
    head: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder that ``cosmos-flows reward-service prepare aesthetic`` wrote from a published ``.pth``:
    ``sac+logos+ava1-l14-linearMSE.pth``, or the linear ``sa_0_4_vit_l_14_linear.pth``."""


class Reward:
    """Score ``aesthetic``: the head's rating of a picture's embedding of length 1, averaged over video frames."""

    def __init__(self, options: Options) -> None:
        self._clip, self._file = Clip(options), Path(options.head, HEAD)

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digests of the files of model and head.

        Raises :class:`ConfigError` if a file is missing.
        """
        if not self._file.is_file():
            made = "`cosmos-flows reward-service prepare aesthetic FILE FOLDER` makes it"
            raise ConfigError(f"no file at {self._file}; {made}")
        return f"{self._clip.version}, head sha256:{Remembered.of_user().sha256(self._file)[:16]}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: prompts are not read."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return ``{"aesthetic": rating}`` for each sample, or the error that says why it has none, in order."""
        found = self._clip.images(samples) if samples else []
        return [one if isinstance(one, Exception) else {"aesthetic": self._rating(one)} for one in found]

    def _rating(self, frames: np.ndarray) -> float:
        """Return the mean rating of embeddings ``[frames, dimensions]``."""
        ratings: list[float] = []
        for values in normalised(frames):
            for weight, bias in self._layers:
                # Not a matrix product, whose bits may depend on the number of rows.
                values = (weight * values).sum(axis=1) + bias
            ratings.append(float(values[0]))
        return float(np.mean(ratings))

    @cached_property
    def _layers(self) -> Layers:
        return _layers(safetensors.numpy.load_file(self._file), str(self._file))


def _layers(tensors: dict[str, np.ndarray], where: str) -> Layers:
    """Return weights and biases in float64, in order. Raises :class:`ConfigError` if they are no known head."""
    for names in (LINEAR, PERCEPTRON):
        if tensors.keys() == {f"{name}{part}" for name in names for part in ("weight", "bias")}:
            return [(tensors[f"{name}weight"].astype(float), tensors[f"{name}bias"].astype(float)) for name in names]
    expected = "`weight` and `bias`, or layers 0, 2, 4, 6 and 7 of a perceptron without activations"
    raise ConfigError(f"{where} has {', '.join(sorted(tensors)) or 'no tensors'}; expected {expected}")


def prepare(source: Path, target: Path) -> None:
    """Convert a published head, the file ``source``, to the new folder ``target``.

    Raises :class:`ConfigError` if it is no known head.
    """
    tensors = import_module("cosmos_rl_core.importers.pickled_tensors").read(source, "a head such as *-linearMSE.pth")
    head = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    _layers(head, str(source))
    target.mkdir(parents=True)
    safetensors.numpy.save_file(head, target / HEAD)
