"""Text recognition: does an image show the text between the double quotes of its prompt?

There is no text detection: the whole image is read as one line, scaled to a height of 48 pixels. This suits images that
are mostly the word, not large scenes with a small word.
"""

import importlib
import itertools
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import rapidocr
from pydantic import Field

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.imports import loaded
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._base.pixels import frames_of
from cosmos_rl_core.storage.file_digests import Remembered

LINE_HEIGHT = 48
"""Input height of the recognition model, in pixels."""
BATCH_SIZE = 16


class Options(RewardOptions):
    """Settings of the recognition."""

    facts = Facts(
        scores={"ocr": "1 for the right text, 0 for none of it"},
        source="FlowGRPO, arXiv:2505.05470, with the recognition model of rapidocr",
        wire={"ocr": "ocr_reward"},
        served={"match": "contained"},
        evidence="real weights",
    )
    name: Literal["ocr"] = "ocr"  # pyright: ignore[reportIncompatibleVariableOverride]

    match: Literal["distance", "contained"] = Field(default="distance", json_schema_extra={"neutral": "distance"})
    """How the text that is read is compared with the wanted one. ``distance`` counts every character that differs, also
    those around the wanted text. ``contained`` is 1 if the wanted text is anywhere in it: the arithmetic of FlowGRPO,
    DiffusionNFT and cosmos-rl's service, and the default of a reward service."""
    line_width: int = Field(default=320, ge=LINE_HEIGHT, le=2048)
    """Width in pixels to which a line of height 48 is padded; longer lines are not cut. 96 suits images twice as
    wide as high, and is three times faster than the default."""
    num_threads: int = Field(default=1, ge=1)
    """Number of threads of the recognition model. With one thread, sums have the same order on every machine."""


class Reward:
    """Score ``ocr``: 1 for the right text, less for each wrong character, at least 0; averaged over video frames."""

    def __init__(self, options: Options):
        self._options = options

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages, the digest of the model file, and ``match`` unless ``distance``."""
        path, match = _model_path(), self._options.match
        digest = Remembered.of_user().sha256(path)[:16]
        return f"{_packages()}, {path.name} sha256:{digest}" + (f", {match}" if match != "distance" else "")

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return why the prompt has no word to render, or None."""
        try:
            target(prompt.text)
        except ValueError as error:
            return str(error)
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return ``{"ocr": score}`` for each sample, in order.

        Raises ``ValueError`` if the prompt of one has no word to render, or if its pixels are no pictures.
        """
        # Padding depends on the longest line of a batch. In batches of one shape no score depends on other samples.
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, sample in enumerate(samples):
            alike.setdefault(np.shape(sample.pixels), []).append(i)
        scores: dict[int, dict[str, float] | Exception] = {}
        compared = similarity if self._options.match == "distance" else containment
        for indices in alike.values():
            frames = [frame for i in indices for frame in _frames(samples[i])]
            texts = iter(self._read(frames))
            for i in indices:
                wanted, num_frames = target(samples[i].prompt), len(samples[i].pixels)
                each = [compared(text, wanted) for text in itertools.islice(texts, num_frames)]
                scores[i] = {"ocr": float(np.mean(each))}
        return [scores[i] for i in range(len(samples))]

    def _read(self, frames: list[np.ndarray]) -> list[str]:
        """Return the text in each BGR frame ``[height, width, 3]``; "" if there is none."""
        read = self._recognizer
        batch = importlib.import_module("rapidocr.ch_ppocr_rec").TextRecInput(img=frames)
        return list(read(batch).txts)

    @cached_property
    def _recognizer(self) -> Any:
        path, width, num_threads = _model_path(), self._options.line_width, self._options.num_threads
        if num_threads > 1:  # a forked process would not have the threads
            return recognizer(str(path), width, num_threads)
        return loaded(recognizer, str(path), width, num_threads, Remembered.of_user().sha256(path))


def recognizer(path: str, line_width: int, num_threads: int, _digest: str = "") -> Any:
    """Load the recognition model. ``_digest`` distinguishes files that were at the same path at different times."""
    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",
            "Global.use_det": False,
            "Global.use_cls": False,
            "Rec.model_path": path,
            "Rec.rec_img_shape": [3, LINE_HEIGHT, line_width],
            "Rec.rec_batch_num": BATCH_SIZE,
            "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )
    # The first call makes the recognizer.
    engine(np.zeros((LINE_HEIGHT, LINE_HEIGHT, 3), np.uint8))
    return engine.text_rec


def target(prompt: str) -> str:
    """Return the text between the first two double quotes. Raises ``ValueError`` if there is none."""
    parts = prompt.split('"')
    if len(parts) < 3:
        raise ValueError(f"prompt {prompt!r} needs the text to render between double quotes")
    if not _plain(parts[1]):
        raise ValueError(f"prompt {prompt!r} has nothing between its double quotes")
    return parts[1]


def similarity(text: str, wanted: str) -> float:
    """Return ``max(0, 1 - edit distance / length of wanted)``, in [0, 1]; case and white space are ignored."""
    wanted = _plain(wanted)
    return max(0.0, 1.0 - edit_distance(_plain(text), wanted) / len(wanted))


def containment(text: str, wanted: str) -> float:
    """Return 1 if ``wanted`` is in ``text``, else ``1 - edit distance / length of wanted``, in [0, 1].

    Case and spaces are ignored, but the length counts the spaces of ``wanted``, and the distance is at most its length
    without them. So every text scores above 0 if ``wanted`` has spaces.
    Source: the service of cosmos-rl and FlowGRPO, arXiv:2505.05470, in their released code.
    """
    found, letters = (part.replace(" ", "").lower() for part in (text, wanted))
    distance = 0 if letters in found else min(edit_distance(found, letters), len(letters))
    return 1.0 - distance / max(1, len(wanted))


def edit_distance(a: str, b: str) -> int:
    """Return the fewest insertions, deletions and replacements that turn ``a`` into ``b`` (Levenshtein)."""
    costs = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        diagonal, costs[0] = costs[0], i
        for j, char_b in enumerate(b, start=1):
            replaced = diagonal + (char_a != char_b)
            diagonal, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, replaced)
    return costs[-1]


def _plain(text: str) -> str:
    return "".join(text.lower().split())


def _frames(sample: Sample) -> list[np.ndarray]:
    """Return the sample's frames as BGR, the colour order of the recognition model."""
    return [np.ascontiguousarray(frame[..., ::-1]) for frame in frames_of(sample)]


@cache
def _packages() -> str:
    # Parsing a package's metadata takes milliseconds, and `status` compares the scorer of every iteration.
    return ", ".join(f"{name} {version(name)}" for name in ("rapidocr", "onnxruntime"))


def _model_path() -> Path:
    """Return the path of the recognition model inside rapidocr; with a path, rapidocr downloads nothing."""
    folder = Path(rapidocr.__file__).parent / "models"
    found = sorted(folder.glob("*_rec_*.onnx"))
    if len(found) != 1:
        expected = f"expected one *_rec_*.onnx in {folder}"
        raise ConfigError(f"{expected}, found {len(found)}; reinstall rapidocr>=3.10,<4")
    return found[0]
