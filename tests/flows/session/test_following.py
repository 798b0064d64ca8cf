"""Pages that follow the artifacts of a session."""

from pathlib import Path

from cosmos_rl_core.config.launch import LaunchConfig
from flows.reporting.derived import Deriving
from flows.running.display import Display
from flows.running.wave import Waves
from flows.session import loop
from flows.session.following import observers_of
from flows.session.observers import observed
from tests.flows.by_hand import validated
from tests.flows.imagined import Imagined
from tests.flows.reporting.test_derived import LOGGED, a_log_more
from tests.flows.resumed import Resumed
from tests.hand_made import planned


def test_a_log_that_came_after_its_artifact_was_read_is_on_the_next_page(recipe, tmp_path: Path):
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand", iterations=2)
    made, deriving = Resumed(run, tmp_path), Deriving(run)
    waves = Waves(run.url, LaunchConfig(), Display([].append))
    with observers_of(run, waves, deriving) as observers:
        loop.make(run, observed(Imagined(run, tmp_path).launch, observers))
        a_log_more(made)
    assert LOGGED not in made.page.read_text(encoding="utf-8")
    assert not made.go()
    assert LOGGED in made.page.read_text(encoding="utf-8")
    assert made.go()
