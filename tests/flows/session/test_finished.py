"""The command of a finished run, given again without a server: it says what the run made, or leaves it to the flow."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError, LeaseError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease
from flows.planning.plan import Settings
from flows.post_train import post_train
from flows.running.progress import Reporter
from flows.session.finished import say_if_finished
from flows.terminal import commands
from stages.artifacts.generations import invalidate
from tests.flows.by_hand import validated
from tests.flows.resumed import Resumed
from tests.hand_made import planned


def files_under(folder: str) -> dict[str, bytes]:
    """The bytes of every file, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


class Commanded:
    """A run, and its command."""

    def __init__(self, path: str, folder: Path) -> None:
        self.run = planned(path, folder, run_id="hand", iterations=2)
        self.settings = Settings(path, self.run.store_url, "hand", 2)
        self.resumed, self.said = Resumed(self.run, folder), list[str]()

    def go(self, how: str = "done") -> None:
        """Make it as its flow does."""
        commands.keep(self.run, self.settings)
        with Reporter(self.run.url, lambda: how == "done"):
            self.resumed.go()

    def is_finished(self, **others: object) -> bool:
        """Give its command again, with other settings."""
        self.said.clear()
        return say_if_finished(self.run.plan, replace(self.settings, **others), self.said.append)


@pytest.fixture
def commanded(recipe, tmp_path: Path) -> Commanded:
    """A finished run of two iterations, judged at its ends."""
    found = Commanded(validated(recipe, tmp_path), tmp_path)
    found.go()
    return found


def test_a_finished_run_says_what_it_made_and_changes_nothing_but_its_lease(commanded: Commanded):
    before = files_under(commanded.run.url)
    assert commanded.is_finished()
    waves = len([*post_train(commanded.run)])
    assert commanded.said[:3] == [
        f"run hand: {commanded.run.url}",
        f"report: {commanded.resumed.page}",
        f"policy to report             kept  {waves} waves, nothing to do",
    ]
    assert commanded.said[3].startswith("continue: ")
    assert commanded.said[3].endswith("--iterations 4")
    after = files_under(commanded.run.url)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert {name for name in changed if not name.startswith("lease/")} == set()


def test_heads_that_are_missing_are_written_again(commanded: Commanded):
    folder = store.join(commanded.run.url, "heads")
    heads = files_under(folder)
    assert heads
    for name in heads:
        Path(folder, name).unlink()
    assert commanded.is_finished()
    assert files_under(folder) == heads


def unfinished(commanded: Commanded) -> None:
    """An artifact is not current."""
    invalidate(commanded.run.slots.iteration(1, "reward-ocr"), 1, "scored by mistake")


def edited(commanded: Commanded) -> None:
    """The page says something else."""
    commanded.resumed.page.write_bytes(b"Finished")


def interrupted(commanded: Commanded) -> None:
    """The last process did not end well."""
    with pytest.raises(RuntimeError), Reporter(commanded.run.url):
        raise RuntimeError


def without_plan(commanded: Commanded) -> None:
    """There is no such run."""
    store.remove(store.join(commanded.run.url, "plan.json"))


@pytest.mark.parametrize("change", [unfinished, edited, interrupted, without_plan], ids=lambda change: change.__name__)
def test_what_is_left_to_do_is_left_to_the_flow(commanded: Commanded, change: Callable[[Commanded], None]):
    change(commanded)
    assert not commanded.is_finished()
    assert commanded.said == []


def test_a_command_that_makes_more_is_left_to_the_flow(commanded: Commanded):
    assert not commanded.is_finished(remake=True)
    # Its page shows the command.
    assert not commanded.is_finished(overrides=("launch.threads=1",))
    longer = Commanded(commanded.settings.recipe, commanded.resumed.folder)
    longer.run = longer.run.going_to(3)
    assert not longer.is_finished(iterations=3)


def test_a_run_that_another_process_works_on_is_refused(commanded: Commanded):
    with Lease(store.join(commanded.run.url, "lease")), pytest.raises(LeaseError, match="another process works on"):
        commanded.is_finished()


def test_a_recipe_that_changes_what_was_made_is_refused(commanded: Commanded):
    other = commanded.run.plan.model_copy(update={"prompts": commanded.run.plan.prompts[:1]})
    with pytest.raises(ConfigError, match="was planned otherwise"):
        say_if_finished(other, commanded.settings, commanded.said.append)
