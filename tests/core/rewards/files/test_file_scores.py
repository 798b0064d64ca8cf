"""Files that are scored."""

from pathlib import Path

import pytest

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.rewards import aesthetic
from cosmos_rl_core.rewards._files.agreement import labels_of
from cosmos_rl_core.rewards._files.scores import FileScorer, options_of, prepare, prompts_of
from tests import uneven


def test_files_are_scored_in_batches_that_passed_the_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outside_plugins.find([uneven.__file__])
    assert FileScorer("uneven").version == "uneven 1"
    assert FileScorer("uneven", ["kernel=place"]).version == "uneven 1, batches of 1"
    assert capsys.readouterr().err.startswith("uneven scores in batches of 1: ")


def test_only_line_breaks_divide_the_prompts_of_a_text_file(tmp_path: Path):
    texts = ["a sign", "two\u2028lines", "", "form\x0cfeed"]
    file = tmp_path / "prompts.txt"
    # As editors of Windows write it.
    file.write_bytes("\r\n".join([*texts, ""]).encode("utf-8-sig"))
    found = prompts_of(file, "", len(texts), options_of("jpeg"))
    assert [prompt.text for prompt in found] == texts
    file.write_bytes("1\r\n2\r\n".encode("utf-8-sig"))
    assert labels_of(file, 2) == [1, 2]


def test_weights_that_were_prepared_in_part_are_prepared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"the first half")
        raise KeyboardInterrupt

    def whole(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"all of it")

    monkeypatch.setattr(aesthetic, "prepare", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare("aesthetic", tmp_path, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    monkeypatch.setattr(aesthetic, "prepare", whole)
    prepare("aesthetic", tmp_path, tmp_path / "made")
    assert (tmp_path / "made/model.safetensors").read_bytes() == b"all of it"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
