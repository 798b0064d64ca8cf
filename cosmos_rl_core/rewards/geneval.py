"""Numbers, colours and places of objects that a prompt asks for, by a detector and a CLIP model: GenEval.

The prompts' metadata holds what they ask for, as in GenEval's ``*_metadata.jsonl``.
"""

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.pixels import frames_of
from cosmos_rl_core.rewards._batches import each, in_batches
from cosmos_rl_core.rewards._clip.scorers import CONFIG, IMAGES, L14, Clip, ClipOptions
from cosmos_rl_core.rewards._embeddings import normalised
from cosmos_rl_core.rewards._geneval import rule
from cosmos_rl_core.rewards._geneval.rule import COLORS, Detection, Tags
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms import _folders

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
GREY = (153, 153, 153)
"""Colour that replaces everything but the object whose colour is asked for."""
_PHRASES = ("a photo of a {color} {kind}", "a photo of a {color}-colored {kind}", "a photo of a {color} object")


class Options(ClipOptions):
    """The detector of objects, and the CLIP model that names colours."""

    facts = Facts(
        input="image",
        scores={
            "geneval": "share of what was asked for; 1 is all of it, below 0 is far too many objects",
            "geneval_correct": "1 if the benchmark counts the picture as right, else 0",
            "geneval_strict": "1 if there are exactly as many objects as asked for, else 0",
        },
        source="GenEval, arXiv:2310.11513, djghosh13/geneval; graded and strict scores of flow_grpo. The detector is "
        "Mask2Former in the layout of transformers; the benchmark's file is mmdetection's, with other weights",
        torch=True,
        weights=("model", "detector"),
        batches=("batch_size", "detector_batch_size"),
        also=("gen_eval",),
        wire={
            "geneval": "gen_eval_score",
            "geneval_correct": "gen_eval_reward",
            "geneval_strict": "gen_eval_strict",
        },
        evidence="tiny weights",
    )
    name: Literal["geneval"] = "geneval"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(default=L14, min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the CLIP model that names colours, in the layout of transformers, or its name on the Hugging Face hub,
    ``owner/name`` or ``owner/name@revision``, which is in the local cache. Scores depend on its files, not on their
    path."""
    detector: UserPath = Field(default=DETECTOR, min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder or name of the Mask2Former model for instances of COCO's 80 classes, in the layout of transformers."""
    detector_batch_size: int = Field(default=1, ge=1)
    """Number of images in every forward pass of the detector; fewer are padded. Part of the identity, because it
    changes the last bits."""


class Reward:
    """Score ``geneval``, with the benchmark's own and the strict judgement; averaged over video frames."""

    def __init__(self, options: Options) -> None:
        self._options, self._clip = options, Clip(options)

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digests of the files of CLIP model and detector."""
        folder = self._folder
        files = {name: Path(folder, name) for name in (CONFIG, IMAGES, *_folders.weight_files(folder))}
        if missing := [str(path) for path in files.values() if not path.is_file()]:
            raise ConfigError(f"the detector needs {', '.join(missing)}; fetch {'it' if len(missing) == 1 else 'them'}")
        return f"{self._clip.version}, detector sha256:{files_digest(files)[:16]}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return a text on wrong or missing GenEval tags of the prompt; None if the tags are right."""
        try:
            rule.tags_of(prompt.metadata)
        except ValueError as error:
            return str(error)
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        pictures = each(samples, _picture)
        flat = [(frame, tags) for one in pictures if not isinstance(one, Exception) for frame, tags in one]
        found = iter(self._judged(flat))
        return [one if isinstance(one, Exception) else _mean([next(found) for _ in one]) for one in pictures]

    def probe(self, samples: list[Sample]) -> list[Any]:
        """Return a digest of the numbers that detector and CLIP model compute from each sample's first frame.

        Scores may not show them: in a test picture there may be nothing to detect, and then no colour to name.
        """
        frames, size = [sample.pixels[0] for sample in samples], self._options.detector_batch_size
        seen: list[Any] = in_batches(frames, size, self._detector.logits, lambda frame: frame.shape)
        embedded: list[Any] = self._clip.images(samples)
        return [
            sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in (*logits, rows)))
            for logits, rows in zip(seen, embedded, strict=True)
        ]

    def _judged(self, pictures: Sequence[tuple[np.ndarray, Tags]]) -> list[dict[str, float]]:
        """Return the scores of each frame."""
        frames = [frame for frame, _ in pictures]
        size = self._options.detector_batch_size
        detected = in_batches(frames, size, self._detections, lambda frame: frame.shape)
        seen = [
            rule.seen([] if isinstance(found, Exception) else found, tags)
            for found, (_, tags) in zip(detected, pictures, strict=True)
        ]
        asked = [
            (i, kind) for i, (objects, (_, tags)) in enumerate(zip(seen, pictures, strict=True))
            for kind in rule.colored(objects, tags)
        ]  # fmt: skip
        colors = dict(zip(asked, self._colors([(frames[i], seen[i][kind]) for i, kind in asked]), strict=True))
        return [
            rule.judged(objects, tags, lambda kind, i=i: colors[i, kind])
            for i, (objects, (_, tags)) in enumerate(zip(seen, pictures, strict=True))
        ]

    def _colors(self, objects: Sequence[tuple[np.ndarray, Sequence[Detection]]]) -> list[list[str]]:
        """Return the colours of objects. Each entry of ``objects`` is a frame and its objects of one class."""
        crops = [Sample("", "", "", crop(frame, one)[None]) for frame, some in objects for one in some]
        embedded = iter(self._clip.images(crops) if crops else [])
        return [[self._color(np.asarray(next(embedded))[0], one.kind) for one in some] for _, some in objects]

    def _color(self, embedding: np.ndarray, kind: str) -> str:
        """Return the colour whose phrases the embedding of an object fits best."""
        phrases = {c: [phrase.format(color=c, kind=kind) for phrase in _PHRASES] for c in COLORS}
        texts = self._texts(kind, phrases)
        means = normalised(np.stack([normalised(texts[c]).mean(axis=0) for c in COLORS]))
        return COLORS[int((means * embedding).sum(axis=1).argmax())]

    def _texts(self, kind: str, phrases: dict[str, list[str]]) -> dict[str, np.ndarray]:
        """Return, for a class, the embeddings ``[phrases, dimensions]`` of each colour. They are computed only once."""
        if kind not in self._known:
            found = self._clip.texts([phrase for some in phrases.values() for phrase in some])
            self._known[kind] = {c: np.stack([found[phrase] for phrase in some]) for c, some in phrases.items()}
        return self._known[kind]

    @cached_property
    def _known(self) -> dict[str, dict[str, np.ndarray]]:
        return {}

    @cached_property
    def _folder(self) -> str:
        name = self._options.detector
        path = Path(name)
        found = path if path.is_dir() else directories.cached_path(name, "a Mask2Former model of transformers")
        return str(found.resolve())

    def _detections(self, frames: list[np.ndarray]) -> list[list[Detection]]:
        return self._detector.detections(frames)

    @cached_property
    def _detector(self) -> Any:
        # Imported here, so that planning never loads torch.
        model = import_module("cosmos_rl_core.rewards._geneval.model")
        return model.load(self._folder, self._options.param_dtype)


def crop(frame: np.ndarray, one: Detection) -> np.ndarray:
    """Return the pixels in an object's box, uint8 ``[height, width, 3]``; all that is not the object is grey."""
    left, top, right, bottom = map(round, one.box)
    picture = np.where(one.mask[..., None], frame, np.array(GREY, np.uint8))
    return np.asarray(Image.fromarray(picture[top:bottom, left:right]))


def _picture(sample: Sample) -> list[tuple[np.ndarray, Tags]]:
    """Return each frame with the prompt's tags. Raises ``ValueError`` if pixels or tags are wrong."""
    frames = frames_of(sample)
    tags = rule.tags_of(sample.metadata)
    return [(frame, tags) for frame in frames]


def _mean(entries: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([entry[name] for entry in entries])) for name in entries[0]}
