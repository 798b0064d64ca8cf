"""How the pages look: colours for code alone, and nothing cut off in a window of 1280 px."""

import re
import runpy
import sys
from typing import Any

import pytest
from sphinx.highlighting import PygmentsBridge

from tests.pages import ROOT

OUTPUT = "held-out reward: 0.615 -> 0.786 in 20 iterations, for 32 samples\n"
"""Words of Python are in it."""


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings that the pages are built with."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def colours(text: str, language: str) -> int:
    """How many words of a block are coloured."""
    return len(re.findall(r"<span class=", PygmentsBridge("html").highlight_block(text, language)))


def rules(settings: dict[str, Any]) -> dict[str, str]:
    """The declarations of the style sheets of the pages by their selectors."""
    (folder,), names = settings["html_static_path"], settings["html_css_files"]
    text = "\n".join((ROOT / "docs" / folder / name).read_text(encoding="utf-8") for name in names)
    found = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    return {one.strip(): body for selectors, body in found for one in selectors.split(",")}


def test_only_blocks_that_name_a_language_are_coloured(settings: dict[str, Any]):
    # Sphinx takes blocks without a language for Python unless it is told otherwise.
    assert colours(OUTPUT, settings.get("highlight_language", "default")) == 0
    assert colours("for sample in samples: pass\n", "python") > 0
    assert colours("seed = 0\n", "toml") > 0


def test_long_lines_of_commands_go_on_below_and_output_and_tables_scroll(settings: dict[str, Any]):
    found = rules(settings)
    for language in ("bash", "toml"):
        assert "white-space: pre-wrap" in found[f".highlight-{language} pre"]
    assert "overflow-x: auto" in found[f".highlight-{settings['highlight_language']} pre"]
    assert "overflow-x: auto" in found[".table-wrapper"]
