"""Prompts from the files that cosmos-rl reads, and media of random pixels."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from cosmos_rl_core.datasets import mock, prompts
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.errors import ConfigError


def texts_of(path: Path, content: str) -> list[str]:
    path.write_text(content, encoding="utf-8")
    found = prompts.prompts(prompts.Options(path=str(path)))
    assert [prompt.id for prompt in found] == [prompt_id(prompt.text) for prompt in found]
    return [prompt.text for prompt in found]


def test_each_line_of_a_text_is_a_prompt(tmp_path: Path):
    content = "\ufeff a cat \r\nein Käse\n\na cat\n\x0ba \x85 dog\n"
    assert texts_of(tmp_path / "train.txt", content) == ["a cat", "ein Käse", "a \x85 dog"]


def test_each_line_of_json_is_an_object_with_a_prompt(tmp_path: Path):
    content = (
        '{"tag": "counting", "include": [{"class": "cat", "count": 2}], "prompt": "two cats"}\n{"prompt": "x\\ny"}\n'
    )
    assert texts_of(tmp_path / "train_metadata.jsonl", content) == ["two cats", "x\ny"]


def test_values_next_to_the_prompt_and_values_in_metadata_are_metadata(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "a", "tag": "x", "metadata": {"count": 2}}\n{"prompt": "b", "metadata": "text"}\n'
        '{"prompt": "c", "metadata": {"tag": 1}, "tag": 1}',
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r'line 3: tag next to "metadata" and in it; expected one of the two'):
        prompts.prompts(prompts.Options(path=str(tmp_path / "a.jsonl")))
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = prompts.prompts(prompts.Options(path=str(tmp_path / "a.jsonl")))
    assert [prompt.metadata for prompt in found] == [{"tag": "x", "count": 2}, {"metadata": "text"}]


def test_a_file_may_be_one_list_of_objects(tmp_path: Path):
    assert texts_of(tmp_path / "v.JSON", json.dumps([{"prompt": "b"}, {"prompt": " a"}, {"prompt": "b"}])) == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", " \n", ["holds no prompt"]),
        ("a.json", "[]", ["holds no prompt"]),
        ("a.json", '{"prompt": "a"}', ["expected a list of objects"]),
        (
            "a.jsonl",
            '{"prompt": "a"}\n\n[1]\n{"prompt": 3}\n{',
            ["line 3: expected", "line 4: expected", "line 5: exp"],
        ),
        ("a.json", '[{"prompt": "a"}, {"prompt": " "}, "b"]', ["entry 2: expected an object", "entry 3: expected an"]),
        (
            "a.jsonl",
            '{"prompt": "a", "x": NaN}\n{"prompt": "\\ud800"}',
            ["line 1: Out of range", "line 2: 'utf-8' codec"],
        ),
        ("a.csv", "a", ["expected one of .txt, .jsonl, .json"]),
    ],
)
def test_every_mistake_of_a_file_is_named_at_once(tmp_path: Path, name: str, content: str, says: list[str]):
    with pytest.raises(ConfigError) as caught:
        texts_of(tmp_path / name, content)
    assert all(line in str(caught.value) for line in says), str(caught.value)
    assert str(caught.value).count("expected") == len([line for line in says if "exp" in line])


def test_a_missing_file_and_a_file_that_is_no_text_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no prompt file at .*nowhere\.txt"):
        prompts.prompts(prompts.Options(path=str(tmp_path / "nowhere.txt")))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.txt cannot be read"):
        prompts.prompts(prompts.Options(path=str(tmp_path / "bytes.txt")))


@pytest.mark.parametrize(("name", "reason"), [("a.json", r"a\.json cannot be read: "), ("a.jsonl", "line 1: expected")])
def test_json_that_is_too_deep_is_a_mistake(tmp_path: Path, name: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        texts_of(tmp_path / name, "[" * 100_000)


@pytest.mark.parametrize("page", ["<!DOCTYPE html>\n<html>404</html>", "\n <HTML><body>", "\ufeff<html lang='en'>"])
def test_a_web_page_is_no_list_of_prompts(tmp_path: Path, page: str):
    (tmp_path / "p.txt").write_text(page, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"p\.txt is a web page, as a download that failed leaves it"):
        prompts.prompts(prompts.Options(path=str(tmp_path / "p.txt")))
    (tmp_path / "p.txt").write_text("<htmlish> art\n", encoding="utf-8")
    assert len(prompts.prompts(prompts.Options(path=str(tmp_path / "p.txt")))) == 1


def test_the_path_of_the_prompts_is_no_part_of_a_runs_identity():
    assert prompts.Options(path="a.txt").identity() == prompts.Options(path="b.txt").identity()


def test_mock_pixels_are_evenly_distributed_differ_and_stay_when_items_are_added():
    few, many = (mock.Media(mock.Options(num_items=n, size=(64, 96), frames=5)) for n in (8, 100))
    pixels = np.stack([few.item(i)[0] for i in range(8)])
    assert pixels.shape == (8, 5, 64, 96, 3)
    # Of a discrete uniform distribution on 0..255: mean 127.5, deviation 73.9; both within five standard errors.
    assert pixels.mean() == pytest.approx(127.5, abs=5 * 73.9 / pixels.size**0.5)
    assert pixels.std() == pytest.approx(((256**2 - 1) / 12) ** 0.5, abs=0.2)
    assert len({item.tobytes() for item in pixels}) == 8
    assert few.item(3)[1] == many.item(3)[1]
    np.testing.assert_array_equal(few.item(3)[0], many.item(3)[0])


def test_mock_captions_take_turns():
    items = mock.Media(mock.Options(num_items=5, num_prompts=2, size=(8, 8)))
    assert [items.prompt_of(i).text for i in range(5)] == [f"placeholder {n}" for n in (0, 1, 0, 1, 0)]
    with pytest.raises(ValidationError, match="num_prompts 3 is more than num_items 2"):
        mock.Options(num_items=2, num_prompts=3)
