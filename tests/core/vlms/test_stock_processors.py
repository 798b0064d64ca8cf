"""Ours against the stock processors of transformers, which need torchvision, in a process of their own.

``TORCHVISION_WHEEL`` is the path of a wheel: ``pip download --no-deps torchvision==0.28.0`` for torch 2.13. It is
unpacked, not installed. With it, ``python -m tests.core.vlms.test_stock_processors`` writes the committed values anew.
``TRANSFORMERS_4`` is a folder: ``pip install --no-deps --target FOLDER transformers==4.57.1 "huggingface_hub<1"
"tokenizers<0.23.1"``. With it too, the tokens of that version are written anew.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.vlms._prompts import Prompts
from tests.core.vlms import tiny
from tests.core.vlms.cases import ARCHITECTURES, CASES, EARLIER_TOKENS, QWEN3, QWEN25, conversation, thinned

ROOT, GOLDEN = Path(__file__).parents[3], Path(__file__).parent / "golden"
WHEEL, EARLIER = "TORCHVISION_WHEEL", "TRANSFORMERS_4"
FULL_SIZE: dict[str, dict[str, Any]] = {
    QWEN25: {"image": {"min_pixels": 3136, "max_pixels": 200_000}, "video": {}},
    QWEN3: {"image": {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "video": {}},
}
"""Patches of the true size; the bounds are the defaults, in which the media are enlarged."""


def unpacked(folder: Path) -> Path:
    """Folder to import torchvision from."""
    with zipfile.ZipFile(os.environ[WHEEL]) as wheel:
        wheel.extractall(folder)
    return folder


def by_stock(architecture: str, model: str, packages: list[Path], output: Path) -> dict[str, dict[str, np.ndarray]]:
    """Inputs of every case, by its name, from the stock processors."""
    command = [sys.executable, "-m", "tests.core.vlms.stock", architecture, model, str(output)]
    path = os.pathsep.join(map(str, [*packages, ROOT]))
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return by_case(output)


def by_case(file: Path) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    with np.load(file) as values:
        for key in values.files:
            case, _, name = key.partition("/")
            found[case][name] = values[key]
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if importlib.util.find_spec("torchvision") is not None:
        return None
    if WHEEL not in os.environ:
        pytest.skip(f"torchvision is not installed, and {WHEEL} names no wheel of it")
    return unpacked(tmp_path_factory.mktemp("torchvision"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["tiny", "full size"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_inputs_match_the_stock_processors(architecture: str, sizes: str, package: Path | None, tmp_path: Path):
    (tmp_path / "model").mkdir()
    model = tiny.save(tmp_path / "model", architecture, None if sizes == "tiny" else FULL_SIZE[architecture])
    stock = by_stock(architecture, model, [package] if package else [], tmp_path / "stock.npz")
    golden = by_case(GOLDEN / f"{architecture}.npz") if sizes == "tiny" else {}
    assert stock.keys() == CASES.keys()
    for name, case in CASES.items():
        asked = [conversation(shapes, index) for index, shapes in enumerate(case.media)]
        ours = Prompts(model, {"video": case.video}).prepare(asked)
        assert ours.keys() == stock[name].keys()
        for key, values in ours.items():
            assert values.numpy().dtype == stock[name][key].dtype
            np.testing.assert_array_equal(values.numpy(), stock[name][key], err_msg=f"{name}: {key}")
            if golden:
                np.testing.assert_array_equal(thinned(key, values.numpy()), golden[name][key])


def write_golden() -> None:
    """Write the committed values, from the stock processors."""
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            (model := Path(folder, "model")).mkdir()
            package = unpacked(Path(folder, "torchvision"))
            stock = by_stock(architecture, tiny.save(model, architecture), [package], Path(folder, "stock.npz"))
        found = {f"{case}/{key}": thinned(key, v) for case, values in stock.items() for key, v in values.items()}
        np.savez_compressed(GOLDEN / f"{architecture}.npz", **found)  # pyright: ignore[reportArgumentType]


def write_earlier_tokens() -> None:
    """Write the tokens of Qwen3-VL's cases, from the stock processor of transformers 4.57.1."""
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder, "model")).mkdir()
        tiny.save(model, QWEN3)
        for name, change in (("tokenizer_config", _as_before_5), ("preprocessor_config", _fast)):
            (file := model / f"{name}.json").write_text(json.dumps(change(json.loads(file.read_text()))))
        packages = [Path(os.environ[EARLIER]), unpacked(Path(folder, "torchvision"))]
        stock = by_stock(QWEN3, str(model), packages, Path(folder, "stock.npz"))
    found = {case: values["input_ids"] for case, values in stock.items()}
    np.savez_compressed(EARLIER_TOKENS, **found)  # pyright: ignore[reportArgumentType]


def _as_before_5(settings: dict[str, Any]) -> dict[str, Any]:
    """A list of special tokens under its name before version 5."""
    return {**settings, "additional_special_tokens": settings["extra_special_tokens"], "extra_special_tokens": {}}


def _fast(settings: dict[str, Any]) -> dict[str, Any]:
    """The processor that published folders name; the other one of version 4 ignores ``size``."""
    return {**settings, "image_processor_type": "Qwen2VLImageProcessorFast"}


if __name__ == "__main__":
    write_golden()
    if EARLIER in os.environ:
        write_earlier_tokens()
