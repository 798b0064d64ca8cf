"""Losses and answers of a policy of a VLM on held-out conversations."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch

from cosmos_rl_core.conversations.encoding import IGNORED, Encoded
from cosmos_rl_core.conversations.packing import packed, token_losses
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.vlms._model import Vlm
from cosmos_rl_core.vlms._prompts import joined
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import Check, cut
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.policies import load_part
from stages.formats.tables import from_parquet, to_parquet
from stages.vlm.contracts import VlmEvaluate
from stages.vlm.evaluated import summary_of
from stages.vlm.loading import load, prompts_of
from stages.vlm.shown import shown
from stages.vlm.tokens import Conversations, Tokens

COLUMNS = ["number", "id", "source", "loss_sum", "label_tokens", "expected", "answer", "whole", "correct", "asked"]


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write ``held_out.parquet`` and ``shown.json``. Each rank has the whole model, and shards of conversations.

    The loss is the mean over all labels. Answers are generated one at a time, always with the likeliest token: batches
    would change the last bits, and so perhaps the answers.
    """
    config, ranks = request.settings(VlmEvaluate), context.ranks
    source, prompts = request.one("policy"), prompts_of(config.vlm)
    tokens = Tokens(Artifact(request.one("tokens")))
    numbers = [*range(len(tokens))]
    layout = context.layout({"conversations": cut(numbers, config.conversations_per_shard)})["conversations"]
    model, weights = load(config, prompts, context, config.param_dtype, sharded=False)
    load_part(weights, source, source.part, context.progress, group=ranks)
    model.requires_grad_(False).eval()
    evaluator = _Evaluator(config, Vlm(model, prompts), Conversations(tokens, prompts, config.sources), context)
    names = [f"records/answers/{shard:05d}.parquet" for shard in range(len(layout))]
    for shard in context.units(len(layout)):
        if not context.attempt.adopt(shard, check := _has(layout[shard])):
            context.progress("evaluating", shard, len(layout))
            rows = [evaluator.row(number) for number in layout[shard]]
            table = pd.DataFrame(rows, columns=COLUMNS)
            context.attempt.finish(shard, {names[shard]: to_parquet(table)}, check)
    read = (from_parquet(context.attempt.read(names[shard])) for shard in context.own(len(layout)))
    found = ranks.gather([row for table in read for row in table.values.tolist()])
    table: Any = pd.DataFrame([row for rows in found for row in rows], columns=COLUMNS)
    table = table.sort_values("number", ignore_index=True)
    if ranks.rank == 0:
        context.attempt.put(config.ANSWERS, to_parquet(table))
        if config.max_new_tokens:
            context.attempt.put(config.SHOWN, shown(table, evaluator.conversations))
    return summary_of(table, generated=config.max_new_tokens > 0)


def is_correct(answer: str, expected: str, parser: str | None) -> bool:
    """Return whether an answer is the expected one: equal in the first group of ``parser``, or as a whole without one.

    White space around answers does not count. An answer that ``parser`` does not match is not correct.
    """
    if parser is None:
        return answer.strip() == expected.strip()
    found, wanted = (re.search(parser, text) for text in (answer, expected))
    # A group may be missing from a match.
    return found is not None and wanted is not None and found[1] is not None and found[1] == wanted[1]


class _Evaluator:
    """The losses and answers of one model."""

    def __init__(self, config: VlmEvaluate, vlm: Vlm, conversations: Conversations, context: Context[Group]) -> None:
        self.config, self.vlm, self.conversations = config, vlm, conversations
        self.device = context.ranks.device
        self.about = conversations.tokens.index[["id", "source", "cut_labels"]].to_numpy().tolist()

    def row(self, number: int) -> list[Any]:
        """Return the row of a conversation."""
        conversation, (one, source, cut_labels) = self.conversations[number], self.about[number]
        inputs = packed(self.vlm.model, [conversation])
        with torch.no_grad(), computes_in(self.config.param_dtype, self.device):
            losses = token_losses(self.vlm.model, inputs, self.device).double()
        row = [number, one, source, float(losses.sum()), len(losses)]
        if not self.config.max_new_tokens or cut_labels:
            # The expected answer was cut off, so no answer can be compared with it.
            return [*row, "", "", False, False, False]
        prompt, expected = _asked(conversation)
        with computes_in(self.config.param_dtype, self.device):
            (answer,) = self.vlm.answers(prompt, self.config.max_new_tokens)
        text = self.vlm.prompts.tokenizer.decode(expected, skip_special_tokens=True)
        # An answer that was cut off may equal the expected one by chance.
        correct = answer.whole and is_correct(answer.text, str(text), self.config.parsers.get(source))
        return [*row, text, answer.text, answer.whole, correct, True]


def _asked(conversation: Encoded) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the model's inputs up to the last answer, and the token ids of that answer."""
    has = (conversation.labels != IGNORED).numpy().astype(np.int8)
    begin, end = (int(np.flatnonzero(np.diff(has, prepend=0, append=0) == edge)[-1]) for edge in (1, -1))
    ids = conversation.input_ids[None, :begin]
    media = [v for v, (first, _) in zip(conversation.visuals, conversation.places, strict=True) if first < begin]
    inputs = {"input_ids": ids, "mm_token_type_ids": conversation.kinds[None, :begin]}
    inputs |= {"attention_mask": torch.ones_like(ids), **joined(media)}
    return inputs, conversation.input_ids[begin:end].tolist()


def _has(numbers: list[int]) -> Check:
    """Check that a shard has exactly these conversations."""

    def check(files: dict[str, bytes]) -> str | None:
        found = [number for data in files.values() for number in _numbers(data)]
        return None if found == numbers else "it has other conversations"

    return check


def _numbers(data: bytes) -> Iterator[int]:
    yield from from_parquet(data)["number"].tolist()
