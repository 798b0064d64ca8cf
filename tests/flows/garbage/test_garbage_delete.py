"""Deletion of runs."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.garbage import delete
from flows.lineage import forks
from flows.planning.plan import Settings, freeze, plan_of
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


def test_a_deletion_that_is_killed_before_it_frees_the_origin_of_a_fork_can_be_repeated(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A store without folders: nothing is left of a run whose files are gone.
    url = "memory://killed-deletion"
    origin = Run(freeze(plan_of(Settings(recipe(), url, "hand")), url), url)
    make_all(origin)
    fork = begun(origin, 2)

    def killed(*_: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(forks, "forget", killed)
        with pytest.raises(KeyboardInterrupt):
            delete.delete(url, fork.plan.run_id)
    delete.delete(url, fork.plan.run_id)
    assert not store.listed(fork.url)
    assert not [*forks.forks_of(origin.url)]
