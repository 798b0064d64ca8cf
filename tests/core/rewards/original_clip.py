"""What open_clip itself makes of random weights, pictures and texts: a program.

It needs the packages open_clip and torchvision, whose folders are on ``PYTHONPATH`` with this tree:
``python -m tests.core.rewards.original_clip FOLDER``. FOLDER gets ``weights.safetensors`` and ``found.npz``.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.core.vlms import stock

SIDE, LENGTH, VOCABULARY = 32, 77, 80
TEXTS = (" A  Dog\n", "caf&amp;eacute; &lt;3", "The Mona Lisa doesnÃ¢â‚¬â„¢t have eyebrows.", "“quoted” … 1½")


def tokens() -> np.ndarray:
    """Texts of several lengths: a mark, words, the mark of the end, and zeros."""
    rng, rows = np.random.default_rng(0), np.zeros((3, LENGTH), np.int64)
    for row, length in zip(rows, (1, 12, LENGTH - 2), strict=True):
        row[: length + 2] = [VOCABULARY - 2, *rng.integers(1, VOCABULARY - 2, length), VOCABULARY - 1]
    return rows


@torch.no_grad()
def write(folder: Path) -> None:
    # Imported here: whatever imports torchvision comes after the declaration of its operators.
    samples = importlib.import_module("tests.test_torch_scorers").samples_of("image", 3)
    original: Any = importlib.import_module("open_clip.model")
    transform: Any = importlib.import_module("open_clip.transform")
    tokenizer: Any = importlib.import_module("open_clip.tokenizer")
    vision = {"image_size": SIDE, "layers": 2, "width": 32, "head_width": 2, "patch_size": 8}
    text = {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": 32, "heads": 16, "layers": 3}
    torch.manual_seed(0)
    model = original.CLIP(16, vision, text).eval()
    for weights in model.parameters():
        weights.add_(0.1 * torch.randn(weights.shape, device="cpu"))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "weights.safetensors"
    )
    change = transform.image_transform(SIDE, is_train=False, resize_mode="longest", fill_color=0)
    pictures = torch.stack([change(Image.fromarray(sample.pixels[0])) for sample in samples])
    found = {
        "pictures": model.encode_image(pictures).numpy(),
        "texts": model.encode_text(torch.as_tensor(tokens(), device="cpu")).numpy(),
        "logit_scale": model.logit_scale.exp().numpy(),
        "mended": np.array([tokenizer._clean_lower(text) for text in TEXTS]),
    }
    np.savez(folder / "found.npz", **found)


if __name__ == "__main__":
    stock.declare_operators()
    write(Path(sys.argv[1]))
