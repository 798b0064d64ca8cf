"""Quality, motion and text alignment of a video: VideoReward, a Qwen2-VL-2B with a head on three special tokens.

The folder of the model is one that ``cosmos-flows reward-service prepare video_align`` has made of the published files.
"""

import math
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.datasets._base import ItemError, Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.pixels import frames_of
from cosmos_rl_core.rewards._batches.preparation import Prepared
from cosmos_rl_core.rewards._vlm.files import VlmFiles, VlmOptions, device_and_dtype
from cosmos_rl_core.rewards._vlm.video_align import NORMALISATION, PROMPT, TOKENS

LEAST_FRAMES, MOST_FRAMES = 4, 768


class Options(VlmOptions):
    """The model, and what it sees."""

    facts = Facts(
        input="video",
        scores={
            "video_align": "sum of the three, about -15 to 9",
            "vq_reward": "visual quality, normalised: 0 is the mean of its training set, 1 a deviation",
            "mq_reward": "motion quality, normalised",
            "ta_reward": "text alignment, normalised",
        },
        source="VideoReward, arXiv:2501.13918, with KwaiVGI/VideoReward",
        torch=True,
        also=("dance_grpo",),
        wire={"video_align": "overall_reward"},
        evidence="tiny weights",
    )
    name: Literal["video_align"] = "video_align"  # pyright: ignore[reportIncompatibleVariableOverride]
    fps: float = Field(default=2.0, gt=0)
    """Frames that the model sees of each second of a video; at least 4 in all, an even number."""
    min_frame_pixels: int = Field(default=128 * 28**2, ge=1)
    """Pixels to which smaller frames are scaled up."""
    max_frame_pixels: int = Field(default=256 * 28**2, ge=1)
    """Pixels to which larger frames are scaled down."""


class Reward:
    """Score ``video_align``: the sum of visual quality, motion quality and text alignment, and each of the three."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._files = VlmFiles(options, PROMPT)

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digests of the model's files and of the text around prompts.

        Raises :class:`ConfigError` that names what is missing.
        """
        found = self._files.version
        text = self._files.prompt
        if missing := [part for part in (*TOKENS.values(), "{text_prompt}") if text.count(part) != 1]:
            raise ConfigError(f"{PROMPT} of {self._files.folder}: expected {', '.join(missing)} in it, each once")
        _ = self._normalisation
        return found

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return why a prompt cannot be scored, or None."""
        return _refusal(prompt.text)

    def score(self, samples: list[Sample]) -> list[dict[str, Any] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        model = self._model
        return self._prepared.each(samples, lambda _, batch: self._scores(model.ratings(batch)))

    def expect(self, samples: list[Sample]) -> None:
        """Prepare samples in the background."""
        self._prepared.expect(samples)

    @cached_property
    def _prepared(self) -> Prepared[Any]:
        return Prepared(self._batch)

    def _batch(self, sample: Sample) -> Any:
        """Return the model's inputs for a sample: video and question."""
        frames = frames_of(sample)
        if (why := _refusal(sample.prompt)) is not None:
            raise ValueError(why)
        shown = {
            "type": "video",
            "video": frames[sampled(len(frames), sample.fps, self._options.fps)],
            "fps": self._options.fps,
        }
        # Not by str.format, which would take braces in a prompt for fields.
        asked = {"type": "text", "text": self._files.prompt.replace("{text_prompt}", sample.prompt)}
        return self._model.prepare([{"role": "user", "content": [shown, asked]}])

    def _scores(self, rated: list[list[float]]) -> dict[str, Any]:
        # The head gives all scores at every token; each score counts at its own token.
        raw = [row[i] for i, row in enumerate(rated)]
        found = {
            name: (value - mean) / deviation
            for (name, (mean, deviation)), value in zip(self._normalisation.items(), raw, strict=True)
        }
        return {"video_align": math.fsum(found.values()), **found}

    @cached_property
    def _normalisation(self) -> dict[str, tuple[float, float]]:
        """Return mean and deviation of each raw score. Raises :class:`ConfigError` for a file that has other values."""
        path = Path(self._files.folder, NORMALISATION)
        try:
            told = from_json(path.read_text(encoding="utf-8"))
            found = {name: (float(told[name]["mean"]), float(told[name]["std"])) for name in TOKENS}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: expected mean and std of {', '.join(TOKENS)}: {error!r}") from error
        if not all(math.isfinite(mean) and 0 < std < math.inf for mean, std in found.values()):
            raise ConfigError(f"{path}: expected finite means, and deviations above 0")
        return found

    @cached_property
    def _model(self) -> Any:
        # Imported here, so that planning never loads torch.
        models = import_module("cosmos_rl_core.rewards._vlm.rating_model")
        bounds = {"shortest_edge": self._options.min_frame_pixels, "longest_edge": self._options.max_frame_pixels}
        changes = {"video": {"do_sample_frames": False, "fps": None, "num_frames": None, "size": bounds}}
        device, dtype = device_and_dtype(self._options.param_dtype)
        tokens = [*TOKENS.values()]
        return models.load(models.VideoRewardModel, tokens, self._files.folder, device, dtype, changes)


def _refusal(text: str) -> str | None:
    found = [token for token in TOKENS.values() if token in text]
    return f"prompt {text!r} holds {', '.join(found)}, special to the model" if found else None


def sampled(total: int, fps: float, seen: float) -> list[int]:
    """Return the indices of the frames that the model sees of a video of ``total`` frames at ``fps`` frames a second.

    It sees ``seen`` frames of each second, evenly spaced from the first to the last. Raises :class:`ItemError` for a
    video of fewer than 2 frames.
    """
    most = min(MOST_FRAMES, total) // 2 * 2
    count = round(min(max(total / fps * seen, LEAST_FRAMES), most) / 2) * 2
    if count < 2:
        raise ItemError(f"{total} frames, expected at least 2")
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def prepare(source: Path, target: Path) -> None:
    """Write the folder ``target``, which the option ``model`` then names, from the files in the folder ``source``.

    These are ``model_config.json`` and ``checkpoint-*/model.pth`` of KwaiVGI/VideoReward, Qwen2-VL-2B-Instruct in the
    folder ``base``, and ``prompt_template.py`` of the repository KwaiVGI/VideoAlign, which is read, not run. Raises
    :class:`ConfigError` for files that are missing or have another layout.
    """
    import_module("cosmos_rl_core.rewards._vlm.video_align_weights").convert(source, target)
