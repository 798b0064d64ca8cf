"""The record of a study: its runs, by setting, seed and control."""

import json
from typing import Any, ClassVar, Literal

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import unseal
from flows.checking import checks
from stages.artifacts.records import Sealed, parsed

STUDIES = "studies"
"""Folder of a store that has one folder for each study."""
FILE, NUMBERS = "study.json", "numbers.json"
"""Names of its record, which is written first, and of the numbers of its report."""
Kind = Literal["what-if", "seeds"]


class Member(Section):
    """One run of a study."""

    run: str
    """Id of the run."""
    setting: str
    """Short name of the settings that differ in the run. Runs of one setting are compared as one."""
    seed: int
    control: int = 0
    """Number of the order in which its rewards are shuffled; 0 for unshuffled rewards."""

    @property
    def words(self) -> str:
        """Return the member for people."""
        return f"{self.setting}, seed {self.seed}" + (f", control {self.control}" if self.control else "")


class Study(Sealed):
    """Runs that are compared."""

    kind: ClassVar[str] = "study"
    name: str
    of: Kind
    source: str
    """The run whose rollouts are used, or the recipe."""
    until: int
    """The policy version that runs are compared at, unless they ended before it."""
    members: tuple[Member, ...]

    def url(self, store_url: str) -> str:
        """Return the URL of its folder."""
        return store.join(store.absolute(store_url), STUDIES, self.name)

    @property
    def settings(self) -> list[str]:
        """Return the settings in order."""
        return [*dict.fromkeys(member.setting for member in self.members)]

    def write(self, store_url: str) -> None:
        """Write the record, unless it is there. Raises :class:`ConfigError` if the folder has another one."""
        url = store.join(self.url(store_url), FILE)
        store.check_writable(self.url(store_url))
        store.put_if_absent(url, self.sealed())
        if read(store_url, self.name) != self:
            raise ConfigError(f"{url} is the record of other runs; give this study another --name")


def read(store_url: str, name: str) -> Study:
    """Return the study with a name. Raises :class:`ConfigError` if there is none."""
    url = store.join(store.absolute(store_url), STUDIES, name, FILE)
    data = store.read_if_exists(url)
    if data is None:
        known = ", ".join(sorted(store.names(store.join(store.absolute(store_url), STUDIES)))) or "none"
        raise ConfigError(f"{url} is missing: no study {name!r} here; known: {known}")
    return parsed(Study, unseal(data, Study.kind, url), url)


def numbers_of(study: Study, store_url: str) -> Any:
    """Return the numbers of its report, as they were written."""
    return json.loads(store.read(store.join(study.url(store_url), NUMBERS)))


def named(study: Study, stem: str) -> Study:
    """Return a study that has a name: its own or, if that is empty, one of ``stem`` and a digest of all else.

    Raises :class:`ConfigError` for a name that cannot be one of a folder.
    """
    name = study.name or f"{stem}-{digest(study.model_dump(mode='json'))[:8]}"
    if wrong := checks.unfit(name, is_whole=True):
        raise ConfigError(*wrong)
    return study.model_copy(update={"name": name})
