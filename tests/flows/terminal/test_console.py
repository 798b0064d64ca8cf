"""What commands print in a pipe, on a dumb terminal, in ASCII, and of names with hidden characters."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from flows.cli import app as cli
from flows.running.display import Display
from flows.terminal.console import console
from tests.flows.by_hand import whole_run
from tests.hand_made import planned

ROOT = Path(__file__).parents[3]
LONG = "run-" + "x" * 90


def invoke(*words: str) -> str:
    ended = CliRunner().invoke(cli.app, words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.mark.parametrize("columns", [None, "40"])
def test_no_name_is_broken_in_a_pipe(recipe, tmp_path, monkeypatch, columns):
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    run = planned(recipe(), tmp_path, run_id=LONG)
    for words in (["runs"], ["status"], ["status", LONG], ["runs", LONG]):
        shown = invoke(*words, "--store", run.store_url)
        assert any(LONG in line.split() for line in shown.splitlines()), (words, shown)
    assert "┃ reward-ocr ┃" in invoke("status", LONG, "--store", run.store_url)


def shown_on_a_terminal(columns: int, **environment: str) -> list[str]:
    """The lines of a wide table on a terminal with so many columns."""
    code = (
        "from rich.table import Table\nfrom flows.terminal.console import console\n"
        "table = Table('name')\ntable.add_row('n' * 120)\nconsole().print(table)"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, env=own | environment, cwd=ROOT
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the other end was closed
            break
        if not data:
            break
        found += data
    os.close(ours)
    assert process.wait() == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", found.decode()).split("\r\n")


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_table_is_as_wide_as_the_terminal(term):
    for columns, whole in ((200, True), (60, False)):
        lines = shown_on_a_terminal(columns, TERM=term)
        assert any("n" * 120 in line for line in lines) is whole
        assert max(map(len, lines)) <= columns


def test_a_variable_that_asks_for_colours_makes_no_terminal_of_a_pipe(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not console().is_terminal


def test_every_command_prints_in_an_encoding_without_the_characters(recipe, tmp_path):
    words = tmp_path / "words"
    (words / "train.txt").write_text('a sign that says "Ä中"\na sign that says "é"', encoding="utf-8")
    run = whole_run(recipe, tmp_path)
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for command in (["status", "hand"], ["status", "hand", "--json"], ["plan", recipe()], ["nonsense"]):
        place = [] if command == ["nonsense"] else ["--store", run.store_url]
        whole = [sys.executable, "-m", "flows", *command, *place]
        ended = subprocess.run(whole, capture_output=True, env=environment, cwd=ROOT, check=False)
        assert ended.returncode == (64 if command == ["nonsense"] else 0), ended.stderr
        assert b"Traceback" not in ended.stderr
        if "--json" in command:
            assert json.loads(ended.stdout)["run"] == "hand"


def test_control_characters_of_a_run_never_reach_the_terminal(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    progress = {"end": "failed", "error": "prompt \x1b[2J\u202e\x07 of a sample"}
    store.write(store.join(run.url, "progress.json"), seal("progress", progress))
    shown = invoke("runs", "--store", run.store_url)
    assert r"prompt \x1b[2J\u202e\x07 of a sample" in shown
    assert not {"\x1b", "\u202e", "\x07"} & set(shown)


def test_cells_titles_and_lines_of_a_run_are_escaped(capsys):
    table = Table("a\x1b", title="b\u202e")
    table.add_row("c\x9b31m")
    console().print(table)
    Display().note("d\x1b]0;e\x07")
    shown = capsys.readouterr().out
    assert not set("\x1b\u202e\x9b\x07") & set(shown)
    for text in (r"a\x1b", r"b\u202e", r"c\x9b31m", r"d\x1b]0;e\x07"):
        assert text in shown


def test_a_misspelt_shipped_name_gets_the_nearest_one():
    ended = CliRunner().invoke(cli.app, ["shipped", "tiny/ntf"])
    assert (ended.exit_code, "did you mean 'tiny/nft'?" in ended.stderr) == (64, True)


def test_a_missing_file_is_named_before_its_prompt_is_looked_at():
    ended = CliRunner().invoke(cli.app, ["score", "nofile.png", "--reward", "ocr"])
    assert (ended.exit_code, "there is no file nofile.png" in ended.stdout) == (65, True)
