"""GenEval's rule: do the objects that a detector found in a picture fit the tags of its prompt? Without torch.

A tag asks for a number of objects of a class, and perhaps for their colour, or for their place relative to an earlier
tag's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

CLASSES = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light"),
    *("fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow"),
    *("elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee"),
    *("skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard"),
    *("tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple"),
    *("sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch"),
    *("potted plant", "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote"),
    *("computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock"),
    *("vase", "scissors", "teddy bear", "hair drier", "toothbrush"),
)
"""GenEval's names of the 80 classes of COCO, in COCO's order."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
"""Confidence above which an object counts: in general, and for prompts that ask for a number of objects."""
MAX_OBJECTS = 16
"""Largest number of objects of one class."""
POSITION_THRESHOLD = 0.1
"""Share of the sum of two objects' sizes. Objects with closer centres have no relation such as left of or above."""


class Wanted(BaseModel):
    """Objects that a prompt asks for."""

    kind: str = Field(alias="class")
    count: int = Field(ge=1)
    color: Literal["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"] | None = (
        None
    )
    position: tuple[Literal["left of", "right of", "above", "below"], int] | None = None
    """Where they are, seen from the objects of an earlier tag, and that tag's index."""

    @field_validator("color")
    @classmethod
    def _check_color(cls, color: str | None) -> str | None:
        if color is not None and color not in COLORS:
            raise ValueError(f"{color!r} is none of {', '.join(COLORS)}")
        return color

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in CLASSES:
            raise ValueError(f"{kind!r} is none of GenEval's 80 classes, such as {', '.join(CLASSES[:3])}")
        return kind


class Tags(BaseModel):
    """The objects that a prompt asks for, from its metadata."""

    tag: Literal["single_object", "two_object", "counting", "colors", "position", "color_attr"]
    include: list[Wanted] = Field(min_length=1)
    exclude: list[Wanted] = []
    """Objects of which the picture must show fewer than their count."""

    @model_validator(mode="after")
    def _check_positions(self) -> "Tags":
        for i, wanted in enumerate(self.include):
            if wanted.position is not None and not 0 <= wanted.position[1] < i:
                raise ValueError(f"include[{i}].position names {wanted.position[1]}, expected an earlier entry")
        return self


@dataclass(frozen=True)
class Detection:
    """An object that a detector found."""

    kind: str
    score: float
    """Confidence of the detector, in [0, 1]."""
    box: tuple[float, float, float, float]
    """Left, top, right and bottom of the object, in pixels."""
    mask: np.ndarray
    """Pixels of the object: bool ``[height, width]``."""


Seen = Mapping[str, Sequence[Detection]]
"""The objects that count, by class, the surest first."""
ColorsOf = Callable[[str], Sequence[str]]
"""The colours of all objects of a class that count, in order."""


def tags_of(metadata: Mapping[str, Any]) -> Tags:
    """Return the tags in a prompt's metadata. Raises ``ValueError`` if they are missing or wrong."""
    if "include" not in metadata:
        found = ", ".join(sorted(metadata)) or "nothing"
        expected = "expected GenEval's `tag` and `include`; use prompts from a geneval *_metadata.jsonl"
        raise ValueError(f"the prompt's metadata holds {found}, {expected}")
    try:
        return Tags.model_validate(dict(metadata))
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, e['loc'])) or 'tags'}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"the prompt's GenEval tags are wrong: {'; '.join(mistakes)}") from error


def seen(detections: Sequence[Detection], tags: Tags) -> dict[str, list[Detection]]:
    """Return the objects that are sure enough for these tags, by class, the surest first."""
    threshold = COUNTING_THRESHOLD if tags.tag == "counting" else THRESHOLD
    found: dict[str, list[Detection]] = {}
    for one in sorted(detections, key=lambda one: -one.score):
        if one.score > threshold and len(of_kind := found.setdefault(one.kind, [])) < MAX_OBJECTS:
            of_kind.append(one)
    return {kind: objects for kind, objects in found.items() if objects}


