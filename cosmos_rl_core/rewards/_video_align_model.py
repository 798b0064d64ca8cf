"""The model of VideoReward: Qwen2-VL without its vocabulary's head, and three scores in its place."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._video_align import TOKENS
from cosmos_rl_core.vlms._base import Changes
from cosmos_rl_core.vlms._prompts import Prompts
from cosmos_rl_core.weights.reading import align, read_module


class RewardModel(transformers.Qwen2VLPreTrainedModel):
    """Qwen2-VL whose last hidden states a matrix turns into scores, ``[3, hidden_size]``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.Qwen2VLModel(config)
        self.rm_head = nn.Linear(config.text_config.hidden_size, len(TOKENS), bias=False)
        self.post_init()

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the scores of every token, ``[conversations, tokens, 3]``."""
        return self.rm_head(self.model(**inputs, use_cache=False).last_hidden_state)


class Scorer:
    """The model with its prompts, frozen, in eval mode."""

    def __init__(self, model: RewardModel, prompts: Prompts) -> None:
        """Take the model and the prompts of its folder. Raises :class:`ConfigError` if it lacks a special token."""
        self._model, self._prompts = model, prompts
        known = prompts.tokenizer.get_vocab()
        if missing := [token for token in TOKENS.values() if token not in known]:
            raise ConfigError(f"the tokenizer lacks {', '.join(missing)}; prepare the folder again")
        self._ids = [known[token] for token in TOKENS.values()]

    @torch.no_grad()
    def scores(self, conversation: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the raw scores of a conversation: of each special token the output of its own row of the head."""
        batch = self._prompts.prepare([conversation])
        (tokens,) = batch["input_ids"].tolist()
        places = [tokens.index(token) for token in self._ids]
        there = {name: tensor.to(self._model.device) for name, tensor in batch.items()}
        # The original gives its language model no positions, so those in the text are taken, of patches too.
        order = torch.arange(len(tokens), device=self._model.device).expand(3, 1, -1)
        (rows,) = self._model(**there, position_ids=order)
        return [float(rows[place, i].double()) for i, place in enumerate(places)]


def load(path: str, device: torch.device, dtype: torch.dtype, changes: Changes) -> Scorer:
    """Return the scorer in the folder ``path``. ``changes`` are those of :class:`.Prompts`.

    Raises :class:`ConfigError` with every mistake in its files, and :class:`ArtifactError` if weights are missing.
    """
    model: Any = read_module(RewardModel, path, f"the files of the scorer {path!r}", dtype=dtype)
    align(model.requires_grad_(False).eval().to(device))
    return Scorer(model, Prompts(path, changes))
