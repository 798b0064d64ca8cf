"""Several conversations in one row, which do not attend to each other.

Each has the positions that the model would give it alone. The model's attention gets the lengths of the conversations
and stays within each (:mod:`cosmos_rl_core.conversations.segments`); any other attention would silently mix them.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cosmos_rl_core.conversations.encoding import IGNORED, Encoded
from cosmos_rl_core.conversations.segments import borders, is_used
from cosmos_rl_core.vlms._base import Clip, Kind, Visual
from cosmos_rl_core.vlms._prompts import Prompts, joined

Inputs = dict[str, Tensor]
LABELS, LENGTHS = "labels", "lengths"
"""Entries of a row that the model does not take: labels, and the number of tokens of each conversation."""


def packed(model: Any, conversations: Sequence[Encoded]) -> Inputs:
    """Return the arguments of the model's forward for conversations in one row, their labels and lengths, on the CPU.

    ``position_ids`` is ``[3, 1, tokens]``: the positions in time, down and across.
    """
    positions = torch.cat([positions_of(model, one) for one in conversations], dim=2)
    row = {"input_ids": "input_ids", "mm_token_type_ids": "kinds", LABELS: "labels"}
    rows = {name: torch.cat([getattr(one, field) for one in conversations])[None] for name, field in row.items()}
    rows |= {"position_ids": positions}
    rows[LENGTHS] = torch.tensor([len(one.input_ids) for one in conversations], device="cpu")
    return rows | joined([v for one in conversations for v in one.visuals])


def positions_of(model: Any, encoded: Encoded) -> Tensor:
    """Return the positions that the model gives a conversation alone, ``[3, 1, tokens]``: in time, down and across."""
    media = joined([Visual("", _about(visual)) for visual in encoded.visuals])
    found, _ = model.model.get_rope_index(
        encoded.input_ids[None], mm_token_type_ids=encoded.kinds[None], attention_mask=None, **media
    )
    return found


def _about(visual: Visual) -> dict[str, Any]:
    """Return the grid and the time of a medium, without its patches."""
    return {name: value for name, value in visual.inputs.items() if not name.startswith("pixel_values")}


def bins(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Divide conversations among rows of at most ``room`` tokens; return the indices of the conversations of each row.

    Each conversation, the longest first, goes into the first row in which it fits. The result depends on the lengths
    alone. Raises ``ValueError`` for a conversation that is longer than a row.
    """
    found: list[tuple[int, list[int]]] = []
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        length = lengths[number]
        if length > room:
            raise ValueError(f"conversation {number} has {length} tokens, and a row has room for {room}")
        place = next((index for index, (used, _) in enumerate(found) if used + length <= room), len(found))
        used, members = found[place] if place < len(found) else (0, [])
        found[place : place + 1] = [(used + length, sorted([*members, number]))]
    return [members for _, members in found]


def token_losses(model: Any, inputs: Inputs, device: torch.device | None = None) -> Tensor:
    """Return the cross entropy of each label, float32 ``[labels]``, in order. ``device`` is the model's.

    Logits are computed only where a label follows: with a large vocabulary, logits of all tokens would fill the memory.
    Raises ``ValueError`` for several conversations if the model would mix them.
    """
    device = device or torch.device("cpu")
    labels, lengths = inputs[LABELS][0], inputs[LENGTHS]
    if len(lengths) > 1 and not is_used(model):
        raise ValueError(
            f"{len(lengths)} conversations in a row, but {type(model).__name__} takes no attention from outside and "
            "would mix them; leave packs out of its processor"
        )
    # Found on the CPU: to find them on a GPU would wait for all of its earlier work.
    places = (labels != IGNORED).nonzero()[:, 0]
    read = {name: tensor for name, tensor in inputs.items() if name not in (LABELS, LENGTHS)}
    given = {name: tensor.to(device, non_blocking=True) for name, tensor in read.items()}
    within = borders(lengths, device)
    logits = model(**given, **within, use_cache=False, logits_to_keep=(places - 1).to(device)).logits[0]
    return functional.cross_entropy(logits.float(), labels[places].to(device), reduction="none")


def fillers(prompts: Prompts, kinds: Collection[Kind]) -> list[Encoded]:
    """Return, for each kind of medium, the smallest conversation that has one, without labels.

    Ranks that share the weights of the vision tower must run it equally often: rows without a medium get these
    conversations.
    """
    found: list[Encoded] = []
    for kind in sorted(kinds):
        settings = prompts.processor.image if kind == "image" else prompts.processor.video
        frames, side = (1 if kind == "image" else settings.temporal_patch_size), settings.factor
        clip = Clip(np.zeros((frames, side, side, 3), np.uint8), tuple(range(frames)), frames, 1.0)
        visual = prompts.processor.visual(kind, torch.zeros(frames, 3, side, side, device="cpu"), clip)
        token = prompts.tokenizer.convert_tokens_to_ids(prompts.processor.placeholders[kind])
        ids = torch.tensor([token], device="cpu")
        labels = torch.full_like(ids, IGNORED, device="cpu")
        found.append(Encoded(ids, labels, prompts.kinds(ids), [visual], [(0, 1)]))
    return found
