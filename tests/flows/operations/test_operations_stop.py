"""The end of a run from elsewhere, which takes too long."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import StageError
from flows.operations.stop import stop
from flows.planning.run import Run
from tests.flows.by_hand import whole_run
from tests.flows.cli.making.test_stop import Working
from tests.flows.cli.test_app import invoke


@pytest.fixture
def run(recipe, tmp_path: Path) -> Run:
    return whole_run(recipe, tmp_path)


def test_a_process_that_does_not_end_is_named(run):
    working = Working(run)
    working.heeds = False
    working.start()
    assert working.began.wait(30)
    with pytest.raises(StageError, match="still works on hand after 0 s; wait, or end it there: kill ") as busy:
        stop(run.store_url, "hand", 0.0)
    assert busy.value.exit_code == 75
    working.left.set()
    working.join()
    assert "no process works on hand" in invoke("stop", "hand", "--store", run.store_url).stdout
