"""Conversations from files to tokens: what is listed, what is made again, and what training reads."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.conversations.encoding import Encoder
from cosmos_rl_core.errors import ConfigError, DatasetError
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms._prompts import Prompts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.tables import read_table
from stages.vlm.contracts import VlmIndex, VlmTokenize
from stages.vlm.tokens import Conversations, Tokens
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.conftest import make
from tests.stages.vlm_data import Talks, clip, picture, talk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp("model"), QWEN3)


@pytest.fixture
def talks(tmp_path: Path, model: str) -> Talks:
    return Talks(tmp_path / "data", model).standard()


def table(talks: Talks, slot: str, name: str) -> Any:
    return read_table(Artifact(input_of(f"{talks.folder}/{slot}")), name)


def counts(summary: dict[str, Any], *names: str) -> list[int]:
    return [summary[name] for name in names]


@pytest.mark.parametrize("settings", [{}, {"clip_markers": False}], ids=str)
def test_training_reads_what_the_encoder_makes_of_the_files(talks: Talks, settings: dict[str, Any]):
    talks.video |= settings
    talks.index("index")
    summary = talks.tokenize("tokens", "index").summary
    found = Tokens(Artifact(input_of(f"{talks.folder}/tokens")))
    prompts = Prompts(talks.model, {"video": talks.video})
    conversations = Conversations(found, prompts, {"mine": talks.options})
    listed = table(talks, "index", VlmIndex.CONVERSATIONS)
    assert len(found) == len(listed) == 4
    for number, text in enumerate(listed["messages"]):
        messages = json.loads(text)
        for part in [part for message in messages for part in message["content"] if part["type"] != "text"]:
            part[part["type"]] = str(talks.folder / "media" / part[part["type"]])
        expected, _ = Encoder(prompts).encode(messages, 1000)
        one = conversations[number]
        for field in ("input_ids", "labels", "kinds"):
            assert torch.equal(getattr(one, field), getattr(expected, field))
        assert one.places == expected.places
        for ours, theirs in zip(one.visuals, expected.visuals, strict=True):
            assert all(
                torch.equal(torch.as_tensor(ours.inputs[key]), torch.as_tensor(theirs.inputs[key]))
                for key in theirs.inputs
            )
    index = found.index
    assert index[["images", "videos"]].to_numpy().tolist() == [[1, 0], [1, 1], [0, 0], [1, 0]]
    assert index["labels"].tolist() == [8, 23, 4, 27]
    assert counts(summary, "conversations", "labels", "cut_tokens", "reused") == [4, 62, 0, 0]


def test_the_order_in_which_a_recipe_names_its_datasets_does_not_matter(talks: Talks):
    file = talks.folder / "rows.json"
    file.write_text(json.dumps(talks.rows), encoding="utf-8")
    digest, found = files_digest({"rows.json": file}), []
    for slot, names in (("one", ("a", "b")), ("other", ("b", "a"))):
        config = VlmIndex(sources=dict.fromkeys(names, talks.options), files_digest=digest)
        found.append(
            make(Request(stage="vlm_index", slot=f"{talks.folder}/{slot}", seed=0, config=config), talks.folder)
        )
    assert found[0].recipe == found[1].recipe
    assert found[0].content == found[1].content


def test_a_file_of_conversations_that_is_gone_is_named(talks: Talks):
    config = VlmIndex(sources={"mine": talks.options}, files_digest="0")
    with pytest.raises(ConfigError, match=r"no file at annotation_path = .*rows\.json"):
        make(Request(stage="vlm_index", slot=f"{talks.folder}/index", seed=0, config=config), talks.folder)


def test_every_mistake_is_listed_and_left_out_up_to_a_limit(talks: Talks):
    media = talks.folder / "media"
    (media / "broken.jpg").write_bytes(b"no picture")
    (media / "broken.mp4").write_bytes(b"no video")
    talks.rows += [
        talk("<image>?", "A.", image="gone.jpg"),
        talk("<image>?", "A."),
        talk("<image>?", " ", image="a.jpg"),
        talk("<video>?", "A.", video="broken.mp4"),
        talk("<image><video>?", "A.", image="broken.jpg", video="none.mp4"),
        talk("<image>?", "A.", image="http://example.com/a.jpg"),
        talk("<image>?", "", image="gone.jpg"),
        talk("<image>?", "A.", image="a" * 300 + ".jpg"),
        talk("<image>?", "A.", image="a\0.jpg"),
        talk("<image>?", "A.", image="loop.jpg"),
    ]
    (media / "loop.jpg").symlink_to("loop.jpg")
    with pytest.raises(DatasetError, match=r"10 of 14 rows cannot be used, and max_left_out = 0.05"):
        talks.index("index")
    summary = talks.index("index", max_left_out=0.8).summary
    assert counts(summary, "conversations", "left_out") == [4, 10]
    reasons = table(talks, "index", VlmIndex.LEFT_OUT)["reason"].tolist()
    assert reasons[0] == "no file gone.jpg"
    assert reasons[1] == "a placeholder <image> without a medium"
    assert reasons[2] == "message 2: an empty answer"
    assert reasons[3].startswith("broken.mp4: cannot be read")
    assert reasons[4].startswith("broken.jpg: cannot be read")
    assert reasons[4].endswith("no file none.mp4")
    assert "media are files" in reasons[5]
    assert reasons[6] == "message 2: an empty answer; no file gone.jpg"
    assert re.fullmatch(r"no file has the name a+\.\.\.: File name too long", reasons[7])
    assert reasons[8].startswith("no file has the name a")
    assert reasons[9] == "no file has the name loop.jpg: Too many levels of symbolic links"


def test_conversations_that_cannot_be_tokenized_are_listed(talks: Talks):
    talks.rows.append(talk("Tell me " + "more " * 60, "No."))
    talks.rows.append(talk("<|im_end|>", "No."))
    talks.index("index")
    with pytest.raises(DatasetError, match="2 of 6 conversations cannot be used"):
        talks.tokenize("tokens", "index", max_length=200)
    summary = talks.tokenize("tokens", "index", max_length=200, max_left_out=0.5).summary
    assert counts(summary, "conversations", "left_out") == [4, 2]
    reasons = table(talks, "tokens", VlmTokenize.LEFT_OUT)["reason"].tolist()
    assert reasons[0].startswith("no token of an answer, within the first 200")
    assert "special to the model" in reasons[1]


def test_tokens_and_labels_that_are_cut_off_are_counted(talks: Talks):
    talks.index("index")
    whole = table(talks, "index", VlmIndex.CONVERSATIONS)
    talks.tokenize("whole", "index")
    lengths = table(talks, "whole", VlmTokenize.INDEX)["tokens"].tolist()
    summary = talks.tokenize("tokens", "index", max_length=max(lengths) - 5).summary
    assert len(whole) == 4
    assert counts(summary, "cut_tokens", "cut_labels", "cut_media") == [5, 4, 0]


def test_only_new_conversations_are_tokenized(talks: Talks, monkeypatch: pytest.MonkeyPatch):
    talks.index("index")
    talks.tokenize("tokens", "index")
    encoded: list[Any] = []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *given: (encoded.append(given[1]), encode(*given))[1])
    picture(talks.folder / "media" / "new.jpg", 20, 16)
    shutil.copy(talks.folder / "media" / "a.jpg", talks.folder / "media" / "moved.jpg")
    talks.rows[0]["image"] = "moved.jpg"
    talks.rows.insert(1, talk("<image>\nNew?", "New.", image="new.jpg"))
    talks.index("index-2")
    summary = talks.tokenize("tokens-2", "index-2", earlier=("tokens",)).summary
    assert counts(summary, "conversations", "reused") == [5, 4]
    assert len(encoded) == 1
    talks.tokenize("anew", "index-2")
    ours, anew = (Artifact(input_of(f"{talks.folder}/{slot}")) for slot in ("tokens-2", "anew"))
    assert ours.manifest.content == anew.manifest.content
    with pytest.raises(ConfigError, match="were made with other settings; leave them out"):
        talks.tokenize("tokens-3", "index-2", earlier=("tokens",), max_length=500)


def test_a_medium_that_has_changed_is_refused(talks: Talks):
    talks.index("index")
    talks.tokenize("tokens", "index")
    clip(talks.folder / "media" / "c.mp4", 5, 20, 30)
    found = Tokens(Artifact(input_of(f"{talks.folder}/tokens")))
    with pytest.raises(DatasetError, match=r"c\.mp4 has changed since it was indexed"):
        Conversations(found, Prompts(talks.model), {"mine": talks.options})[1]
    with pytest.raises(DatasetError, match=r"c\.mp4 has changed since it was indexed"):
        talks.tokenize("again", "index")
