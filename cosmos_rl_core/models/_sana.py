"""The parts that SANA's image and video pipelines share: Gemma's text and the transformer's call."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._conditioning import Conditioning, Entries


class SanaModel(Model):
    """A model of SANA's family. Conditioning: ``prompt_embeds`` and ``prompt_attention_mask``."""

    complex_human_instruction: Sequence[str] | None = None
    """Lines put before every prompt except the negative one; None means the default of the stock pipeline's call."""

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        """Return embeddings ``[max_prompt_length, D]`` and their mask, 1 at tokens, on the CPU.

        The stock pipeline encodes instruction and prompt together and keeps the first embedding and the last ones.
        """
        instruction = self.complex_human_instruction
        if instruction is None:
            called = inspect.signature(self.stock_class.__call__).parameters
            instruction = called["complex_human_instruction"].default
        return self._encode(prompt, max_prompt_length, list(instruction))

    @torch.no_grad()
    def encode_negative(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Return the embeddings of a negative prompt, without the instruction: stock puts it before prompts only."""
        return Conditioning(self._encode(prompt, max_prompt_length, None))

    def _encode(self, prompt: str, max_prompt_length: int, instruction: list[str] | None) -> Entries:
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            device=self._device,
            max_sequence_length=max_prompt_length,
            complex_human_instruction=instruction,
        )
        return {"prompt_embeds": embeds[0].cpu(), "prompt_attention_mask": mask[0].cpu()}

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict the velocity; drop the variance that some checkpoints predict too.

        The transformer gets ``1000 t`` in float32, times its ``timestep_scale`` if it has one. The stock scheduler
        rounds its timesteps.
        """
        scale = self._transformer_config.get("timestep_scale", 1.0)
        velocity = self.transformer(
            hidden_states=x_t,
            timestep=(t * self.scheduler.config.num_train_timesteps * scale).to(torch.float32),
            encoder_hidden_states=conditioning["prompt_embeds"],
            # The argument `attention_mask` is accepted too and ignored by every block.
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            return_dict=False,
        )[0].float()
        return velocity[:, : x_t.shape[1]]
