"""Conversations about generated pictures and clips, in LLaVA's format: what a tiny VLM learns within minutes.

``python -m cosmos_rl_core.tiny.shapes DIR`` writes them, and the model. A picture is noise with a coloured square in
one quadrant; its answer names both, as ``r1``. A clip is noise with a bright square that moves; its answer is the
direction, as ``>``. An item depends on the seed and its number only.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from cosmos_rl_core import seeds
from cosmos_rl_core.tiny import qwen3_vl

COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "y": (255, 255, 0)}
QUADRANTS = "1234"
"""Top left, top right, bottom left, bottom right."""
MOVES = {"<": (0, -3), ">": (0, 3), "^": (-3, 0), "v": (3, 0)}
"""Pixels down and to the right from one frame to the next."""
NUM_PICTURES, NUM_CLIPS, NUM_HELD_OUT = 3200, 1600, 256
"""Numbers of pictures and clips to train on, and of held-out items of each kind; multiples of the number of answers."""
HELD_OUT = 1_000_000
"""First number of the items that no model trains on."""
SIDE, SQUARE = 32, 12
"""Side of a picture and of its square, in pixels."""
CLIP_SIDE, CLIP_SQUARE, FRAMES = 16, 4, 4
"""Side of a clip and of its square, in pixels, and frames of a clip."""


def picture(seed: int, number: int) -> tuple[np.ndarray, str]:
    """Return a picture, uint8 ``[height, width, 3]``, and its answer, the next colour and quadrant."""
    dice, (colour, quadrant) = seeds.generator(seed, "picture", number), divmod(number % 16, 4)
    pixels = dice.integers(0, 128, (SIDE, SIDE, 3), dtype=np.uint8)
    half = SIDE // 2
    down, right = (int(dice.integers(0, half - SQUARE + 1)) + half * far for far in divmod(quadrant, 2))
    pixels[down : down + SQUARE, right : right + SQUARE] = [*COLOURS.values()][colour]
    return pixels, [*COLOURS][colour] + QUADRANTS[quadrant]


def clip(seed: int, number: int) -> tuple[np.ndarray, str]:
    """Return a clip, uint8 ``[frames, height, width, 3]``, and its answer, the next of four directions."""
    dice, (answer, move) = seeds.generator(seed, "clip", number), [*MOVES.items()][number % 4]
    pixels = dice.integers(0, 64, (FRAMES, CLIP_SIDE, CLIP_SIDE, 3), dtype=np.uint8)
    room = CLIP_SIDE - CLIP_SQUARE
    paths = [(FRAMES - 1) * one for one in move]
    begin = [int(dice.integers(max(0, -path), room - max(0, path) + 1)) for path in paths]
    for time, frame in enumerate(pixels):
        down, right = (at + time * one for at, one in zip(begin, move, strict=True))
        frame[down : down + CLIP_SQUARE, right : right + CLIP_SQUARE] = 255
    return pixels, answer


def write(folder: Path, pictures: range, clips: range, *, seed: int = 0, shuffled: bool = False) -> None:
    """Write ``pictures.json`` and ``clips.json``, and in ``media/`` the files that they name.

    ``shuffled`` gives each conversation the medium of another one, so that its answer says nothing about the medium.
    """
    (folder / "media").mkdir(parents=True)
    for kind, name, numbers in (("image", "pictures", pictures), ("video", "clips", clips)):
        made = [_item(folder / "media", kind, seed, number) for number in numbers]
        order = seeds.permutation(len(made), seed, "shuffled", kind) if shuffled else range(len(made))
        rows = [_row(kind, made[place][0], answer) for place, (_, answer) in zip(order, made, strict=True)]
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")


def _item(media: Path, kind: str, seed: int, number: int) -> tuple[str, str]:
    """Write a medium; return its name and its answer."""
    if kind == "image":
        pixels, answer = picture(seed, number)
        name = f"{number:07d}.png"
        Image.fromarray(pixels).save(media / name, compress_level=1)
        return name, answer
    pixels, answer = clip(seed, number)
    name = f"{number:07d}.mp4"
    _save_clip(media / name, pixels)
    return name, answer


def _row(kind: str, name: str, answer: str) -> dict[str, Any]:
    return {kind: name, "conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": answer}]}


def _save_clip(path: Path, pixels: np.ndarray) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FRAMES, options={"crf": "10", "threads": "1"})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[1:3], "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def main(arguments: list[str] | None = None) -> None:
    """Write the folders ``train``, ``held-out`` and ``model``."""
    parser = argparse.ArgumentParser(
        prog="python -m cosmos_rl_core.tiny.shapes", description="Write what a VLM learns."
    )
    parser.add_argument("dir", type=Path, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of all items and random weights")
    parser.add_argument("--shuffled", action="store_true", help="train on the media of other answers, as a control")
    options = parser.parse_args(arguments)
    folder, seed, held_out = options.dir, options.seed, range(HELD_OUT, HELD_OUT + NUM_HELD_OUT)
    write(folder / "train", range(NUM_PICTURES), range(NUM_CLIPS), seed=seed, shuffled=options.shuffled)
    write(folder / "held-out", held_out, held_out, seed=seed)
    qwen3_vl.save(folder / "model", seed)


if __name__ == "__main__":
    main()
