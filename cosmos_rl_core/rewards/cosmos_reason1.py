"""Physical plausibility of a video: the probability that Cosmos-Reason1-7B-Reward finds no anomaly in it.

The model is asked about the video, and the logits of *Yes* (there are anomalies) and *No* are compared as its next
token. Frames, sizes and scores are the same as in cosmos-rl's service.
"""

from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.datasets._base import ItemError, Prompt
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.pixels import frames_of
from cosmos_rl_core.rewards._batches.preparation import Prepared
from cosmos_rl_core.rewards._vlm.files import VlmFiles, VlmOptions, device_and_dtype
from cosmos_rl_core.vlms._patches import smart_size

PROMPT = "system_prompt.txt"
"""File of the model's folder with the system prompt that it was trained with; its model card has the text."""
MAX_FRAMES, STEP, FACTOR = 160, 2, 28
"""Largest number of frames; frames in a patch; side in pixels of a token."""
MIN_PIXELS, MAX_PIXELS = 16 * FACTOR**2 * STEP, 9216 * FACTOR**2 * STEP
"""Smallest number of pixels of a frame, and largest number of pixels of all frames together."""


class Options(VlmOptions):
    """The model and its question."""

    facts = Facts(
        input="video",
        scores={
            "cosmos_reason1": "probability of no anomaly, 0 to 1",
            "yes_logit": "logit of an anomaly",
            "no_logit": "logit of none",
        },
        source="the service of cosmos-rl, with nvidia/Cosmos-Reason1-7B-Reward",
        torch=True,
        wire={"cosmos_reason1": "no_score"},
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["cosmos_reason1"] = "cosmos_reason1"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(default="nvidia/Cosmos-Reason1-7B-Reward", min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the model, or its name on the Hugging Face hub, ``owner/name`` or ``owner/name@revision``, which is in
    the local cache. Scores depend on its files, not on their path."""
    question: str | None = None
    """Question about the video. Default: the sample's prompt, as cosmos-rl's service asks."""


class Reward:
    """Score ``cosmos_reason1``, with the two logits and their ``prediction``, ``Good`` or ``Bad``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._files = VlmFiles(options, PROMPT)

    @property
    def version(self) -> str:
        """Return the versions of the packages and the digests of the model's files and of the system prompt."""
        return self._files.version

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: every prompt can be scored."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, Any] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        tokens = self._tokens
        return self._prepared.each(samples, lambda _, batch: self._scores(batch, tokens))

    def expect(self, samples: list[Sample]) -> None:
        """Prepare samples in the background."""
        self._prepared.expect(samples)

    @cached_property
    def _prepared(self) -> Prepared[Any]:
        return Prepared(self._batch)

    def _batch(self, sample: Sample) -> Any:
        """Return the model's inputs for a sample: system prompt, video and question."""
        frames, fps = sampled(frames_of(sample), sample.fps)
        asked = {"type": "text", "text": self._options.question or sample.prompt}
        shown = {"type": "video", "video": frames, "fps": fps}
        system = {"role": "system", "content": self._files.prompt}
        return self._vlm.prepare([[system, {"role": "user", "content": [shown, asked]}]])

    def _scores(self, batch: Any, tokens: list[int]) -> dict[str, Any]:
        yes, no = self._vlm.next_logits(batch, tokens)
        # The exponential of the larger logit is 1, so nothing overflows.
        exponentials = np.exp(np.array([yes, no]) - max(yes, no))
        probability = float(exponentials[1] / exponentials.sum())
        prediction = "Bad" if yes > no else "Good"
        return {"cosmos_reason1": probability, "yes_logit": yes, "no_logit": no, "prediction": prediction}

    @cached_property
    def _tokens(self) -> list[int]:
        return [self._vlm.first_token(word) for word in ("Yes", "No")]

    @cached_property
    def _vlm(self) -> Any:
        # Imported here, so that planning never loads torch.
        vlms = import_module("cosmos_rl_core.vlms._model")
        # The model sees all frames that it gets, because they were chosen here.
        every = {"video": {"do_sample_frames": False, "fps": None, "num_frames": None}}
        return vlms.load(self._files.folder, *device_and_dtype(self._options.param_dtype), every)


def sampled(frames: np.ndarray, fps: float) -> tuple[np.ndarray, float]:
    """Return the frames that the model sees of a video with ``fps``, scaled to whole tokens, and their rate.

    It sees an even number of evenly spaced frames, at most 160, which together have at most 9216 tokens; a token covers
    two frames. Raises :class:`ItemError` for fewer than two frames, and for a shape that no allowed size fits.
    """
    interval = (len(frames) - 1) // MAX_FRAMES + 1
    taken = frames[::interval]
    taken = taken[: len(taken) // STEP * STEP]
    if len(taken) == 0:
        raise ItemError(f"{len(frames)} frames, expected at least {STEP}")
    bounds = MIN_PIXELS, MAX_PIXELS // len(taken)
    height, width = smart_size((1, *taken.shape[1:3]), 1, FACTOR, bounds)
    scaled = [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in taken]
    return np.stack([np.asarray(frame) for frame in scaled]), fps / interval
