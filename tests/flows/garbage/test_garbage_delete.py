"""Deletion of runs."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.garbage import delete
from flows.planning.run import Run
from tests.flows.by_hand import make_all
from tests.flows.forking.forked import begun
from tests.flows.lineage.test_kept_for_forks import KEEPS
from tests.hand_made import planned


@pytest.fixture
def origin(recipe: Any, tmp_path: Path) -> Run:
    """A run of four iterations that keeps one optimizer's state and one rollout, at its second policy."""
    run = planned(recipe(*KEEPS), tmp_path, run_id="hand")
    make_all(run.going_to(2))
    return run


def test_a_run_with_forks_is_not_deleted(origin: Run) -> None:
    fork = begun(origin, 2)
    with pytest.raises(ConfigError, match=f"{fork.plan.run_id} read artifacts of hand: delete them first"):
        delete.found(origin.store_url, "hand")
    delete.delete(origin.store_url, fork.plan.run_id)
    assert delete.found(origin.store_url, "hand").files
