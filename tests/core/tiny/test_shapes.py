"""Generated pictures and clips: what they show, how often, and which of them no model trains on."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.tiny import qwen3_vl, shapes

COLOURS = {"r": [255, 0, 0], "g": [0, 255, 0], "b": [0, 0, 255], "y": [255, 255, 0]}
MOVES = {"<": [0, -3], ">": [0, 3], "^": [-3, 0], "v": [3, 0]}


def seen(pixels: np.ndarray) -> str:
    """The answer to a picture, by where most pixels have exactly one of the colours."""
    places = {one: np.argwhere((pixels == value).all(-1)) for one, value in COLOURS.items()}
    colour, square = max(places.items(), key=lambda item: len(item[1]))
    assert len(square) == 144
    down, right = (square.mean(0) > 16).tolist()
    return f"{colour}{1 + 2 * down + right}"


def moved(pixels: np.ndarray) -> str:
    """The answer to a clip, by the steps of what is bright."""
    places = [np.argwhere(frame.mean(-1) > 150).mean(0) for frame in pixels]
    steps = np.diff(places, axis=0).mean(0).round().tolist()
    return next(one for one, move in MOVES.items() if move == steps)


def frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def answers(folder: Path, name: str) -> dict[str, str]:
    rows: list[Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return {row.get("image") or row["video"]: row["conversations"][1]["value"] for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    shapes.write(folder / "true", range(64), range(16))
    shapes.write(folder / "shuffled", range(64), range(16), shuffled=True)
    return folder


def test_answers_are_balanced_and_agree_with_the_files(folder: Path):
    pictures, clips = (answers(folder / "true", name) for name in ("pictures", "clips"))
    assert sorted(Counter(pictures.values()).values()) == [4] * 16
    assert sorted(Counter(clips.values()).values()) == [4] * 4
    media = folder / "true" / "media"
    assert {name: seen(np.asarray(Image.open(media / name))) for name in pictures} == pictures
    assert {name: moved(frames(media / name)) for name in clips} == clips


def test_shuffled_media_keep_the_balance_and_do_not_show_the_answers(folder: Path):
    """Of 64 pictures 4 agree by chance with a deviation of 2, of 16 clips 4 with one of 1.8."""
    for name, most in (("pictures", 10), ("clips", 9)):
        true, given = (answers(folder / one, name) for one in ("true", "shuffled"))
        assert given.keys() == true.keys()
        assert Counter(given.values()) == Counter(true.values())
        assert sum(given[one] == true[one] for one in true) <= most


def test_an_item_depends_on_its_seed_and_number_alone(folder: Path, tmp_path: Path):
    shapes.write(tmp_path, range(3, 5), range(3, 5))
    for name in ("0000003.png", "0000004.mp4"):
        assert (tmp_path / "media" / name).read_bytes() == (folder / "true" / "media" / name).read_bytes()
    assert (shapes.picture(0, 3)[0] != shapes.picture(1, 3)[0]).any()
    assert (shapes.clip(0, 3)[0] != shapes.clip(0, 7)[0]).any()


def test_no_held_out_item_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shapes, "NUM_PICTURES", 16)
    monkeypatch.setattr(shapes, "NUM_CLIPS", 4)
    monkeypatch.setattr(shapes, "NUM_HELD_OUT", 16)
    shapes.main([str(tmp_path)])
    assert max(3200, 1600) < shapes.HELD_OUT
    for name, chances in (("pictures", 16), ("clips", 4)):
        trained, held_out = (answers(tmp_path / one, name) for one in ("train", "held-out"))
        assert not trained.keys() & held_out.keys()
        assert len(set(held_out.values())) == chances
    bits = [{path.read_bytes() for path in (tmp_path / one / "media").iterdir()} for one in ("train", "held-out")]
    assert not bits[0] & bits[1]
    assert json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8")) == qwen3_vl.config()
