"""README and the pages: their commands parse and run, their links lead somewhere, and they are as short as promised."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import EXIT_CODES
from docs._ext import reward_table
from flows.cli import app as cli
from tests.pages import PAGES, ROOT, write_examples

MAX_README_LINES, MAX_PAGE_LINES, MAX_TERMS = 120, 250, 30
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```bash\n(?P<lines>.*?)^```", re.MULTILINE | re.DOTALL)
RUNS, TESTED, NOT_RUN = "runs", "tested by ", "not run: "


@dataclass(frozen=True)
class Block:
    """Shell commands of a page, and the comment before them."""

    page: Path
    mark: str
    lines: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without comments and settings of variables."""
        joined = self.lines.replace("\\\n", " ").replace("&&", "\n")
        split = [shlex.split(line, comments=True) for line in joined.splitlines()]
        return [words for line in split if (words := [word for word in line if not re.match(r"[A-Z_0-9]+=", word)])]


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            yield Block(page.relative_to(ROOT), found["mark"] or "", found["lines"])


BLOCKS = [*blocks()]


def leaves(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, with the words that lead to it."""
    if not hasattr(group, "commands"):
        yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from leaves(command, (*names, name))


def test_every_block_of_commands_says_how_it_is_tested():
    unmarked = [
        f"{block.page}: {block.lines}" for block in BLOCKS if not block.mark.startswith((RUNS, TESTED, NOT_RUN))
    ]
    assert not unmarked, "\n".join(
        ["begin with <!-- runs -->, <!-- tested by FILE --> or <!-- not run: why -->", *unmarked]
    )
    assert len(BLOCKS) > 15


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark.startswith(TESTED)], ids=lambda block: str(block.page))
def test_commands_are_in_the_tests_that_they_name(block: Block):
    """The words before the first option or argument of each command occur in one of the files."""
    files = block.mark.removeprefix(TESTED).split(", ")
    words_of = [set(re.findall(r"[\w-]+", (ROOT / file).read_text(encoding="utf-8"))) for file in files]
    for program, *words in block.commands:
        if program in ("make", "."):
            continue
        words = [word for word in words if not word.startswith("--")]
        named = {*itertools.takewhile(re.compile(r"[a-z][a-z-]+$").match, words)}
        assert any(named <= words for words in words_of), f"{block.page}: {' '.join([program, *words])}"


def test_commands_of_the_pages_parse():
    every = dict(leaves(typer.main.get_command(cli.app)))
    parsed = 0
    for block in BLOCKS:
        for program, *words in block.commands:
            if program != "cosmos-flows" or words[0].startswith("--"):
                continue
            words = words[: words.index(">")] if ">" in words else words
            names = next(names for names in every if tuple(words[: len(names)]) == names)
            # Makes a context, which parses and converts all words and refuses those that it does not know.
            every[names].make_context(" ".join(words), words[len(names) :])
            parsed += 1
    assert parsed > 20


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {words[1] for block in BLOCKS for words in block.commands if words[0] == "make"}
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == RUNS], ids=lambda block: str(block.page))
def test_commands_run(block: Block, tmp_path: Path):
    for name in ("configs", "deployments", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_examples(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", block.lines]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_plan_on_the_page_is_the_tiny_recipes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    planned = CliRunner().invoke(cli.app, ["plan", "configs/tiny/nft.toml"]).stdout
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(writes .*?)```", text, re.DOTALL)
    assert {line.rstrip() for line in shown.splitlines()} <= {line.rstrip() for line in planned.splitlines()}


def test_every_exit_code_is_on_the_page_of_commands():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    codes = re.search(r"Exit codes:(.*?)\.\s", text, re.DOTALL)
    assert codes is not None
    assert {str(code) for code in (0, *EXIT_CODES.values(), 70, 130, 143)} <= set(re.findall(r"\d+", codes[1]))


def test_the_readme_is_short_and_its_links_lead_to_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_README_LINES
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert [target for target in targets if not (ROOT / target).is_file()] == []


def test_the_glossary_is_short_and_explains_each_row_once():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    terms = re.findall(r"^\| ([^|]+) \| .+ \|$", text.partition("\n## ")[0], re.MULTILINE)
    assert terms.pop(0) == "word"
    assert 20 < len(terms) == len(set(terms)) <= MAX_TERMS


def test_pages_for_plugins_name_no_private_module():
    pages = [ROOT / "docs" / "interfaces.md", *(ROOT / "docs" / "extend").rglob("*.md")]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    named = {page: re.findall(r"\bcosmos_rl_core(?:\.\w+)*\._\w+(?:\.\w+)*", text) for page, text in texts.items()}
    assert {page: found for page, found in named.items() if found} == {}
    assert sum(text.count("cosmos_rl_core.interfaces") for text in texts.values()) > 20


def test_pages_are_short():
    lines = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    assert {page: count for page, count in lines.items() if count > MAX_PAGE_LINES} == {}


def test_pages_name_only_tests_that_exist():
    files = {path.name for layer in ("tests", "cosmos_rl_core") for path in (ROOT / layer).rglob("test_*.py")}
    found: set[str] = set()
    named = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        paths = re.findall(r"(?<![\w/])tests/[\w/]+\.py\b", text)
        names = re.findall(r"(?<![\w/])test_\w+\.py\b", text)
        named += len(paths) + len(names)
        gone = [path for path in paths if not (ROOT / path).is_file()] + [name for name in names if name not in files]
        found |= {f"{page.relative_to(ROOT)}: {name}" for name in gone}
    assert not found
    assert named > 100


@pytest.mark.parametrize("layer", ["flows", "stages", "cosmos_rl_core"])
def test_the_page_on_architecture_names_every_folder_of_a_layer(layer: str):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.search(rf"^{layer}/(.*?)(?=^\S)", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    lines = re.findall(r"^  (\w+/(?: \w+/)*) ", shown[1], re.MULTILINE)
    # A folder that was renamed leaves its compiled files.
    folders = {path.relative_to(ROOT / layer).parts[0] for path in (ROOT / layer).glob("[!._]*/**/*.py")}
    assert folders == {name.removesuffix("/") for line in lines for name in line.split()}


def test_the_core_on_the_readme_has_as_many_lines_as_it_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    told = {path: int(lines) for path, lines in re.findall(r"^\| \[`(.*?)`\]\(\1\) \| (\d+) \|", text, re.MULTILINE)}
    assert len(told) == 12
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in told}
    assert {path: count for path, count in lines.items() if abs(count - told[path]) > 10} == {}


def test_the_table_of_rewards_has_a_row_for_each_and_states_its_evidence():
    rows = [line.removeprefix("| ").split(" | ") for line in reward_table.markdown().splitlines()[2:]]
    cells = {re.findall(r"`(\w+)`", row[0])[0]: row[1:] for row in rows}
    assert [*cells] == [*plugins.own("rewards")]
    assert cells["pickscore"][:2] == ["images", "`judge`"]
    assert cells["ocr"][2] == "`ocr` (served as `ocr_reward`): 1 for the right text, 0 for none of it"
    for name in cells:
        facts = plugins.load("rewards", name).Options.facts
        assert cells[name][4] == reward_table.EVIDENCE[facts.evidence]
        assert cells[name][5].startswith("yes") == facts.names_checked
    assert reward_table.MARK in (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
