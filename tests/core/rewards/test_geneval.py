"""GenEval's rule on detections that are known, and the detector against transformers' own post-processing."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import geneval
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._geneval import model, rule
from cosmos_rl_core.rewards._geneval.rule import COUNTING_THRESHOLD, MAX_OBJECTS, Detection, tags_of
from tests import tiny_scorers
from tests.test_torch_scorers import samples_of
from tests.tiny_scorers import geneval as tiny

NO_MASK = np.ones((1, 1), bool)


def one(kind: str, x: float = 50, y: float = 50, score: float = 0.95, side: float = 10) -> Detection:
    half = side / 2
    return Detection(kind, score, (x - half, y - half, x + half, y + half), NO_MASK)


def judged(
    detections: Sequence[Detection],
    *include: dict[str, Any],
    tag: str = "two_object",
    exclude: Any = (),
    colors: Any = (),
) -> tuple[float, float, float]:
    tags = tags_of({"tag": tag, "include": [*include], "exclude": [*exclude]})
    named = dict(colors)
    found = rule.judged(rule.seen(detections, tags), tags, lambda kind: named[kind])
    return found["geneval"], found["geneval_correct"], found["geneval_strict"]


DOG, CAT, TWO = {"class": "dog", "count": 1}, {"class": "cat", "count": 1}, {"class": "dog", "count": 2}
RED = {"class": "dog", "count": 1, "color": "red"}
LEFT = {"class": "dog", "count": 1, "position": ["left of", 0]}


@pytest.mark.parametrize(
    ("detections", "include", "expected"),
    [
        ([one("dog")], [DOG], (1, 1, 1)),
        ([], [DOG], (0, 0, 0)),
        ([one("cat")], [DOG], (0, 0, 0)),
        ([one("dog"), one("cat")], [DOG, CAT], (1, 1, 1)),
        ([one("dog")], [DOG, CAT], (0.5, 0, 0)),
        ([one("dog")], [TWO], (0.5, 0, 0)),
        ([one("dog")] * 2, [TWO], (1, 1, 1)),
        # More than asked for: right for the benchmark without `exclude`, not exact, and the grade falls, even below 0.
        ([one("dog")] * 3, [TWO], (0.5, 1, 0)),
        ([one("dog")] * 3, [DOG], (-1, 1, 0)),
    ],
)
def test_scores_follow_from_the_number_of_objects_that_are_found(
    detections: list[Detection], include: Any, expected: tuple[float, float, float]
):
    assert judged(detections, *include) == expected


def test_one_object_too_many_is_wrong_if_it_is_excluded():
    exclude = [{"class": "dog", "count": 3}]
    assert judged([one("dog")] * 2, TWO, exclude=exclude) == (1, 1, 1)
    assert judged([one("dog")] * 3, TWO, exclude=exclude) == (0.5, 0, 0)


def test_objects_count_from_a_confidence_on_which_is_higher_where_numbers_are_asked_for():
    some = [one("dog", score=0.95), one("dog", score=0.5), one("dog", score=0.3)]
    assert judged(some, TWO) == (1, 1, 1)
    assert judged(some, TWO, tag="counting") == (0.5, 0, 0)
    assert judged([one("dog", score=COUNTING_THRESHOLD)], DOG, tag="counting") == (0, 0, 0)


def test_at_most_a_number_of_the_surest_objects_count():
    some = [one("dog", x=i, score=0.4 + i / 100) for i in range(MAX_OBJECTS + 4)]
    kept = rule.seen(some, tags_of({"tag": "two_object", "include": [DOG]}))["dog"]
    assert kept == some[: -MAX_OBJECTS - 1 : -1]


@pytest.mark.parametrize(
    ("colors", "include", "expected"),
    [
        (["red"], [RED], (1, 1, 1)),
        (["blue"], [RED], (0.5, 0, 0)),
        (["red", "blue"], [RED | {"count": 2}], (0.75, 0, 0)),
        # The benchmark asks the surest object alone.
        (["red", "blue"], [RED], (0, 1, 0)),
        (["blue", "red"], [RED], (0, 0, 0)),
        ([], [RED], (0, 0, 0)),
    ],
)
def test_only_colours_of_the_objects_asked_for_count(colors: list[str], include: Any, expected: Any):
    assert judged([one("dog")] * len(colors), *include, colors={"dog": colors}) == expected


def test_an_attribute_belongs_to_its_own_object():
    include = [RED, {"class": "cat", "count": 1, "color": "blue"}]
    some = [one("dog"), one("cat")]
    assert judged(some, *include, colors={"dog": ["red"], "cat": ["blue"]}) == (1, 1, 1)
    assert judged(some, *include, colors={"dog": ["blue"], "cat": ["red"]}) == (0.5, 0, 0)


@pytest.mark.parametrize(
    ("dog", "expected"),
    [((10, 50), (1, 1, 1)), ((90, 50), (0.75, 0, 0)), ((50, 10), (0.75, 0, 0)), ((48.5, 50), (0.75, 0, 0))],
)
def test_a_place_is_seen_from_the_earlier_object(dog: tuple[float, float], expected: Any):
    assert judged([one("dog", *dog), one("cat")], CAT, LEFT) == expected


def test_a_place_relative_to_nothing_is_wrong():
    assert judged([one("dog", 10)], CAT, LEFT) == (1 / 3, 0, 0)
    assert judged([one("cat")], CAT, LEFT) == (1 / 3, 0, 0)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (0, 50, {"left of"}),
        (100, 50, {"right of"}),
        (50, 0, {"above"}),
        (50, 100, {"below"}),
        (0, 0, {"left of", "above"}),
        (50, 50, set[str]()),
        # Sides of 10 and 10: centres may be 2 apart.
        (52, 50, set[str]()),
        (54, 50, set[str]()),  # half of the distance is beyond, not more
        (55, 50, {"right of"}),
    ],
)
def test_relations_leave_out_a_part_of_the_objects_sizes(x: float, y: float, expected: set[str]):
    assert rule.relations(one("dog", x, y), one("cat")) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, "the prompt's metadata holds nothing, expected GenEval's `tag` and `include`"),
        ({"style": "x"}, "holds style, expected"),
        ({"include": [DOG]}, "tag: Field required"),
        ({"tag": "colors", "include": []}, "include"),
        ({"tag": "colors", "include": [{"class": "dragon", "count": 1}]}, "'dragon' is none of GenEval's 80 classes"),
        ({"tag": "colors", "include": [DOG | {"count": 0}]}, r"include.0.count"),
        ({"tag": "colors", "include": [DOG | {"color": "beige"}]}, r"include.0.color"),
        ({"tag": "position", "include": [LEFT]}, "names 0, expected an earlier entry"),
        ({"tag": "position", "include": [CAT, LEFT | {"position": ["near", 0]}]}, r"include.1.position"),
    ],
)
def test_prompts_without_their_tags_say_so(metadata: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=expected):
        tags_of(metadata)


def test_numbers_that_a_table_made_text_are_read():
    tags = tags_of({"tag": "position", "include": [CAT, {"class": "dog", "count": "2", "position": ["above", "0"]}]})
    assert (tags.include[1].count, tags.include[1].position) == (2, ("above", 0))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_scorers.settings("geneval", tmp_path_factory.mktemp("geneval"))


def test_a_sample_without_tags_fails_alone(settings: dict[str, Any]):
    reward = geneval.Reward(geneval.Options(**settings))
    tagged = samples_of("image", 1)[0]
    bare = Sample("s", "p", "a dog", tagged.pixels)
    scored, failed = reward.score([tagged, bare])
    assert isinstance(scored, dict)
    assert "expected GenEval's `tag` and `include`" in str(failed)


def test_a_detections_box_and_confidence_follow_from_its_mask():
    classes = torch.zeros(2, 81, device="cpu")
    classes[0, 16], classes[1, 80] = 9.0, 9.0
    masks = torch.full((2, 6, 8), -4.0, device="cpu")
    masks[0, 1:3, 2:5] = 4.0
    masks[0, 4, 6] = 1.0
    (found,) = model.objects_in(classes, masks)
    assert (found.kind, found.box, found.mask.sum()) == ("dog", (2, 1, 7, 5), 7)
    sure = (6 / (1 + math.exp(-4)) + 1 / (1 + math.exp(-1))) / 7
    assert found.score == pytest.approx(math.exp(9) / (math.exp(9) + 80) * sure, rel=1e-5)


def test_masks_cover_only_the_part_of_the_input_that_is_the_picture():
    masks = torch.zeros(1, 4, 4, device="cpu")
    masks[:, :2], masks[:, 2:] = 1.0, -1.0
    # Only the upper half of the padded input is the picture.
    found = model.resized(masks, (4, 4), (2, 4), (8, 16))
    assert found.shape == (1, 8, 16)
    assert (found == 1).all()


def test_the_colour_is_asked_of_the_object_on_grey():
    frame = np.full((6, 8, 3), 7, np.uint8)
    mask = np.zeros((6, 8), bool)
    mask[1:3, 2:5] = True
    mask[1, 2] = False
    cut = geneval.crop(frame, Detection("dog", 1.0, (2, 1, 5, 3), mask))
    assert cut.shape == (2, 3, 3)
    assert cut[0, 0].tolist() == [153] * 3
    assert (cut.reshape(-1, 3)[1:] == 7).all()


def test_a_detector_of_other_classes_is_refused(tmp_path: Path):
    model.Segmenter(tiny.config(classes=3)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="knows 3 classes, expected COCO's 80"):
        model.load(str(tmp_path), "float32")


def test_every_mistake_of_a_prompts_tags_is_known_when_a_run_is_planned():
    reward = geneval.Reward(geneval.Options(model="none", detector="none"))

    def said(metadata: dict[str, Any]) -> str | None:
        return reward.check_prompt(Prompt(id="p", text="two dogs", metadata=metadata))

    assert said({"tag": "counting", "include": [TWO]}) is None
    assert said({}) == (
        "the prompt's metadata holds nothing, expected GenEval's `tag` and `include`; use prompts from a geneval "
        "*_metadata.jsonl"
    )
    wrong = said({"tag": "count", "include": [{"class": "dragon", "count": 0}]})
    assert wrong is not None
    assert [part.partition(":")[0] for part in wrong.partition("wrong: ")[2].split("; ")] == [
        "tag",
        "include.0.class",
        "include.0.count",
    ]
