"""The origin of a what-if: the weights that its losses compare with."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.lineage.origin import StoredRollouts
from flows.planning.plan import Settings
from flows.planning.run import Run
from flows.studying.what_if import plan_of_what_if
from tests.flows.by_hand import make_all, planned_run


@pytest.fixture
def origin(recipe: Any, tmp_path: Path) -> Run:
    """A finished run of two iterations."""
    run = planned_run(recipe, tmp_path)
    make_all(run)
    return run


def test_an_anchor_that_nothing_reads_is_refused(origin: Run) -> None:
    settings = Settings("", origin.store_url)
    with pytest.raises(ConfigError, match="anchor = 'own' without effect: the loss of dpo reads no behaviour policy"):
        plan_of_what_if("hand", settings, StoredRollouts(anchor="own"), algorithm="dpo", controls=0)
