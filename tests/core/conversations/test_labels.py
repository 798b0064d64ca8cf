"""Which tokens have labels, in conversations made by hand and by chance."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Tokenizer

from cosmos_rl_core.conversations.encoding import IGNORED, Encoded, Encoder
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.tiny import qwen3_vl
from cosmos_rl_core.vlms._prompts import Prompts
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3, pixels

WITH_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + qwen3_vl.TEMPLATE
)
"""Writes a system prompt where there is none."""
NO_THOUGHTS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set earlier = loop.index0 < ns.last %}{% for part in m.content %}{% if part.type == 'text' %}"
    "{% if m.role == 'assistant' and earlier %}"
    "{{ part.text.split('</think>')[-1] }}{% else %}{{ part.text }}{% endif %}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves the thoughts of earlier turns out, as Qwen3's does."""
NO_END = qwen3_vl.TEMPLATE.replace("<|im_end|>", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tmp_path_factory.mktemp("model"), QWEN3)


def encoder(folder: str, template: str = qwen3_vl.TEMPLATE, **settings: Any) -> Encoder:
    prompts = Prompts(folder, {"video": {"fps": 2.0}})
    prompts.tokenizer.chat_template = template
    return Encoder(prompts, **settings)


def labelled(encoder: Encoder, encoded: Encoded) -> str:
    assert torch.equal(encoded.labels[encoded.labels != IGNORED], encoded.input_ids[encoded.labels != IGNORED])
    return "".join(encoder.prompts.tokenizer.batch_decode([encoded.labels[encoded.labels != IGNORED].tolist()]))


def said(role: str, text: str, *media: Any) -> dict[str, Any]:
    shown = [
        {"type": "image", "image": one} if one.ndim == 3 else {"type": "video", "video": one, "fps": 4.0}
        for one in media
    ]
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}


IMAGE, CLIP = pixels(1, 20, 30)[0], pixels(6, 20, 30)
TALK = [
    said("system", "Be brief."),
    said("user", "Which is this?", IMAGE),
    said("assistant", "A wave."),
    said("tool", "found: sea"),
    said("user", "And this?", CLIP),
    said("assistant", "It moves."),
    said("user", "Thanks"),
]


def test_answers_of_all_turns_are_labelled_with_their_ends(folder: str):
    made = encoder(folder)
    encoded, cut = made.encode(TALK, 1000)
    assert labelled(made, encoded) == "A wave.<|im_end|>It moves.<|im_end|>"
    assert cut == (0, 0, 0)


def test_answers_of_the_last_turn_alone_are_labelled_if_asked_for(folder: str):
    made = encoder(folder, turns="last")
    assert labelled(made, made.encode(TALK, 1000)[0]) == "It moves.<|im_end|>"


def test_tokens_equal_the_prompts_tokens(folder: str):
    made = encoder(folder)
    encoded, _ = made.encode(TALK[:-1], 1000)
    batch = made.prompts.prepare([TALK[:-1]])
    assert torch.equal(encoded.input_ids, batch["input_ids"][0])
    assert torch.equal(encoded.kinds, batch["mm_token_type_ids"][0])
    whole = torch.cat([visual.inputs["pixel_values"] for visual in encoded.visuals[:1]])  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert torch.equal(whole, batch["pixel_values"])


WORDS = ["a", "It is", " ", "\n", "\n\n", "naïve", "東京", "🌊", "</think>", "assistant\n", "user", "..."]


