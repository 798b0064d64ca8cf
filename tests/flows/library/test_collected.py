"""What pages are made from: a damaged artifact is named and left out, and the rest is shown."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError
from flows.library import open_run
from flows.library.collected import Collected
from flows.library.states import states
from flows.planning.run import Run
from flows.reporting.report import write_report
from stages.artifacts.slots import current_of
from stages.reporting.contracts import Fragment
from tests.flows.by_hand import planned_run
from tests.flows.tracked import go


@pytest.fixture
def damaged(recipe, tmp_path: Path) -> Run:
    """A finished run, in one of whose fragments a byte is changed."""
    run = planned_run(recipe, tmp_path)
    go(run)
    flip(fragment_of(run))
    return run


def flip(file: Path) -> None:
    """Change a byte; a second time, change it back."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def fragment_of(run: Run) -> Path:
    made = current_of(run.slots.iteration(1, "fragment"))[1]
    assert made is not None
    return Path(made.slot, made.files[Fragment.FRAGMENT].path)


def test_a_damaged_artifact_is_left_out_and_named(damaged: Run):
    found = Collected(damaged)
    found.fill(states(damaged))
    assert [*found.damaged] == ["iteration-0001/fragment"]
    assert (sorted(found.iterations), sorted(found.trained)) == ([0], [0, 1])


def test_an_artifact_that_could_not_be_read_is_read_when_it_is_whole_again(damaged: Run):
    found = Collected(damaged)
    found.fill(states(damaged))
    flip(fragment_of(damaged))
    found.fill(states(damaged))
    assert sorted(found.iterations) == [0, 1]


def test_the_report_of_a_damaged_run_is_written_and_ends_as_wrong_data(damaged: Run):
    with pytest.raises(ArtifactError, match="1 stage of hand damaged: iteration-0001/fragment") as raised:
        write_report(open_run("hand", damaged.store_url))
    assert raised.value.exit_code == 65
    page = Path(damaged.slots.report, "index.html").read_text(encoding="utf-8")
    assert "<td>iteration-0001/fragment</td>" in page
    assert "damaged: " in page
