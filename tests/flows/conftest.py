"""A recipe and its prompts, to be planned; the command line."""

import sys
from pathlib import Path

import pytest

from flows.cli import app as cli
from tests.flows import prepared

RECIPE = """
[policy]
model_name_or_path = "package:tiny-sd3"
lora = { r = 2 }
diffusers = { inference_size = [32, 64] }

[train]
num_iterations = 2
train_batch_per_replica = 8
optm_lr = 1e-3
optm_warmup_steps = 3
optm_decay_type = "linear"
max_num_steps = 8

[train.train_policy]
type = "nft"
batch_size_per_optimize = 4
timesteps_fraction = 1.0

[train.train_policy.dataset]
name = "ocr"
local_dir = "WORDS"

[rollout]
n_generation = 4

[early_warning]
statistics = false

[[rewards]]
fn = { name = "ocr", line_width = 96 }
"""
"""Two prompts of four samples an iteration, in two optimizer steps."""


@pytest.fixture
def words(tmp_path: Path):
    """A prompt directory; called with lines, it is rewritten."""
    folder = tmp_path / "words"
    folder.mkdir()

    def write(*lines: str) -> str:
        (folder / "train.txt").write_text("\n".join(lines), encoding="utf-8")
        return str(folder)

    write(*(f'a sign that says "{word}"' for word in ("AC", "K7", "HP", "XY")))
    return write


@pytest.fixture
def recipe(tmp_path: Path, words):
    """Path of a recipe; called with replacements, it is rewritten."""
    path = tmp_path / "tiny.toml"

    def write(*replacements: tuple[str, str]) -> str:
        text = RECIPE.replace("WORDS", str(tmp_path / "words"))
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        return str(path)

    write()
    return write


@pytest.fixture
def main(monkeypatch, capsys):
    """The entry point with some words; exit code, stdout and stderr."""

    def main(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return main


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three captioned pictures."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    prepared.add(folder, 0, 1, 2)
    return folder


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """A store that is not there yet."""
    return str(tmp_path / "store")
