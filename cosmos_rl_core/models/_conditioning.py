"""Conditioning: the inputs of a transformer besides state and time, as a value."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS, CONDITIONAL_MASK

Entries = Mapping[str, Tensor]
"""Inputs of the transformer by name."""


@dataclass(frozen=True, eq=False)
class Conditioning(Mapping[str, Tensor]):
    """Inputs of a transformer besides state and time: of one prompt, without a batch dimension, or of a batch.

    As a mapping it has all entries. No name is in both ``own`` and ``shared``.
    """

    own: Entries
    """Entries that belong to the prompt, such as text embeddings. The unconditional prediction of guidance takes the
    negative prompt's instead."""
    shared: Entries = field(default_factory=dict)
    """Entries that both predictions of guidance take, such as given frames and tokens of references."""
    shapes: tuple[tuple[int, int, int], ...] = ()
    """Number of tokens of each reference along frames, height and width; empty if references add no tokens. They are
    integers, not a tensor, because ``velocity`` also runs on the meta device. All prompts of a batch have the same."""

    def __getitem__(self, name: str) -> Tensor:
        return self.own[name] if name in self.own else self.shared[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self.shared

    def __len__(self) -> int:
        return len(self.own) + len(self.shared)

    def __or__(self, shared: Entries) -> "Conditioning":
        """Return the conditioning with more shared entries."""
        return Conditioning(self.own, {**self.shared, **shared}, self.shapes)

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the conditioning with ``change`` applied to every tensor."""
        own, shared = ({name: change(one) for name, one in some.items()} for some in (self.own, self.shared))
        return type(self)(own, shared, self.shapes)

    def guided_by(self, negative: "Conditioning") -> "Conditioning":
        """Return the conditioning of the unconditional prediction: ``own`` of ``negative``, ``shared`` of this one."""
        return Conditioning(negative.own, self.shared, self.shapes)


def stack(conditionings: Sequence[Conditioning], device: torch.device) -> Conditioning:
    """Batch unbatched conditionings: ``[...]`` each to ``[B, ...]`` on ``device``.

    Texts of unequal length are padded with zeros at the end, and an entry ``<name>_mask`` is added: int64 ``[B, S]``,
    1 at tokens and 0 at padding. All other dimensions must be equal. Raises ``ValueError`` if the shapes of references
    differ, or if only some conditionings have references.
    """
    first, *others = conditionings
    if any(one.shared.keys() != first.shared.keys() for one in others):
        raise ValueError("prompts with references and prompts without do not fit in one batch")
    if other := next((one.shapes for one in others if one.shapes != first.shapes), None):
        raise ValueError(f"references of tokens {first.shapes} and {other} do not fit in one batch")
    own: dict[str, Tensor] = {}
    for name in first.own:
        tensors = [one.own[name] for one in conditionings]
        own[name] = pad_sequence(tensors, batch_first=True)
        if len({len(tensor) for tensor in tensors}) > 1:
            tokens = [torch.ones(len(tensor), dtype=torch.long, device=tensor.device) for tensor in tensors]
            own[f"{name}_mask"] = pad_sequence(tokens, batch_first=True)
    shared = {name: torch.stack([one.shared[name] for one in conditionings]) for name in first.shared}
    return Conditioning(own, shared, first.shapes).each(lambda tensor: tensor.to(device))


def given_frames(latents: Tensor, num_latent_frames: int) -> dict[str, Tensor]:
    """Return the shared entries that give a video of ``num_latent_frames``, T, its first frames.

    ``latents`` are the n given frames, normalised, ``[C, n, H, W]``; n = 0 is text to video. The entries are float32:
    the latents ``[C, T, H, W]``, zero after the given frames, and the mask ``[1, T, 1, 1]``, 1 at given frames.
    """
    num_given = latents.shape[1]
    padding = (0, 0, 0, 0, 0, num_latent_frames - num_given)
    mask = latents.new_zeros(1, num_latent_frames, 1, 1, dtype=torch.float32)
    mask[:, :num_given] = 1
    return {CONDITIONAL_LATENTS: nn.functional.pad(latents.float(), padding), CONDITIONAL_MASK: mask}


def generated(conditioning: Conditioning) -> Tensor | None:
    """Return the mask of losses and log-probabilities: 1 at frames to generate, 0 at given ones; None if none is given.

    It broadcasts to latents.
    """
    return 1 - conditioning[CONDITIONAL_MASK] if CONDITIONAL_MASK in conditioning else None
