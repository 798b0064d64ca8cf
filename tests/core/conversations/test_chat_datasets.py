"""Conversations in the formats of LLaVA and of Hugging Face: what is read, and every mistake."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cosmos_rl_core.chat_datasets import hf_chat, llava
from cosmos_rl_core.chat_datasets._base import Row, media_of
from cosmos_rl_core.errors import ConfigError
from tests import hf_folder


def turns(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": value} for number, value in enumerate(values)]


def of_llava(folder: Path, *rows: Any, **options: Any) -> list[Row]:
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    return [*llava.rows(llava.Options(annotation_path=str(folder / "rows.json"), **options))]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def image(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def video(name: str) -> dict[str, str]:
    return {"type": "video", "video": name}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"image": "a.jpg", "conversations": turns("<image>\nWhat?", "A.")}, [image("a.jpg"), text("What?")]),
        ({"image": "a.jpg", "conversations": turns("What?", "A.")}, [image("a.jpg"), text("What?")]),
        ({"video": "a.mp4", "conversations": turns("<image>\nWhat?", "A.")}, [video("a.mp4"), text("What?")]),
        (
            {"images": ["a.jpg", "b.jpg"], "conversations": turns("One <image> or <image>?", "A.")},
            [text("One "), image("a.jpg"), text(" or "), image("b.jpg"), text("?")],
        ),
        (
            {"image": ["a.jpg"], "video": "b.mp4", "conversations": turns("<video>\n<image>\nWhat?", "A.")},
            [video("b.mp4"), image("a.jpg"), text("What?")],
        ),
        ({"conversations": turns("What?", "A.")}, [text("What?")]),
    ],
)
def test_placeholders_are_the_places_of_media(tmp_path: Path, row: Any, asked: Any):
    (found,) = of_llava(tmp_path, row)
    assert found.messages == [{"role": "user", "content": asked}, {"role": "assistant", "content": [text("A.")]}]
    assert found.reason == ""


def test_all_turns_are_read(tmp_path: Path):
    row = {"images": ["a.jpg", "b.jpg"], "conversations": turns("<image>\nWhat?", "A.", "And <image>", "B.")}
    (found,) = of_llava(tmp_path, row, system_prompt="Be brief.")
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert media_of(found.messages) == [("image", "a.jpg"), ("image", "b.jpg")]
    assert found.messages[3]["content"] == [text("And "), image("b.jpg")]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"conversations": turns("<image>\nWhat?", "A.")}, "a placeholder <image> without a medium"),
        ({"image": "a.jpg", "conversations": turns("<video>?", "A.")}, "a placeholder <video> without a medium"),
        (
            {"images": ["a.jpg", "b.jpg"], "conversations": turns("<image>?", "A.")},
            "1 media without a placeholder, the first is b.jpg",
        ),
        ({"image": 3, "conversations": turns("?", "A.")}, "image is 3, expected a name or a list of names"),
        ({"image": "", "conversations": turns("?", "A.")}, "message 1: image without a name"),
        ({"conversations": turns("?", " \n")}, "message 2: an empty answer"),
        ({"conversations": turns("?")}, "no answer"),
        ({"conversations": [{"from": "gpt", "value": "A."}]}, "it begins with an answer"),
        ({"conversations": [{"from": "bird", "value": "A."}]}, "a turn from 'bird'; known: human, user, gpt"),
        ({"conversations": [{"from": "human"}]}, "a turn without a text `value`"),
        ({"conversations": turns("\ud800", "A.")}, "message 1: half of a surrogate pair"),
        ({"image": "a.jpg"}, "expected an object with a list `conversations`"),
        ("a", "expected an object with a list `conversations`"),
    ],
)
def test_a_mistake_is_the_reason_of_its_row(tmp_path: Path, row: Any, why: str):
    good = {"conversations": turns("What?", "A.")}
    before, found, after = of_llava(tmp_path, good, row, good)
    assert why in found.reason
    assert found.name == "row 1"
    assert (before.reason, after.reason) == ("", "")


@pytest.mark.parametrize(("content", "why"), [("{", "is not JSON"), ("{}", "is dict, expected a list")])
def test_another_file_is_refused(tmp_path: Path, content: str, why: str):
    (tmp_path / "rows.json").write_text(content, encoding="utf-8")
    options = llava.Options(annotation_path=str(tmp_path / "rows.json"))
    with pytest.raises(ConfigError, match=why):
        list(llava.rows(options))
    with pytest.raises(ConfigError, match="no file at annotation_path"):
        llava.files(llava.Options(annotation_path=str(tmp_path / "none.json")))


CHAT = [
    {"role": "user", "content": [{"type": "image", "image": "a.jpg", "text": None}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A."}]},
]
EXPECTED = [
    {"role": "user", "content": [image("a.jpg"), text("What?")]},
    {"role": "assistant", "content": [text("A.")]},
]


@pytest.mark.parametrize("form", ["list", "JSON"])
def test_messages_are_a_list_or_json_text(tmp_path: Path, form: str):
    column = pa.array([CHAT] * 3 if form == "list" else [json.dumps(CHAT)] * 3)
    folder = hf_folder.save(tmp_path / "rows", {"talk": column}, {}, files=2)
    options = hf_chat.Options(path=str(folder), conversation_column_name="talk")
    assert [*hf_chat.rows(options)] == [Row(f"row {number}", EXPECTED) for number in range(3)]
    assert [Path(file).name for file in hf_chat.files(options)] == [
        "data-00000-of-00002.arrow",
        "data-00001-of-00002.arrow",
    ]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{", "it is not JSON"),
        ("{}", "dict, expected a list of messages"),
        ("[3]", "a message without a role"),
        ('[{"role": "user", "content": 3}]', "the content of a message is int"),
        ('[{"role": "user", "content": [3]}]', "a part is int, expected an object"),
        ('[{"role": "user", "content": [{"type": "audio"}]}]', "a part of type 'audio'; known: text, image, video"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "a part of type 'image' has type; expected type, image"),
        ('[{"role": "user", "content": [{"type": "image", "image": {"bytes": ""}}]}]', "image is dict, expected the"),
        ('[{"role": "bird", "content": "a"}]', "unknown role bird; known: system, user, assistant, tool; no answer"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]', "a system text that is not the"),
    ],
)
def test_a_row_of_a_folder_that_is_no_conversation_has_a_reason(tmp_path: Path, value: str, why: str):
    folder = hf_folder.save(tmp_path / "rows", {"conversations": pa.array([value, json.dumps(CHAT)])}, {})
    wrong, right = hf_chat.rows(hf_chat.Options(path=str(folder)))
    assert why in wrong.reason
    assert right.reason == ""


def test_another_column_is_refused_with_the_names_of_all(tmp_path: Path):
    folder = hf_folder.save(tmp_path / "rows", {"talk": pa.array(["[]"])}, {})
    with pytest.raises(ConfigError, match="no column 'conversations', only talk; set conversation_column_name"):
        list(hf_chat.rows(hf_chat.Options(path=str(folder))))
