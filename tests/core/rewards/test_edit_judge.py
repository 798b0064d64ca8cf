"""The judge of edits behind a real HTTP service: what it sees and is asked, and how its answers become scores."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.rewards import edit_judge
from cosmos_rl_core.rewards._base import Sample
from tests.caption_server import Asked, CaptionServer, Reply, completion, serving

DRAWS = np.random.default_rng(0)


def picture(frames: int = 1, height: int = 4, width: int = 6) -> np.ndarray:
    return DRAWS.integers(0, 256, (frames, height, width, 3), np.uint8)


EDIT = Sample("s0", "p0", "give {it} a hat", picture(), references=(picture(height=5),))


@pytest.fixture(scope="module")
def running() -> Iterator[CaptionServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(running: CaptionServer) -> Iterator[CaptionServer]:
    running.asked.clear()
    running.caption = lambda asked: completion('{"followed": 9, "unchanged": 4}')
    yield running
    assert (running.mistakes, running.replies) == ([], [])


def judge(server: CaptionServer, **settings: Any) -> edit_judge.Reward:
    values: dict[str, Any] = {"url": server.url, "model": "vlm", "pause_s": 0.001} | settings
    return edit_judge.Reward(edit_judge.Options.model_validate(values), {})


def test_a_judge_sees_the_references_then_the_result_and_reads_the_instruction(server: CaptionServer):
    assert judge(server).score([EDIT]) == [{"edit_judge": 6.0, "followed": 9.0, "unchanged": 4.0}]
    (asked,) = server.asked
    assert [np.asarray(one).tolist() for one in asked.pictures] == [
        EDIT.references[0][0].tolist(),
        EDIT.pixels[0].tolist(),
    ]
    assert asked.instruction.startswith(
        "You see first 1 picture from before an edit, then 1 picture of its result.\n"
        "The instruction of the edit: give {it} a hat\n"
    )
    assert asked.instruction.endswith('{"followed": NUMBER, "unchanged": NUMBER}')
    judge(server, rubric="was {prompt} done?").score([EDIT])
    assert server.asked[1].instruction.endswith("of its result.\nwas give {it} a hat done?")


def test_several_references_and_frames_are_shown_in_order(server: CaptionServer):
    clip, result = picture(frames=4), picture(frames=6)
    one = replace(EDIT, pixels=result, references=(EDIT.references[0], clip))
    judge(server, num_frames=2).score([one])
    (asked,) = server.asked
    expected = [EDIT.references[0][0], clip[1], clip[3], result[1], result[4]]
    assert [np.asarray(one).tolist() for one in asked.pictures] == [one.tolist() for one in expected]
    assert asked.instruction.startswith("You see first 3 pictures from before an edit, then 2 pictures of its result.")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"followed": 10, "unchanged": 10}', 10.0),
        ('{"followed": 7.5, "unchanged": 3, "why": "the sky is new"}', math.sqrt(22.5)),
        ('```json\n{"unchanged": 10, "followed": 0}\n```', 0.0),
        ('{"followed": 8}', "no JSON object with a number 'unchanged'"),
        ('{"followed": "8", "unchanged": 3}', "no JSON object with a number 'followed'"),
        ('{"followed": true, "unchanged": 3}', "no JSON object with a number 'followed'"),
        ('{"followed": NaN, "unchanged": 3}', "no JSON object with a number 'followed'"),
        ('{"followed": 11, "unchanged": 3}', "states 11, expected 0 to 10"),
        ('{"followed": 8, "unchanged": -1}', "states -1, expected 0 to 10"),
        ("[8, 3]", "no JSON object with a number 'followed'"),
        ("followed: 8, unchanged: 3", "is no JSON object"),
        ("I cannot judge it.", "is no JSON object"),
    ],
)
def test_an_answer_with_both_numbers_is_a_score_and_any_other_a_failure(
    server: CaptionServer, answer: str, expected: float | str
):
    server.replies = [completion(answer)]
    (found,) = judge(server).score([EDIT])
    if isinstance(expected, str):
        assert isinstance(found, ValueError)
        assert expected in str(found)
    else:
        assert isinstance(found, dict)
        assert found["edit_judge"] == expected


def test_a_failure_is_of_its_sample_alone_and_scores_keep_their_order(server: CaptionServer):
    def answer(asked: Asked) -> Reply:
        (number,) = re.findall(r"make (\d) hats", asked.instruction)
        return completion("no" if number == "3" else f'{{"followed": {number}, "unchanged": 9}}')

    server.caption = answer
    samples = [replace(EDIT, sample_id=f"s{i}", prompt=f"make {i} hats") for i in range(6)]
    samples[1], samples[4] = replace(samples[1], references=()), replace(samples[4], references=(picture()[..., :1],))
    found = judge(server, concurrency=3).score(samples)
    assert [one["edit_judge"] if isinstance(one, dict) else None for one in found] == [
        0.0,
        None,
        math.sqrt(18),
        None,
        None,
        math.sqrt(45),
    ]
    assert "prompt p0 has no reference to compare with" in str(found[1])
    assert "is no JSON object: no" in str(found[3])
    assert "expected uint8 pixels" in str(found[4])
    assert judge(server).score(samples[::-1])[::-1][::5] == found[::5]
    assert [judge(server).score([one])[0] for one in samples[::5]] == found[::5]


def test_the_question_is_part_of_the_version(server: CaptionServer):
    versions = {judge(server, **one).version for one in ({}, {"rubric": "x"}, {"model": "y"}, {"scorer_version": "2"})}
    assert len(versions) == 4
