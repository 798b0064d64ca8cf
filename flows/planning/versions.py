"""Records of what a run continued with: stage versions and early warning. Without a record, those of its plan count."""

import itertools

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.early_warning import EarlyWarningConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, seal, unseal
from stages.artifacts.records import parsed

KIND = "versions"


class Versions(Section):
    """Stage versions and early warning that a run continued with. The newest record replaces those of the plan."""

    run_id: str
    number: int
    versions: dict[str, int]
    early_warning: EarlyWarningConfig | None = None


def go_on_with(root: str, run_id: str, versions: dict[str, int], early_warning: EarlyWarningConfig | None) -> None:
    """Record stage versions and early warning for all Requests that the run at ``root`` makes from now on."""
    before = newest(root, run_id)
    number = 1 if before is None else before.number + 1
    record = Versions(run_id=run_id, number=number, versions=versions, early_warning=early_warning)
    store.put_if_absent(_url(root, record.number), seal(KIND, record.model_dump(mode="json")))


def newest(root: str, run_id: str) -> Versions | None:
    """Return the newest record of the run at ``root``; None without any.

    Raises :class:`ArtifactError` if a record is damaged, or missing although a later one is there.
    """
    found = None
    for number in itertools.count(1):
        url, following = _url(root, number), _url(root, number + 1)
        data = store.read_if_exists(url)
        if data is None and store.size(following) is None:
            break
        if data is None:
            raise ArtifactError(f"{url} is missing, but there is {following}; {RESTORE}")
        found = parsed(Versions, unseal(data, KIND, url), url)
        if (found.run_id, found.number) != (run_id, number):
            found_name = f"number {found.number} of run {found.run_id!r}"
            raise ArtifactError(f"{url} was written as {found_name}; {RESTORE}")
    return found


def _url(root: str, number: int) -> str:
    return store.join(root, f"{KIND}.{number}.json")
