"""A run whose artifacts are imagined, taken on as its command does, without Prefect."""

import re
from pathlib import Path

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.storage import store
from flows.planning.plan import METRICS_FILE
from flows.planning.run import Run
from flows.reporting import derived, writing
from flows.reporting.derived import Deriving
from flows.running.display import Display
from flows.running.wave import Waves
from flows.session import loop
from flows.session.current_waves import CurrentWave, Ended
from flows.session.following import observers_of, tell
from flows.session.observers import observed
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from tests.damage import files_read
from tests.flows.imagined import Imagined


class Resumed:
    """A run whose artifacts are imagined, taken on as a session does, without Prefect."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.seen: list[str] = []
        """The head of the page before each wave that was made."""
        self.page, self.metrics, self.record = (
            Path(url)
            for url in (writing.address(run), store.join(run.url, METRICS_FILE), store.join(run.url, derived.FILE))
        )

    def go(self) -> bool:
        """Give the command of the run once more; whether the page and the numbers were found to be current."""
        deriving = Deriving(self.run)
        waves = Waves(self.run.url, LaunchConfig(), Display([].append))
        with observers_of(self.run, waves, deriving) as observers:

            def take(current: list[CurrentWave], ended: Ended) -> None:
                tell(observers, deriving, current, ended, waves.check)

            imagined = Imagined(self.run, self.folder)

            def launch(name: str, *requests: Request) -> list[Manifest]:
                found = re.search(r"<p>(\w+: \d of \d) iterations", self.page.read_text(encoding="utf-8"))
                self.seen.append("" if found is None else found[1])
                return imagined.launch(name, *requests)

            loop.make(self.run, observed(launch, observers), take=take)  # pyright: ignore[reportArgumentType]
        return deriving.current

    def read(self) -> set[str]:
        """Files that giving the command once more reads."""
        with files_read(Path(self.run.store_url)) as found:
            self.go()
        return found

    def file(self, slot: str, name: str) -> Path:
        """A file of the artifact in a slot."""
        _, manifest = current_of(slot)
        assert manifest is not None
        return Path(slot) / manifest.files[name].path
