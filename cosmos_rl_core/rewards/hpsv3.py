"""Preference of people for a picture of its prompt: HPSv3, a Qwen2-VL-7B with layers that rate at a special token.

The folder of the model is one that ``cosmos-flows reward-service prepare hpsv3`` has made of the published files.
"""

from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.pixels import frames_of
from cosmos_rl_core.rewards._batches.preparation import Prepared
from cosmos_rl_core.rewards._vlm.files import VlmFiles, VlmOptions, device_and_dtype
from cosmos_rl_core.vlms._base import processor_of
from cosmos_rl_core.vlms._patches import smart_size

TOKEN = "<|Reward|>"
"""The special token at which the model rates."""
PROMPT, PLACE = "prompt.txt", "{text_prompt}"
"""File of the model's folder with the text around the prompt, and the prompt's place in it."""
CONSTANTS = ("INSTRUCTION", "prompt_with_special_token")
"""Names, in ``data_collator_qwen.py``, of the two parts of the text that the model was trained with."""
SIZE = 256
"""Approximate number of tokens of a picture: every picture is scaled to it, whatever its shape."""


class Options(VlmOptions):
    """The prepared model."""

    facts = Facts(
        input="image",
        scores={"hpsv3": "a rating without bounds; about 10 for good pictures, about 0 for poor ones"},
        source="HPSv3, arXiv:2508.03789, MizzenAI/HPSv3; the mean of its two outputs",
        torch=True,
        evidence="tiny weights",
    )
    name: Literal["hpsv3"] = "hpsv3"  # pyright: ignore[reportIncompatibleVariableOverride]


class Reward:
    """Score ``hpsv3``: the mean of the rating's distribution, averaged over video frames."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._files = VlmFiles(options, PROMPT)

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digests of the model's files and of the text around prompts.

        Raises :class:`ConfigError` that names what is missing.
        """
        found = self._files.version
        if missing := [part for part in (TOKEN, PLACE) if self._files.prompt.count(part) != 1]:
            raise ConfigError(f"{PROMPT} of {self._files.folder}: expected {', '.join(missing)} in it, each once")
        return found

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return why a prompt cannot be scored, or None."""
        return _refusal(prompt.text)

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's score by name, or the error that says why it has none, in order."""
        model = self._model

        def score(_: Sample, frames: list[Any]) -> dict[str, float]:
            # The head gives a mean and the logarithm of a deviation. The mean is the score.
            return {"hpsv3": float(np.mean([model.ratings(frame)[0][0] for frame in frames]))}

        return self._prepared.each(samples, score)

    def expect(self, samples: list[Sample]) -> None:
        """Prepare samples in the background."""
        self._prepared.expect(samples)

    @cached_property
    def _prepared(self) -> Prepared[list[Any]]:
        return Prepared(self._batches)

    def _batches(self, sample: Sample) -> list[Any]:
        """Return the model's inputs for each frame of a sample."""
        frames = frames_of(sample)
        if (why := _refusal(sample.prompt)) is not None:
            raise ValueError(why)
        return [self._batch(frame, sample.prompt) for frame in frames]

    def _batch(self, frame: np.ndarray, prompt: str) -> Any:
        # Not by str.format, which would take braces in a prompt for fields.
        asked = {"type": "text", "text": self._files.prompt.replace(PLACE, prompt)}
        shown = {"type": "image", "image": scaled(frame, self._factor)}
        return self._model.prepare([{"role": "user", "content": [shown, asked]}])

    @cached_property
    def _factor(self) -> int:
        return processor_of(self._files.folder).image.factor

    @cached_property
    def _model(self) -> Any:
        # Imported here, so that planning never loads torch.
        models = import_module("cosmos_rl_core.rewards._vlm.rating_model")
        device, dtype = device_and_dtype(self._options.param_dtype)
        return models.load(models.HPSv3Model, [TOKEN], self._files.folder, device, dtype, {})


def _refusal(text: str) -> str | None:
    return f"prompt {text!r} holds {TOKEN}, special to the model" if TOKEN in text else None


def scaled(frame: np.ndarray, factor: int) -> np.ndarray:
    """Return a picture scaled to about :data:`SIZE` tokens of ``factor`` x ``factor`` pixels, as the original does."""
    area = SIZE * factor**2
    height, width = smart_size((1, *frame.shape[:2]), 1, factor, (area, area))
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))


def prepare(source: Path, target: Path) -> None:
    """Write the folder ``target``, which the option ``model`` then names, from the files in the folder ``source``.

    These are ``HPSv3.safetensors`` of MizzenAI/HPSv3, Qwen2-VL-7B-Instruct in the folder ``base``, and
    ``data_collator_qwen.py`` of the repository MizzenAI/HPSv3, which is read, not run. Raises :class:`ConfigError` for
    files that are missing or have another layout.
    """
    file, texts = source / "HPSv3.safetensors", source / "data_collator_qwen.py"
    folders = import_module("cosmos_rl_core.rewards._vlm.rating_weights")
    prompt = "".join(folders.constant(texts, name, "MizzenAI/HPSv3, from hpsv3/dataset") for name in CONSTANTS)
    if not file.is_file():
        raise ConfigError(f"{file} is missing; fetch it from MizzenAI/HPSv3")
    weights = folders.renamed(import_module("safetensors.torch").load_file(file))
    folders.write(target, source / "base", weights, [TOKEN], {PROMPT: prompt})
