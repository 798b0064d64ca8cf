"""Which versions of the stages a run's artifacts are of: the plan's, until the run went on with others."""

import itertools

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, seal, unseal
from stages.artifacts.records import parsed

KIND = "versions"


class Versions(Section):
    """Versions of stages that a run went on with. The newest such record counts, in place of the plan's versions."""

    run_id: str
    number: int
    versions: dict[str, int]


def go_on_with(root: str, run_id: str, versions: dict[str, int]) -> None:
    """Have the artifacts of the run at ``root`` be of these versions from now on."""
    before = newest(root, run_id)
    record = Versions(run_id=run_id, number=1 if before is None else before.number + 1, versions=versions)
    store.put_if_absent(_url(root, record.number), seal(KIND, record.model_dump(mode="json")))


def newest(root: str, run_id: str) -> Versions | None:
    """The newest record of the run at ``root``; None if it never went on with other versions.

    Raises :class:`ArtifactError` if one is damaged, or one before a later one is lost.
    """
    found = None
    for number in itertools.count(1):
        url, following = _url(root, number), _url(root, number + 1)
        data = store.read_if_exists(url)
        if data is None and store.size(following) is None:
            break
        if data is None:
            raise ArtifactError(f"{url} is missing, but there is {following}, which comes after it; {RESTORE}")
        found = parsed(Versions, unseal(data, KIND, url), url)
        if (found.run_id, found.number) != (run_id, number):
            raise ArtifactError(f"{url} was written as number {found.number} of run {found.run_id!r}; {RESTORE}")
    return found


def _url(root: str, number: int) -> str:
    return store.join(root, f"{KIND}.{number}.json")
