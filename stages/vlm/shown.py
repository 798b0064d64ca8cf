"""Questions of an evaluation that a report shows, with small pictures of their media."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.vlms import _media
from stages.reporting.choosing import evenly
from stages.reporting.excerpt import Question
from stages.reporting.pictures import framed, within
from stages.vlm.media import opened
from stages.vlm.tokens import Conversations, Medium, Row

FIXED, WRONG = 12, 12
"""Most questions that are shown at every judged policy version, and most wrong answers."""
PICTURE_BYTES = 400_000
"""Most characters of all small pictures together, as data URLs."""
LETTERS = 300
"""Most characters of a question."""


def shown(table: Any, conversations: Conversations) -> bytes:
    """Return the shown questions as JSON: evenly spaced questions of each dataset, and some that were answered wrong.

    ``table`` has one row per conversation: ``number``, ``source``, ``correct``, ``asked``.
    """
    table = table[table["asked"].astype(bool)]
    groups = [rows["number"].tolist() for _, rows in table.groupby("source")]
    fixed = [number for group in groups for number in evenly(group, max(1, FIXED // len(groups)))]
    wrong = evenly(table.loc[~table["correct"].astype(bool), "number"].tolist(), WRONG)
    rows = {number: conversations.tokens.row(number) for number in sorted({*fixed, *wrong})}
    strips = {str(n): strip for n, row in rows.items() if (strip := _strip(row, conversations))}
    thumbs = within(strips, PICTURE_BYTES)
    questions = []
    for number, row in rows.items():
        question = Question(number=number, fixed=number in fixed, text=_text(row, conversations.prompts.tokenizer))
        if (small := thumbs.get(str(number))) is not None:
            picture = {"thumb": small.source, "width": small.width, "height": small.height}
            question = question.model_copy(update=picture)
        questions.append(question.model_dump(mode="json"))
    return canonical_json(questions)


def _strip(row: Row, conversations: Conversations) -> list[Image.Image]:
    """Return frames of the first medium of a conversation; none without media."""
    media = [Medium(**medium) for medium in row.media]
    if not media:
        return []
    first = media[0]
    with opened(conversations.sources[first.source], first.name, first.sha256) as file:
        clip = _media.video(file, None, _ends) if first.kind == "video" else _media.image(file)
    return framed(clip.pixels)


def _ends(total: int, fps: float) -> Sequence[int]:
    """Return the numbers of the first, the middle and the last frame."""
    return sorted({0, total // 2, total - 1})


def _text(row: Row, tokenizer: Any) -> str:
    """Return the turn before the last answer, without media, special tokens and the name of its role."""
    of_media = {place for medium in row.media for place in range(medium["begin"], medium["end"])}
    before = [token for place, token in enumerate(row.input_ids[: row.labels[-2]]) if place not in of_media]
    ends = [place for place, token in enumerate(before) if token == tokenizer.eos_token_id]
    # The last end-of-turn token ends the question; the tokens after it open the answer.
    begin, end = (ends[-2] + 1 if len(ends) > 1 else 0, ends[-1]) if ends else (0, len(before))
    text = tokenizer.decode(before[begin:end], skip_special_tokens=True)
    return text.lstrip().removeprefix("user\n").strip()[:LETTERS]
