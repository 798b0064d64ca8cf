"""Models that rate: Qwen2-VL with another head instead of the language model's, which is read at special tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel.kept import frozen
from cosmos_rl_core.vlms._base import Changes
from cosmos_rl_core.vlms._prompts import Prompts


class RatingModel(transformers.Qwen2VLPreTrainedModel):
    """Qwen2-VL whose last hidden states a head turns into numbers. A subclass defines the head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.Qwen2VLModel(config)
        self.rm_head = self.head(config.text_config.hidden_size)
        self.post_init()

    def head(self, width: int) -> nn.Module:
        """Return the head, a module for hidden states ``[..., width]``."""
        raise NotImplementedError

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the numbers of every token, ``[conversations, tokens, numbers]``."""
        hidden = self.model(**inputs, use_cache=False).last_hidden_state
        return self.rm_head(hidden.to(next(self.rm_head.parameters()).dtype))


class VideoRewardModel(RatingModel):
    """VideoReward: a matrix gives three scores, ``[3, width]``."""

    def head(self, width: int) -> nn.Module:
        """Return the matrix."""
        return nn.Linear(width, 3, bias=False)


class HPSv3Model(RatingModel):
    """HPSv3: layers, in float32, give the mean of a rating and the logarithm of its deviation."""

    _keep_in_fp32_modules_strict = ["rm_head"]

    def head(self, width: int) -> nn.Module:
        """Return the layers. Identity replaces the dropout of training, so that weights keep their names."""
        layers = nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
        return nn.Sequential(*layers)


class Scorer:
    """A model with its prompts, frozen, in eval mode."""

    def __init__(self, model: RatingModel, prompts: Prompts, tokens: Sequence[str]) -> None:
        """Take a model, its prompts, and the special tokens at which the model rates.

        Raises :class:`ConfigError` if the tokenizer lacks one of the tokens.
        """
        self.model, self._prompts = model, prompts
        known = prompts.tokenizer.get_vocab()
        if missing := [token for token in tokens if token not in known]:
            raise ConfigError(f"the tokenizer lacks {', '.join(missing)}; prepare the folder again")
        self._ids = [known[token] for token in tokens]

    def prepare(self, conversation: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the arguments of the model's forward for a conversation."""
        return self._prompts.prepare([conversation])

    @torch.no_grad()
    def ratings(self, batch: Mapping[str, Tensor]) -> list[list[float]]:
        """Return the head's numbers at each special token of one prepared conversation: a list for each token."""
        (tokens,) = batch["input_ids"].tolist()
        there = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        # The originals give their language model no positions. It then counts all tokens, patches too.
        order = torch.arange(len(tokens), device=self.model.device).expand(3, 1, -1)
        (rows,) = self.model(**there, position_ids=order)
        return [rows[tokens.index(token)].double().tolist() for token in self._ids]


def load(
    model: type[RatingModel],
    tokens: Sequence[str],
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    changes: Changes,
) -> Scorer:
    """Return the scorer in the folder ``path``. ``changes`` go to :class:`.Prompts`.

    Raises :class:`ConfigError` with every mistake in its files, and :class:`ArtifactError` if weights are missing.
    """
    read: Any = frozen(model, path, f"the files of the scorer {path!r}", device, dtype=dtype)
    return Scorer(read, Prompts(path, changes), tokens)