def conversation(dice: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """A random conversation, and its answers."""

    def text() -> str:
        return "".join(dice.choices(WORDS, k=dice.randint(1, 6))) + "x"

    messages = [said("system", text())] if dice.random() < 0.5 else []
    answers: list[str] = []
    for _ in range(dice.randint(1, 4)):
        messages.append(said("user", text(), *dice.choices([IMAGE, CLIP], k=dice.choice([0, 0, 1, 2]))))
        if dice.random() < 0.2:
            messages.append(said("tool", text()))
        answers.append(text())
        messages.append(said("assistant", answers[-1]))
    return messages, answers


@pytest.mark.parametrize("template", [qwen3_vl.TEMPLATE, WITH_SYSTEM], ids=["plain", "system"])
def test_random_conversations_have_labels_on_their_answers(folder: str, template: str):
    made, dice = encoder(folder, template), random.Random(0)
    for _ in range(40):
        messages, answers = conversation(dice)
        encoded, _ = made.encode(messages, 10_000)
        assert labelled(made, encoded) == "".join(f"{answer}<|im_end|>" for answer in answers)
        first = int((encoded.labels != IGNORED).nonzero()[0])
        limit = dice.randint(first + 1, len(encoded.input_ids))
        short, cut = made.encode(messages, limit)
        length = len(short.input_ids)
        assert length <= limit
        assert torch.equal(short.labels, encoded.labels[:length])
        assert all(not begin < length < end for begin, end in encoded.places)
        assert cut.tokens == len(encoded.input_ids) - length
        assert cut.media == len(encoded.visuals) - len(short.visuals)
        tokens = {"image": 0, "video": 0}
        for visual in short.visuals:
            grid = next(value for name, value in visual.inputs.items() if name.endswith("grid_thw"))
            kind = "image" if "image_grid_thw" in visual.inputs else "video"
            tokens[kind] += int(np.prod(np.asarray(grid))) // 4
        assert [int((short.kinds == number).sum()) for number in (1, 2)] == [*tokens.values()]


def test_a_medium_is_never_cut(folder: str):
    made = encoder(folder, turns="all")
    whole, _ = made.encode(TALK, 1000)
    (_, _), (begin, end) = whole.places
    for limit in range(begin - 1, end):
        short, cut = made.encode(TALK, limit)
        # Nor does the token that opens it stay.
        assert (len(short.input_ids), cut.media, cut.labels) == (begin - 1, 1, len("It moves.") + 1)
    assert made.encode(TALK, end)[1].media == 0
    with pytest.raises(ItemError, match=r"no token of an answer, within the first \d+ of \d+ tokens"):
        made.encode(TALK, whole.places[0][1])


def test_a_cut_between_clips_without_markers_keeps_the_clips_before_it(folder: str):
    made = Encoder(Prompts(folder, {"video": {"fps": 2.0, "clip_markers": False}}))
    clips = [pixels(4, 16, 16), pixels(6, 16, 16)]
    talk = [said("user", "One?"), said("assistant", "Yes."), said("user", "Two?", *clips), said("assistant", "No.")]
    whole, _ = made.encode(talk, 1000)
    assert labelled(made, whole) == "Yes.<|im_end|>No.<|im_end|>"
    (_, first), (begin, end) = whole.places
    for limit in range(begin, end):
        short, cut = made.encode(talk, limit)
        assert (len(short.visuals), cut.media, cut.labels) == (1, 1, len("No.") + 1)
        assert int((short.kinds == 2).sum()) == int((whole.kinds[:first] == 2).sum())
        assert set(short.kinds[first:].tolist()) == {0}


def test_a_token_that_is_partly_header_has_no_label(folder: str, tmp_path: Path):
    other = encoder(tiny.save(tmp_path, QWEN3))
    newline = "Ċ"
    words = {**qwen3_vl.vocabulary(), newline * 2: len(qwen3_vl.vocabulary())}
    merged = Qwen2Tokenizer(vocab=words, merges=[(newline, newline)], eos_token="<|im_end|>")  # pyright: ignore[reportArgumentType]
    merged.add_special_tokens({"additional_special_tokens": [*qwen3_vl.SPECIAL[1:], *qwen3_vl.PADS]})
    merged.chat_template = qwen3_vl.TEMPLATE
    other.prompts.tokenizer = merged
    encoded, _ = other.encode([said("user", "a"), said("assistant", "\nb\n\n\n\nc")], 100)
    assert labelled(other, encoded) == "b\n\n\n\nc<|im_end|>"


THOUGHTS = [
    said("user", "a"),
    said("assistant", "hm</think>b"),
    said("user", "c"),
    said("assistant", "so</think>d"),
]


def test_a_template_that_drops_earlier_thoughts_trains_on_the_last_turn_only(folder: str):
    with pytest.raises(ItemError, match=r"message 2: .* otherwise when it is the newest one.*turns = 'last'"):
        encoder(folder, NO_THOUGHTS).encode(THOUGHTS, 100)
    made = encoder(folder, NO_THOUGHTS, turns="last")
    assert labelled(made, made.encode(THOUGHTS, 100)[0]) == "so</think>d<|im_end|>"


def test_templates_in_which_no_answer_can_be_found_are_refused(folder: str):
    with pytest.raises(ConfigError, match=r"message 2: the chat template does not end the answer with '<\|im_end\|>'"):
        encoder(folder, NO_END)
    counts = "{{ messages | length }}" + qwen3_vl.TEMPLATE
    with pytest.raises(ConfigError, match="does not fit turns = 'all'"):
        encoder(folder, counts)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([said("user", "a"), said("assistant", " ")], "message 2: an empty answer"),
        ([said("user", "a")], "no token of an answer"),
        ([said("user", "a<|im_end|>"), said("assistant", "b")], "special to the model"),
    ],
)
def test_conversations_without_an_answer_are_refused(folder: str, messages: Any, why: str):
    with pytest.raises(ItemError, match=why.replace("|", r"\|")):
        encoder(folder).encode(messages, 100)
