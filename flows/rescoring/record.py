"""The record of a re-score: the rewards with which it scores the samples of a run."""

from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.outside_plugins import Pin, named_by
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, unseal
from stages.artifacts.records import Sealed, parsed

RESCORE = "rescore"
"""Folder of a run that has one folder for each re-score."""
FILE = "rescore.json"
"""Name of the record, which is written first."""
NUMBERS = "agreement.json"
"""Name of the numbers of the report, which is made from the artifacts."""


class Rescoring(Sealed):
    """Everything that decides the scores of a re-score. The list of samples is not in it: later ones may follow."""

    kind: ClassVar[str] = "rescore"
    run_id: str
    name: str
    """Label of the reward, or name of the file of rewards."""
    rewards: tuple[RewardConfig, ...]
    scorers: dict[str, str]
    """Version of the scorer of each reward, by label."""
    versions: dict[str, int]
    """Versions of the stages that decode and score."""
    served: tuple[str, ...] = ()
    """Labels of the rewards of services. Another scorer may answer there now, so the run's scores do not count."""
    plugins: tuple[Pin, ...] = ()
    """The run's plugins from outside the package."""

    @property
    def folder(self) -> str:
        """Return the name of its folder, with a digest of all that decides the scores."""
        return f"{self.name}-{self._fingerprint[:8]}"

    @cached_property
    def _fingerprint(self) -> str:
        named = named_by(self.rewards, self.plugins)
        decides = {"run": self.run_id, "rewards": [reward.identity() for reward in self.rewards]}
        decides |= {"scorers": self.scorers, "versions": self.versions}
        return digest(decides | {"plugins": [pin.identity() for pin in named]})

    def url(self, run_url: str) -> str:
        """Return the URL of the re-score's folder."""
        return store.join(run_url, RESCORE, self.folder)

    def write(self, run_url: str) -> None:
        """Write the record unless it is there. Raises :class:`ArtifactError` if another record is in its place."""
        url = store.join(self.url(run_url), FILE)
        store.check_writable(self.url(run_url))
        store.put_if_absent(url, self.sealed())
        read(run_url, self.folder)


def read(run_url: str, folder: str) -> Rescoring:
    """Return the record in a folder. Raises :class:`ArtifactError` if it is missing, damaged, or of another folder."""
    url = store.join(run_url, RESCORE, folder, FILE)
    data = store.read_if_exists(url)
    if data is None:
        raise ArtifactError(f"{url} is missing; {RESTORE}")
    found = parsed(Rescoring, unseal(data, Rescoring.kind, url), url)
    place = run_url.rpartition("/")[2], folder
    if (found.run_id, found.folder) != place:
        raise ArtifactError(f"{url} is the record of {found.folder} of run {found.run_id!r}; {RESTORE}")
    return found


def folders(run_url: str) -> Iterator[str]:
    """Yield the names of the folders of all re-scores of a run, sorted."""
    yield from sorted(store.names(store.join(run_url, RESCORE)))
