"""Every dataset of conversations: its rows can be used or state why not, and are the same twice."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.chat_datasets._base import ROLES, Row
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.conformance.kinds.members import options_of

TURNS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A dog."}]


def llava_file(folder: Path) -> dict[str, str]:
    """Write a conversation of LLaVA's format; return its settings."""
    turns = [{"from": turn["role"], "value": turn["content"]} for turn in TURNS]
    (folder / "chats.json").write_text(json.dumps([{"conversations": turns}]), encoding="utf-8")
    return {"annotation_path": str(folder / "chats.json")}


def hf_rows(folder: Path) -> dict[str, str]:
    """Write a conversation as `datasets` does; return its settings."""
    return {"path": str(hf_folder.save(folder / "chats", {"conversations": pa.array([json.dumps(TURNS)])}, {}))}


SHIPPED = {"llava": llava_file, "hf_chat": hf_rows}


@pytest.mark.parametrize("chat_dataset", plugins.known("chat_datasets"))
def test_rows_are_conversations_and_the_same_twice(
    chat_dataset: str, plugin_settings: Mapping[str, Any], tmp_path: Path
):
    given = SHIPPED[chat_dataset](tmp_path) if chat_dataset in SHIPPED else {}
    options = options_of("chat_datasets", chat_dataset, plugin_settings, **given)
    module = plugins.load("chat_datasets", chat_dataset)
    assert options is not None
    rows, file = list(module.rows(options)), module.__file__
    assert rows == list(module.rows(options)), f"{file}: rows yields others the second time"
    assert all(isinstance(one, Row) for one in rows), f"{file}: rows yields {rows[:1]}; expected a Row each"
    usable = [one for one in rows if not one.reason]
    assert usable, f"{file}: no row can be used; the first says {rows[0].reason if rows else 'nothing'!r}"
    assert len({one.name for one in rows}) == len(rows), f"{file}: two rows have one name"
    roles = {message["role"] for one in usable for message in one.messages}
    assert roles <= {*ROLES}, f"{file}: messages have the roles {sorted(roles)}; known: {', '.join(ROLES)}"
    assert all(isinstance(name, str) for name in module.files(options)), f"{file}: files must return paths or URLs"
