"""Conversations in the formats of LLaVA and of Hugging Face: what is read, and every mistake."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cosmos_rl_core.chat_datasets import hf_chat, llava
from cosmos_rl_core.chat_datasets._base import Row, media_of
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.errors import ConfigError


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
def test_a_file_without_such_rows_is_refused(tmp_path: Path, content: str, why: str):
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
        ('[{"role": "user", "content": "?", "tool_calls": [{}]}]', "a message has tool_calls, which is not read"),
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


PNG, JPG, MP4 = b"\x89PNG of one", b"\xff\xd8 of another", b"ftyp of a clip"
TEXT, PART = pa.string(), pa.struct([("type", pa.string()), ("text", pa.string()), ("image", hf_folder.MEDIUM)])
INDEXED = pa.struct([("type", pa.string()), ("text", pa.string()), ("index", pa.int64())])


def talks(part: pa.StructType, *asked: list[Any] | None) -> pa.Array:
    """A column of messages, each row a question and an answer."""
    message = pa.struct([("role", TEXT), ("content", pa.list_(part))])
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A."}]}
    rows = [None if content is None else [{"role": "user", "content": content}, answer] for content in asked]
    return pa.array(rows, pa.list_(message))


def bytes_of(options: hf_chat.Options, row: Row) -> list[bytes | str]:
    """The bytes of the media of a row; of those in files of their own the name."""
    found: list[bytes | str] = []
    for _, name in media_of(row.messages):
        medium = hf_chat.opened(options, name)
        found.append(name if medium is None else medium.read())
    return found


@pytest.mark.parametrize("files", [1, 2])
def test_media_inside_messages_are_read_from_the_arrow_files(tmp_path: Path, files: int):
    column = talks(
        PART,
        [{"type": "image", "image": {"bytes": PNG, "path": "a.png"}}, {"type": "text", "text": "What?"}],
        [{"type": "text", "text": "Hello"}],
        None,
        [{"type": "image", "image": {"bytes": None, "path": "b.jpg"}}, {"type": "image", "image": {"bytes": JPG}}],
        [{"type": "image", "image": {"bytes": PNG}}],
    )
    folder = hf_folder.save(tmp_path / "rows", {"conversations": column}, {}, files=files)
    options = hf_chat.Options(path=str(folder))
    rows = [*hf_chat.rows(options)]
    assert [row.reason for row in rows] == ["", "", "NoneType, expected a list of messages", "", ""]
    assert [bytes_of(options, row) for row in rows] == [[PNG], [], [], ["b.jpg", JPG], [PNG]]
    # Names hold for the folder wherever it lies.
    assert all(name.startswith("data-0000") for row in rows for _, name in media_of(row.messages) if "#" in name)
    elsewhere = hf_chat.Options(path=str(folder.rename(tmp_path / "elsewhere")))
    assert bytes_of(elsewhere, rows[0]) == [PNG]


def test_media_in_columns_fill_the_places_of_messages_in_order_or_by_index(tmp_path: Path):
    here = {"type": "image"}
    column = talks(
        INDEXED,
        [here | {"index": 1}, {"type": "text", "text": "and"}, here | {"index": 0}],
        [here, {"type": "text", "text": "?"}],
        [{"type": "text", "text": "Hello"}],
        [here | {"index": 4}],
        [{"type": "text", "text": "No place."}],
    )
    given = [[{"bytes": PNG}, {"bytes": JPG}], [{"bytes": JPG}], None, [{"bytes": PNG}], [{"bytes": PNG}]]
    images = pa.array(given, pa.list_(hf_folder.MEDIUM))
    splits = {"train": {"messages": column, "images": images}, "test": {"messages": column[:1], "images": images[:1]}}
    root = hf_folder.save_splits(tmp_path / "rows", **splits)
    options = hf_chat.Options(path=str(root), split="train", conversation_column_name="messages")
    rows = [*hf_chat.rows(options)]
    assert [bytes_of(options, row) for row in rows[:3]] == [[JPG, PNG], [JPG], []]
    assert rows[3].reason == "a part of type 'image' without a medium; the columns of the row have 1"
    assert rows[4].reason == "1 media in columns that no message has a place for"


def test_a_column_of_one_medium_a_row_may_be_a_video(tmp_path: Path):
    asked = [{"type": "video"}, {"type": "text", "text": "What moves?"}]
    answer = {"role": "assistant", "content": "A."}
    messages = pa.array([json.dumps([{"role": "user", "content": asked}, answer])] * 2)
    videos = pa.array([{"bytes": MP4, "path": None}, {"bytes": None, "path": "b.mp4"}], hf_folder.MEDIUM)
    folder = hf_folder.save(tmp_path / "rows", {"conversations": messages, "video": videos}, {})
    options = hf_chat.Options(path=str(folder))
    rows = [*hf_chat.rows(options)]
    assert [media_of(row.messages)[0][0] for row in rows] == ["video", "video"]
    assert [bytes_of(options, row) for row in rows] == [[MP4], ["b.mp4"]]


def test_columns_may_hold_paths_of_media(tmp_path: Path):
    asked = [[{"type": "image"}, {"type": "image"}], [{"type": "text", "text": "Who?"}], [{"type": "image"}]]
    part = pa.struct([("type", TEXT), ("text", TEXT)])
    columns = {"conversations": talks(part, *asked), "images": pa.array([["a.png", "b.png"], ["c.png"], None])}
    folder = hf_folder.save(tmp_path / "rows", columns | {"image": pa.array([None, None, "d.png"])}, {})
    first, spare, last = hf_chat.rows(hf_chat.Options(path=str(folder)))
    assert media_of(first.messages) == [("image", "a.png"), ("image", "b.png")]
    assert spare.reason == "1 media in columns that no message has a place for"
    assert media_of(last.messages) == [("image", "d.png")]


def test_compressed_files_are_refused(tmp_path: Path):
    column = talks(PART, [{"type": "image", "image": {"bytes": PNG * 100}}])
    writing = {"options": pa.ipc.IpcWriteOptions(compression="zstd")}
    folder = hf_folder.save(tmp_path / "rows", {"conversations": column}, {}, **writing)
    with pytest.raises(ConfigError, match="its batches are compressed"):
        list(hf_chat.rows(hf_chat.Options(path=str(folder))))
