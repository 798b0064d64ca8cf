"""Judges behind a real HTTP service: what they are sent, how answers become scores, and when they become none."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.rewards import unified_reward, vlm_judge
from cosmos_rl_core.rewards._base import Sample
from tests.caption_server import TOKEN, Asked, CaptionServer, Reply, completion, serving

RUBRIC = 'How well does it show "{prompt}"? End with `Score: N`, N from 0 to 10.'


@pytest.fixture(scope="module")
def running() -> Iterator[CaptionServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(running: CaptionServer) -> Iterator[CaptionServer]:
    running.asked.clear()
    running.token, running.caption = "", lambda asked: completion("Score: 5")
    yield running
    assert (running.mistakes, running.replies) == ([], [])


def judge(server: CaptionServer, **settings: Any) -> vlm_judge.Reward:
    values: dict[str, Any] = {"url": server.url, "model": "vlm", "rubric": RUBRIC, "lowest": 0, "highest": 10}
    values |= {"pause_s": 0.001} | ({} if "key" in settings else {"pattern": r"Score: (\S+)"}) | settings
    return vlm_judge.Reward(vlm_judge.Options.model_validate(values), {"OPENAI_KEY": TOKEN})


def unified(server: CaptionServer, rubric_file: Path) -> unified_reward.Reward:
    return unified_reward.Reward(
        unified_reward.Options(url=server.url, pause_s=0.001, rubric_file=str(rubric_file)), {}
    )


def sample(prompt: str = "a dog", frames: int = 1, height: int = 4, width: int = 6) -> Sample:
    pixels = np.arange(frames * height * width * 3, dtype=np.uint8).reshape(frames, height, width, 3)
    return Sample(f"s-{prompt}", "p", prompt, pixels)


def test_a_judge_is_sent_the_lossless_picture_and_the_rubric_with_the_prompt(server: CaptionServer):
    given = sample("a {red} dog")
    assert judge(server).score([given]) == [{"vlm_judge": 5.0}]
    (asked,) = server.asked
    assert (asked.model, asked.settings) == ("vlm", {"max_tokens": 512, "temperature": 0.0})
    assert asked.instruction == RUBRIC.replace("{prompt}", "a {red} dog")
    assert np.array_equal(np.asarray(asked.pictures[0]), given.pixels[0])


def test_evenly_spaced_frames_of_a_video_are_judged(server: CaptionServer):
    given = sample(frames=10)
    judge(server, num_frames=2).score([given])
    assert [np.asarray(picture).tolist() for picture in server.asked[0].pictures] == given.pixels[[2, 7]].tolist()


def test_references_are_sent_before_the_sample(server: CaptionServer):
    shown = [sample(height=height).pixels for height in (5, 6)]
    given = replace(sample(), references=shown)
    taking, needing = judge(server, references="taken"), judge(server, references="needed")
    for one in (taking, needing, judge(server)):
        assert one.score([given]) == [{"vlm_judge": 5.0}]
    assert taking.score([sample()]) == [{"vlm_judge": 5.0}]
    pictures = [[np.asarray(one).tolist() for one in asked.pictures] for asked in server.asked]
    alone, before = [given.pixels[0].tolist()], [one[0].tolist() for one in shown]
    assert pictures == [before + alone, before + alone, alone, alone]
    (failed,) = needing.score([sample()])
    assert "prompt p has no reference to compare with" in str(failed)
    assert len({one.version for one in (taking, needing, judge(server))}) == 3


def test_scores_come_in_order(server: CaptionServer):
    server.caption = lambda asked: completion(f"Score: {asked.instruction.split('dog ')[1][0]}")
    found = judge(server, concurrency=4, criterion="dogs").score([sample(f"dog {i}") for i in range(9)])
    assert found == [{"vlm_judge-dogs": float(i)} for i in range(9)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It is good. Score: 7.5", 7.5),
        ("Score: 3\nScore: 3", 3.0),
        ("Score: 0", 0.0),
        ("Score: high", "no number"),
        ("I cannot judge it.", "no number"),
        ("Score: 11", "states 11, expected 0 to 10"),
        ("Score: -1", "states -1, expected 0 to 10"),
        ("Score: nan", "no number"),
        ("Score: 1e999", "no number"),
        ("Score: 2 or Score: 8", "2 different values"),
    ],
)
def test_a_pattern_finds_a_score_on_the_scale_or_the_sample_fails(
    server: CaptionServer, answer: str, expected: float | str
):
    check(judge(server), server, answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"why": "good", "score": 7}', 7.0),
        ('Here it is:\n```json\n{"score": 2.5}\n```', 2.5),
        ('{"score": "7"}', "with a number 'score'"),
        ('{"score": true}', "with a number 'score'"),
        ('{"score": NaN}', "with a number 'score'"),
        ('{"Score": 7}', "with a number 'score'"),
        ("[7]", "with a number 'score'"),
        ("7/10", "is no JSON object"),
        ('{"a":' * 50_000, "is no JSON object"),
        ('{"score": 70}', "states 70, expected 0 to 10"),
    ],
)
def test_a_key_names_a_score_on_the_scale_or_the_sample_fails(
    server: CaptionServer, answer: str, expected: float | str
):
    check(judge(server, key="score"), server, answer, expected)


def check(reward: vlm_judge.Reward, server: CaptionServer, answer: str, expected: float | str) -> None:
    server.replies = [completion(answer)]
    (found,) = reward.score([sample()])
    if isinstance(expected, str):
        assert isinstance(found, ValueError)
        assert expected in str(found)
    else:
        assert found == {"vlm_judge": expected}


def test_a_failure_is_of_its_sample_alone(server: CaptionServer):
    def answer(asked: Asked) -> Reply:
        return completion("no") if "cat" in asked.instruction else completion("Score: 5")

    server.caption = answer
    bad = Sample("s", "p", "a dog", np.zeros((1, 4, 4, 1), np.uint8))
    first, cat, shape, last = judge(server).score([sample(), sample("a cat"), bad, sample("a bird")])
    assert first == last == {"vlm_judge": 5.0}
    assert isinstance(cat, ValueError)
    assert "expected uint8 pixels" in str(shape)
    assert len(server.asked) == 3


def test_a_refused_sample_fails_and_a_busy_service_is_asked_again(server: CaptionServer):
    server.replies = [Reply(400, "too large"), Reply(429, "", {"Retry-After": "0"}), Reply(503)]
    refused, scored = judge(server, concurrency=1).score([sample(), sample()])
    assert isinstance(refused, RefusedError)
    assert "400" in str(refused)
    assert scored == {"vlm_judge": 5.0}
    server.replies = [Reply(503)] * 2
    with pytest.raises(UnavailableError, match="in 2 tries: 503"):
        judge(server, tries=2).score([sample()])


def test_the_token_is_checked_before_a_run_and_sent(server: CaptionServer):
    server.token = TOKEN
    reward = judge(server, token_variable="OPENAI_KEY")
    reward.check_service()
    assert reward.score([sample()]) == [{"vlm_judge": 5.0}]
    with pytest.raises(ConfigError, match="OPENAI_OTHER is not set"):
        judge(server, token_variable="OPENAI_OTHER").check_service()


def test_a_judges_version_changes_with_model_rubric_and_parser_but_not_with_its_address(server: CaptionServer):
    version = judge(server).version
    assert judge(server, url="http://host/v1", concurrency=1).version == version
    changes: list[dict[str, Any]] = [
        {"model": "other"},
        {"rubric": "Score: N"},
        {"pattern": r"Score: (\d)"},
        {"key": "score"},
        {"highest": 5},
        {"scorer_version": "revision 7"},
    ]
    assert len({version, *(judge(server, **change).version for change in changes)}) == 7
    assert judge(server, scorer_version="revision 7").version.startswith("vlm revision 7 behind a chat endpoint, ")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"key": "score", "pattern": "(.)"}, "either pattern or key"),
        ({"pattern": None}, "either pattern or key"),
        ({"pattern": "Score"}, "0 groups, expected one"),
        ({"pattern": "("}, "no regular expression"),
        ({"lowest": 10}, "not below highest"),
        ({"lowest": float("nan")}, "finite"),
        ({"rubric": ""}, "rubric"),
    ],
)
def test_mistakes_of_the_settings_are_refused(settings: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=expected):
        judge(CaptionServer(url="http://host/v1"), **settings)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("dog (object): 1\nFinal Score: 4", 0.8),
        ("Final Score: 3.62", 3.62 / 5),
        ("Final Score: 5", 1.0),
        ("Final Score: 0", "states 0, expected 1 to 5"),
        ("Final Score: 10", "states 10, expected 1 to 5"),
        ("Final Score: five", "no number"),
        ("4", "no number"),
    ],
)
def test_unified_reward_is_its_final_score_over_five(
    server: CaptionServer, answer: str, expected: float | str, tmp_path: Path
):
    (tmp_path / "rubric.txt").write_text("From 1 to 5, how good is [{prompt}]?", encoding="utf-8")
    server.replies = [completion(answer)]
    (found,) = unified(server, tmp_path / "rubric.txt").score([sample("a red dog")])
    assert server.asked[0].instruction == "From 1 to 5, how good is [a red dog]?"
    assert server.asked[0].model == "UnifiedReward-7b-v1.5"
    if isinstance(expected, str):
        assert expected in str(found)
    else:
        assert found == {"unified_reward": expected}


def test_the_question_of_unified_reward_is_a_file_and_part_of_its_identity(server: CaptionServer, tmp_path: Path):
    first, second, wrong = (tmp_path / name for name in ("first.txt", "second.txt", "wrong.txt"))
    first.write_text("Rate [{prompt}].", encoding="utf-8")
    second.write_text("Rate this: [{prompt}].", encoding="utf-8")
    wrong.write_text("Rate it.", encoding="utf-8")
    assert unified(server, first).version != unified(server, second).version
    with pytest.raises(ConfigError, match=r"has \{prompt\} 0 times, expected once"):
        _ = unified(server, wrong).version
    with pytest.raises(ConfigError, match=r"missing\.txt' cannot be read"):
        _ = unified(server, tmp_path / "missing.txt").version
