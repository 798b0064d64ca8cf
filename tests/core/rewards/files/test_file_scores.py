"""Files that are scored."""

from pathlib import Path

import pytest

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.rewards._files.scores import FileScorer
from tests import uneven


def test_files_are_scored_in_batches_that_passed_the_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outside_plugins.find([uneven.__file__])
    assert FileScorer("uneven").version == "uneven 1"
    assert FileScorer("uneven", ["kernel=place"]).version == "uneven 1, batches of 1"
    assert capsys.readouterr().err.startswith("uneven scores in batches of 1: ")
