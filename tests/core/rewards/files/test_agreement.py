"""How far scores agree with labels, in closed form."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._files.agreement import agreement, labels_of, read


def test_numbers_follow_their_definitions():
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: Spearman's is 4.5 / sqrt(4.5 * 5).
    found = agreement("x", "v", [0.1, 0.5, 0.5, 0.9, None], [0.1, 3.0, 2.0, 4.0, 5.0])
    assert (found.files, found.failed, found.equal) == (5, 1, 0.25)
    assert found.rank_correlation == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    # Of six pairs five are in order, and one has an equal score.
    assert found.ordered == pytest.approx(5.5 / 6)
    opposite = agreement("x", "v", [3, 2, 1], [1, 2, 3])
    assert (opposite.rank_correlation, opposite.ordered) == (pytest.approx(-1), 0)


def test_an_agreement_that_is_not_defined_has_no_number():
    for scores, labels in (([1, 1, 1], [1, 2, 3]), ([1, 2], [1, 1]), ([None], [1])):
        assert agreement("x", "v", scores, labels).rank_correlation is None
    assert agreement("x", "v", [1, 2], [1, 1]).ordered is None
    assert agreement("x", "v", [None], [1]).equal == 0


def test_each_line_of_labels_is_a_number(tmp_path: Path):
    file = tmp_path / "labels.txt"
    file.write_text("1\n0.5\n-2\n")
    assert labels_of(file, 3) == [1, 0.5, -2]
    with pytest.raises(ConfigError, match="3 lines for 2 files"):
        labels_of(file, 2)
    file.write_text("1\n\ngood\ninf\n")
    with pytest.raises(ConfigError, match="line 2: '' is no number; 3 lines hold none"):
        labels_of(file, 4)


def test_a_file_of_agreement_counts_only_for_the_scorer_that_it_is_about(tmp_path: Path):
    file = tmp_path / "agreement.json"
    file.write_text(agreement("judge", "v1", [*range(20)], [*range(20)]).model_dump_json())
    assert read(str(file), "judge", "v1").words() == (
        "20 labelled files, 0 without a score, rank correlation 1.000, 1.000 of pairs in the order of their labels, "
        "1.000 equal"
    )
    with pytest.raises(ConfigError, match="belongs to judge, v1; this is judge, v2; write it with"):
        read(str(file), "judge", "v2")
    file.write_text(agreement("judge", "v1", [*range(19), None], [*range(20)]).model_dump_json())
    with pytest.raises(ConfigError, match="has 19 files with a score, expected at least 20"):
        read(str(file), "judge", "v1")
    file.write_text("{}")
    with pytest.raises(ConfigError, match="holds no agreement"):
        read(str(file), "judge", "v1")
