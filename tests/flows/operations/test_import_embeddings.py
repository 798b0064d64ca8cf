"""The command that converts pickled embeddings."""

import json
import pickle
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from flows.cli import app as cli


def test_the_command_says_what_it_wrote_or_what_is_wrong(tmp_path: Path):
    folder = tmp_path / "in" / "text_embedding"
    folder.mkdir(parents=True)
    for stem in "ab":
        (folder / f"{stem}.pickle").write_bytes(pickle.dumps([np.zeros((2, 4), np.float16)]))
    (tmp_path / "in/metas").mkdir()
    (tmp_path / "in/metas/a.txt").write_text("a robot", encoding="utf-8")
    command = ["import-embeddings", str(tmp_path / "in"), str(tmp_path / "out")]
    ended = CliRunner().invoke(cli.app, command)
    expected = f"{tmp_path}/out: 2 embeddings, 1 with the digest of their caption\n"
    assert (ended.exit_code, ended.output) == (0, expected)
    ended = CliRunner().invoke(cli.app, command)
    assert ended.exit_code == 64
    assert "out exists already" in ended.output
    ended = CliRunner().invoke(cli.app, [*command[:2], str(tmp_path / "other"), "--json"])
    assert json.loads(ended.stdout) == {"directory": f"{tmp_path}/other", "embeddings": 2, "captioned": 1}
