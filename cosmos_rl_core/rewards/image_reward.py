"""Preference of people for pictures of a prompt: ImageReward, a perceptron on BLIP's encoding of both."""

from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._base.pixels import frames_of
from cosmos_rl_core.rewards._batches import each, in_batches
from cosmos_rl_core.rewards._clip.scorers import CONFIG
from cosmos_rl_core.rewards._embeddings import packages
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms import _folders

VOCABULARY = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
MEAN, DEVIATION = 0.16717363, 1.0333395
"""Mean and standard deviation of the perceptron's answers to the pictures that ImageReward was trained on."""


class Options(RewardOptions):
    """The model, and the tokenizer of its text encoder."""

    facts = Facts(
        input="image",
        scores={"image_reward": "deviations from the mean of the training data; about -2 to 2"},
        source="ImageReward, arXiv:2304.05977, THUDM/ImageReward",
        torch=True,
        batches=("batch_size",),
        also=("imagereward",),
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["image_reward"] = "image_reward"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder that ``cosmos-flows reward-service prepare image_reward`` wrote from the published ``ImageReward.pt``."""
    tokenizer: UserPath = Field(default="google-bert/bert-base-uncased", min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder or name of the tokenizer."""
    batch_size: int = Field(default=8, ge=1)
    """Number of pictures in every forward pass; fewer are padded. Part of the identity, because it changes the last
    bits."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of the computations of the model."""


class Reward:
    """Score ``image_reward``: the perceptron's answer in deviations from its mean, averaged over video frames."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digest of the files of model and tokenizer.

        Raises :class:`ConfigError` if a file is missing.
        """
        model, tokenizer = self._folders
        if not Path(model, CONFIG).is_file():
            made = "`cosmos-flows reward-service prepare image_reward FILE FOLDER` makes it"
            raise ConfigError(f"no file at {Path(model, CONFIG)}; {made}")
        files = {f"model/{name}": Path(model, name) for name in (CONFIG, *_folders.weight_files(model))}
        found = {f"tokenizer/{name}": Path(tokenizer, name) for name in VOCABULARY if Path(tokenizer, name).is_file()}
        if not found:
            raise ConfigError(f"{tokenizer} has no tokenizer; expected some of {', '.join(VOCABULARY)}")
        return f"{packages()}, tokenizers {version('tokenizers')}, sha256:{files_digest(files | found)[:16]}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: every prompt can be scored. Long ones are cut at 35 tokens."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return ``{"image_reward": score}`` for each sample, or the error that says why it has none, in order."""
        checked = each(samples, frames_of)
        flat = [
            (frame, sample.prompt)
            for sample, frames in zip(samples, checked, strict=True)
            if not isinstance(frames, Exception)
            for frame in frames
        ]
        found = iter(in_batches(flat, self._options.batch_size, self._answers) if flat else [])
        return [
            frames if isinstance(frames, Exception) else _entry([next(found) for _ in frames]) for frames in checked
        ]

    def _answers(self, pairs: list[tuple[np.ndarray, str]]) -> list[float]:
        return self._model.answers([frame for frame, _ in pairs], [prompt for _, prompt in pairs])

    @property
    def _folders(self) -> tuple[str, str]:
        options = self._options
        tokenizer = Path(options.tokenizer)
        found = tokenizer if tokenizer.is_dir() else directories.cached_path(options.tokenizer, "a tokenizer of BERT")
        return str(Path(options.model).resolve()), str(found.resolve())

    @cached_property
    def _model(self) -> Any:
        # Imported here, so that planning never loads torch.
        return import_module("cosmos_rl_core.rewards._image_reward.model").load(
            *self._folders, self._options.param_dtype
        )


def _entry(answers: list[Any]) -> dict[str, float]:
    return {"image_reward": float(np.mean([(answer - MEAN) / DEVIATION for answer in answers]))}


def prepare(source: Path, target: Path) -> None:
    """Convert the published ``ImageReward.pt``, the file ``source``, to the new folder ``target``."""
    tensors = import_module("cosmos_rl_core.importers.pickled_tensors").read(source, "ImageReward.pt")
    import_module("cosmos_rl_core.rewards._image_reward.weights").convert(tensors, target, str(source))
