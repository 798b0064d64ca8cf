"""What SANA's image and video pipelines share: Gemma's text and the transformer's call."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._adapter import Adapter
from cosmos_rl_core.models._base import Conditioning


class TakesInstruction(Adapter):
    """Whose prompts come after an instruction."""

    complex_human_instruction: Sequence[str] | None = None
    """Comes before every prompt but the negative one; None means that of the stock pipeline's call."""

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Embeddings ``[max_prompt_length, D]`` and their mask, 1 at tokens, on the CPU.

        Of the embeddings of instruction and prompt the first and the last are kept.
        """
        own = self.complex_human_instruction
        given = _stock_instruction(type(self._pipeline)) if own is None else list(own)
        return self._encode(prompt, max_prompt_length, given)

    @torch.no_grad()
    def encode_negative(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Without an instruction, which the stock pipeline puts before prompts alone."""
        _loading.require(self._pipeline.text_encoder, "text")
        return self._encode(prompt, max_prompt_length, None)

    def _encode(self, prompt: str, max_prompt_length: int, instruction: list[str] | None) -> Conditioning:
        embeds, mask, _, _ = self._pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            device=self._device,
            max_sequence_length=max_prompt_length,
            complex_human_instruction=instruction,
        )
        return {"prompt_embeds": embeds[0].cpu(), "prompt_attention_mask": mask[0].cpu()}


def velocity(transformer: Any, x_t: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
    """The transformer's answer in float32, without the variance that some checkpoints predict besides."""
    answer = transformer(
        hidden_states=x_t,
        timestep=timestep.to(torch.float32),
        encoder_hidden_states=conditioning["prompt_embeds"],
        # the argument `attention_mask` is accepted too and ignored by every block
        encoder_attention_mask=conditioning["prompt_attention_mask"],
        return_dict=False,
    )[0].float()
    return answer[:, : x_t.shape[1]]


def _stock_instruction(pipeline_class: type) -> list[str]:
    """What the stock call puts before every prompt: the default of its argument, so that no copy of it can differ."""
    return inspect.signature(pipeline_class.__call__).parameters["complex_human_instruction"].default
