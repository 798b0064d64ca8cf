"""Whether an image shows the word that its prompt asks for: text recognition against the text between double quotes.

Recognition only, no text detection: the whole image is read as one line, scaled to a height of 48 pixels. This suits
images that are mostly the word, not a small word somewhere in a large scene.
"""

import importlib
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import rapidocr
from pydantic import Field

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.storage.file_digests import Remembered

LINE_HEIGHT = 48
"""Height in pixels that the recognition model reads."""
BATCH_SIZE = 16


class Options(RewardOptions):
    """How the text is read."""

    name: Literal["ocr"] = "ocr"  # pyright: ignore[reportIncompatibleVariableOverride]

    line_width: int = Field(default=320, ge=LINE_HEIGHT, le=2048)
    """Pixels to which a line of height 48 is padded; longer lines are not cut. 96 fits images twice as wide as high,
    and is three times faster."""
    num_threads: int = Field(default=1, ge=1)
    """Threads of the recognition model. One thread adds numbers in the same order on every machine."""


class Reward:
    """Score ``ocr``: 1 for the right text, less for each wrong character, never below 0; the mean over video frames."""

    def __init__(self, options: Options):
        self._options = options

    @cached_property
    def version(self) -> str:
        """The packages and the model file that read the text."""
        path = _model_path()
        digest = Remembered.of_user().sha256(path)[:16]
        return f"rapidocr {version('rapidocr')}, onnxruntime {version('onnxruntime')}, {path.name} sha256:{digest}"

    def check_prompt(self, text: str) -> str | None:
        """Why no word can be taken from the prompt, or None."""
        try:
            target(text)
        except ConfigError as error:
            return str(error)
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """One ``{"ocr": score}`` a sample, in order, or what kept that one sample from being scored."""
        # Padding follows the longest line of a batch: equal shapes are read together, so no score depends on others.
        shapes = [np.shape(sample.pixels) for sample in samples]
        entries: dict[int, dict[str, float] | Exception] = {}
        for shape in dict.fromkeys(shapes):
            indices = [i for i, other in enumerate(shapes) if other == shape]
            found = self._score_alike([samples[i] for i in indices])
            entries |= dict(zip(indices, found, strict=True))
        return [entries[i] for i in range(len(samples))]

    def _score_alike(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Score samples of one shape together; if that fails, one by one, so that only the ones at fault are lost."""
        try:
            targets = [target(sample.prompt) for sample in samples]
            texts = self._read([frame for sample in samples for frame in _frames(sample.pixels)])
        except Exception as error:
            if len(samples) == 1:
                return [error]
            return [entry for sample in samples for entry in self._score_alike([sample])]
        texts_SF = np.array(texts, dtype=object).reshape(len(samples), -1)
        return [
            {"ocr": float(np.mean([similarity(text, wanted) for text in texts_F]))}
            for texts_F, wanted in zip(texts_SF, targets, strict=True)
        ]

    def _read(self, frames: list[np.ndarray]) -> list[str]:
        """What the model reads in each BGR frame ``[height, width, 3]``; empty text where it reads nothing."""
        recognizer = self._recognizer
        batch = importlib.import_module("rapidocr.ch_ppocr_rec").TextRecInput(img=frames)
        return list(recognizer(batch).txts)

    @cached_property
    def _recognizer(self) -> Any:
        engine = rapidocr.RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_det": False,
                "Global.use_cls": False,
                "Rec.model_path": str(_model_path()),
                "Rec.rec_img_shape": [3, LINE_HEIGHT, self._options.line_width],
                "Rec.rec_batch_num": BATCH_SIZE,
                "EngineConfig.onnxruntime.intra_op_num_threads": self._options.num_threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
        # The recognizer exists from the first call on.
        engine(np.zeros((LINE_HEIGHT, LINE_HEIGHT, 3), np.uint8))
        return engine.text_rec


def target(prompt: str) -> str:
    """The text between the first two double quotes of a prompt. Raises :class:`ConfigError` if there is none."""
    parts = prompt.split('"')
    if len(parts) < 3:
        raise ConfigError(f"prompt {prompt!r} needs the text to render between double quotes")
    if not _plain(parts[1]):
        raise ConfigError(f"prompt {prompt!r} has nothing between its double quotes")
    return parts[1]


def similarity(text: str, wanted: str) -> float:
    """``max(0, 1 - edit distance / length of wanted)``, unitless in [0, 1]; case and white space do not count."""
    wanted = _plain(wanted)
    return max(0.0, 1.0 - edit_distance(_plain(text), wanted) / len(wanted))


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements of one character that turn ``a`` into ``b`` (Levenshtein)."""
    costs = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        diagonal, costs[0] = costs[0], i
        for j, char_b in enumerate(b, start=1):
            replaced = diagonal + (char_a != char_b)
            diagonal, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, replaced)
    return costs[-1]


def _plain(text: str) -> str:
    return "".join(text.lower().split())


def _frames(pixels: np.ndarray) -> list[np.ndarray]:
    """RGB ``[frames, height, width, 3]`` to a list of BGR frames, the colour order of the recognition model."""
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.size == 0:
        found = f"{pixels.dtype} {list(pixels.shape)}"
        raise ValueError(f"expected uint8 pixels [frames, height, width, 3], got {found}")
    return [np.ascontiguousarray(frame[..., ::-1]) for frame in pixels]


def _model_path() -> Path:
    """The recognition model inside the installed rapidocr, named so that nothing is ever downloaded."""
    folder = Path(rapidocr.__file__).parent / "models"
    found = sorted(folder.glob("*_rec_*.onnx"))
    if len(found) != 1:
        expected = f"expected one *_rec_*.onnx in {folder}"
        raise ConfigError(f"{expected}, found {len(found)}; reinstall rapidocr>=3.10,<4")
    return found[0]
