"""The encoders of a model: from prompts and their references to conditioning."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.pipelines import directories, sizes


def without_numbers(
    path: str,
    batch: int,
    max_prompt_length: int,
    size: tuple[int, int],
    frames: int,
    pictures: sizes.Pictures = (),
    device: torch.device | None = None,
) -> Conditioning:
    """Return conditioning of uninitialised tensors, for counts of memory and operations.

    It is a batch of ``batch`` texts of full length, each with references of the sizes in ``pictures``. A model ignores
    the entries that it does not take. ``path`` is the pipeline's directory.
    """
    spec, transformer = directories.spec(path), directories.settings(path, directories.TRANSFORMER)
    tokens = sizes.text_tokens(path, max_prompt_length)
    texts: dict[str, tuple[int, ...]] = {"prompt_embeds": (tokens, spec.text_width(transformer))}
    texts |= {"prompt_attention_mask": (tokens,), "pooled_prompt_embeds": (spec.pooled_width(transformer),)}
    shared = sizes.reference_shapes(path, pictures, size, frames)
    own, others = (
        {name: torch.empty(batch, *shape, device=device) for name, shape in some.items() if 0 not in shape}
        for some in (texts, shared)
    )
    return Conditioning(own, others, sizes.reference_tokens(path, pictures))


class Encoder(ABC):
    """Encoding of prompts. A model plugin defines ``_encode_prompt``.

    A plugin that takes references also defines ``_encode_references``, and ``_encode_prompt_with`` if its text encoder
    reads them.
    """

    _path: str

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """Return each prompt's text embeddings, unbatched, on the CPU, equal to the stock pipeline's.

        Prompts are encoded one by one, so that no embedding depends on another prompt.
        """
        return [Conditioning(self._encode_prompt(prompt, max_prompt_length)) for prompt in prompts]

    @torch.no_grad()
    def encode_negative(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Return embeddings of a negative prompt, or of the empty prompt that replaces a dropped text.

        They are unbatched, on the CPU, and equal to what the stock pipeline makes of its ``negative_prompt``.
        """
        return Conditioning(self._encode_prompt(prompt, max_prompt_length))

    @abstractmethod
    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        """Return embeddings of one prompt, and masks if the transformer takes them, by name: unbatched, on the CPU."""

    @torch.no_grad()
    def encode_with(
        self,
        prompt: str,
        references: Sequence[np.ndarray],
        max_prompt_length: int,
        size: tuple[int, int],
        frames: int,
    ) -> Conditioning:
        """Return the conditioning of a prompt with references, unbatched, on the CPU, equal to the stock pipeline's.

        ``references`` are uint8 RGB ``[frames, height, width, 3]``; a picture has one frame. ``size`` (height and width
        in pixels) and ``frames`` describe the generated media. Needs the components ``text`` and ``vae``.
        """
        own = self._encode_prompt_with(prompt, references, max_prompt_length)
        shared = self._encode_references(references, size, frames)
        shapes = sizes.reference_tokens(self._path, [reference.shape[1:3] for reference in references])
        return Conditioning(own, shared, shapes)

    @torch.no_grad()
    def encode_negative_with(
        self, prompt: str, references: Sequence[np.ndarray], max_prompt_length: int
    ) -> Conditioning:
        """Return the embeddings of a negative or empty prompt that is read with references.

        Only for families whose spec says ``read_with_text``.
        """
        return Conditioning(self._encode_prompt_with(prompt, references, max_prompt_length))

    def _encode_prompt_with(self, prompt: str, references: Sequence[np.ndarray], max_prompt_length: int) -> Entries:
        """Return the embeddings of a text by name, unbatched, on the CPU.

        The default ignores the references. Override it if the text encoder reads them with the text.
        """
        return self._encode_prompt(prompt, max_prompt_length)

    def _encode_references(self, references: Sequence[np.ndarray], size: tuple[int, int], frames: int) -> Entries:
        """Return the shared entries that references add to the conditioning, by name: unbatched, on the CPU.

        Tokens are in the order of the references. Each reference that adds tokens adds ``height x width`` of them, as
        ``sizes.reference_tokens`` counts. Raises ``NotImplementedError`` for a model that takes no references.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no references")