def colored(objects: Seen, tags: Tags) -> list[str]:
    """Return, sorted, the classes of found objects whose colours the prompt asks for."""
    return sorted({wanted.kind for wanted in tags.include if wanted.color is not None and wanted.kind in objects})


def judged(objects: Seen, tags: Tags, colors_of: ColorsOf) -> dict[str, float]:
    """Return three scores by name: the graded one, and 1 or 0 for a picture that is right or wrong.

    ``geneval_correct`` judges like the benchmark, ``geneval_strict`` asks for exactly as many objects as the prompt.
    """
    graded, strict = _graded(objects, tags, colors_of)
    right = _right(objects, tags, colors_of)
    return {"geneval": graded, "geneval_correct": float(right), "geneval_strict": float(strict)}


def relations(one: Detection, other: Detection) -> set[str]:
    """Return where an object is, seen from another one: none, one or two of left of, right of, above, below."""
    boxes = np.array([one.box, other.box]).reshape(2, 2, 2)
    (center, center_other), sizes = boxes.mean(axis=1), np.abs(boxes[:, 1] - boxes[:, 0])
    offset = center - center_other
    beyond = np.maximum(np.abs(offset) - POSITION_THRESHOLD * sizes.sum(axis=0), 0) * np.sign(offset)
    if np.all(np.abs(beyond) < 1e-3):
        return set()
    x, y = beyond / np.linalg.norm(offset)
    found = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in found.items() if holds}


def _right(objects: Seen, tags: Tags, colors_of: ColorsOf) -> bool:
    """Return whether the picture is right for the benchmark.

    If it shows more objects of a class than asked for, only the surest ones count. `exclude` limits their number.
    """
    groups: list[Sequence[Detection] | None] = []
    for wanted in tags.include:
        found = objects.get(wanted.kind, [])[: wanted.count]
        fits = len(found) == wanted.count
        fits = fits and (wanted.color is None or _matching(wanted, found, colors_of) == wanted.count)
        groups.append(found if fits and _placed(wanted, found, groups) else None)
    crowded = any(len(objects.get(wanted.kind, [])) >= wanted.count for wanted in tags.exclude)
    return None not in groups and not crowded


def _graded(objects: Seen, tags: Tags, colors_of: ColorsOf) -> tuple[float, bool]:
    """Return the mean of all terms, and whether every tag fits exactly.

    As in the original, too many objects cost as much as too few, so that a term may be below 0; a wrong place adds the
    terms 0 and 1; and `exclude` is not read.
    """
    groups: list[Sequence[Detection] | None] = []
    terms: list[float] = []
    for wanted in tags.include:
        found = objects.get(wanted.kind, [])
        terms.append(_share(len(found), wanted.count))
        fits = len(found) == wanted.count
        if not fits and (wanted.color is not None or wanted.position is not None):
            terms.append(0.0)
        if fits and wanted.color is not None:
            matching = _matching(wanted, found, colors_of)
            terms.append(_share(matching, wanted.count))
            fits = matching == wanted.count
        if fits and wanted.position is not None:
            target, fits = groups[wanted.position[1]], _placed(wanted, found, groups)
            terms += [0.0] if target is None else [1.0] if fits else [0.0, 1.0]
        groups.append(found if fits else None)
    return sum(terms) / len(terms), None not in groups


def _share(found: int, wanted: int) -> float:
    return 1 - abs(wanted - found) / wanted


def _matching(wanted: Wanted, found: Sequence[Detection], colors_of: ColorsOf) -> int:
    """Return the number of found objects that have the wanted colour."""
    return [*colors_of(wanted.kind)[: len(found)]].count(str(wanted.color))


def _placed(wanted: Wanted, found: Sequence[Detection], groups: Sequence[Sequence[Detection] | None]) -> bool:
    """Return whether every object is where it should be, seen from each object of the earlier tag."""
    if wanted.position is None:
        return True
    relation, index = wanted.position
    target = groups[index]
    return target is not None and all(relation in relations(one, other) for one, other in product(found, target))
