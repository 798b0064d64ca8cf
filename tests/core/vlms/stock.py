"""What the stock processors of transformers make of :data:`tests.core.vlms.cases.CASES`: a program.

It needs the package torchvision, whose folder is on ``PYTHONPATH`` with this tree:
``python -m tests.core.vlms.stock ARCHITECTURE FOLDER OUTPUT.npz``. FOLDER is one of :func:`tests.core.vlms.tiny.save`.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.core.vlms.cases import CASES, QWEN3, QWEN25, Case, conversation

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def stock_inputs(processor: Any, case: Case) -> dict[str, np.ndarray]:
    """Inputs of the model, by name, from the stock processor."""
    asked = [conversation(shapes, index) for index, shapes in enumerate(case.media)]
    parts = [part for messages in asked for part in messages[0]["content"]]
    videos = [part for part in parts if part["type"] == "video"]
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata
    lengths = [len(part["video"]) for part in videos]
    about = [
        metadata(length, part["fps"], frames_indices=list(range(length)))
        for length, part in zip(lengths, videos, strict=True)
    ]
    # The stock default of Qwen3-VL has both fps and num_frames, and refuses the two together.
    sampling = {"fps": None, **case.video} if "num_frames" in case.video else case.video
    wants = {"do_sample_frames": True, **sampling} if videos else {}
    if "num_frames" in case.video:
        processor.video_processor.fps = None
    made = processor(
        text=[processor.apply_chat_template(messages, add_generation_prompt=True) for messages in asked],
        images=[Image.fromarray(part["image"]) for part in parts if part["type"] == "image"] or None,
        videos=[part["video"] for part in videos] or None,
        video_metadata=about or None,
        padding=True,
        padding_side="left",
        return_tensors="pt",
        **{name: value for name, value in wants.items() if value is not None},
    )
    return {name: np.asarray(value) for name, value in made.items()}


def declare_operators() -> None:
    """Declare torchvision's compiled operators, which are there for builds of torch with CUDA only; none is called."""
    if torch.version.cuda is not None:
        return
    package = importlib.util.find_spec("torchvision")
    assert package is not None
    assert package.origin is not None
    sources = [path.read_text(encoding="utf-8") for path in Path(package.origin).parent.glob("_*_registrations.py")]
    for name in set(re.findall(r'register_(?:meta|fake|autograd)\(\s*"(?:torchvision::)?(\w+)"', "".join(sources))):
        OPERATORS.define(f"{name}(Tensor x) -> Tensor")


def main(architecture: str, folder: str, output: str) -> None:
    """Write the inputs of every case as ``case/name``."""
    declare_operators()
    name = {QWEN25: "Qwen2_5_VLProcessor", QWEN3: "Qwen3VLProcessor"}[architecture]
    cls = getattr(importlib.import_module("transformers"), name)
    found: dict[str, Any] = {}
    for case_name, case in CASES.items():
        processor = cls.from_pretrained(folder)
        processor.chat_template = processor.tokenizer.chat_template
        found |= {f"{case_name}/{key}": value for key, value in stock_inputs(processor, case).items()}
    np.savez_compressed(output, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
