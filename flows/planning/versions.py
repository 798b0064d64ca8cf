"""Records of what a run continued with: stage versions, early warning, and the number that ranks its policies.

Without a record, the values in the plan apply.
"""

import itertools
from typing import Any, TypeVar

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.early_warning import EarlyWarningConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, seal, unseal
from flows.planning.base import AnyRecipe
from stages.artifacts.records import parsed

KIND = "versions"


OfKind = TypeVar("OfKind", bound=AnyRecipe)


class Versions(Section):
    """Settings that a run continued with. The newest record replaces what its plan says."""

    run_id: str
    number: int
    versions: dict[str, int]
    early_warning: EarlyWarningConfig | None = None
    best_by: str | None = None
    """``validation.best_by`` of the recipe; the plan's applies if a record was written without the field."""

    def replaced(self, recipe: AnyRecipe) -> dict[str, Any]:
        """Return the fields of a plan with this recipe that the record replaces."""
        versions, warning = self.versions, self.early_warning
        return {"stage_versions": versions, "early_warning": warning, "recipe": self.ranking(recipe)}

    def ranking(self, recipe: OfKind) -> OfKind:
        """Return the recipe with the ``validation.best_by`` of this record."""
        if "best_by" not in self.model_fields_set or self.best_by == best_by_of(recipe):
            return recipe
        assert recipe.validation is not None, "a run's number never comes or goes"
        validation = recipe.validation.model_copy(update={"best_by": self.best_by})
        return recipe.model_copy(update={"validation": validation})


def best_by_of(recipe: AnyRecipe) -> str | None:
    """Return ``validation.best_by``; None without it."""
    return None if recipe.validation is None else recipe.validation.best_by


def go_on_with(
    root: str,
    run_id: str,
    versions: dict[str, int],
    early_warning: EarlyWarningConfig | None,
    best_by: str | None,
) -> None:
    """Write a record: stage versions, early warning and ranking with which the run at ``root`` continues."""
    before = newest(root, run_id)
    number = 1 if before is None else before.number + 1
    record = Versions(run_id=run_id, number=number, versions=versions, early_warning=early_warning, best_by=best_by)
    store.put_if_absent(_url(root, record.number), seal(KIND, record.model_dump(mode="json")))


def newest(root: str, run_id: str) -> Versions | None:
    """Return the newest record of the run at ``root``; None without any. Raises like :func:`every`."""
    return next(reversed(every(root, run_id)), None)


def every(root: str, run_id: str) -> list[Versions]:
    """Return the records of the run at ``root``, the oldest first.

    Raises :class:`ArtifactError` if a record is damaged, or missing although a later one is there.
    """
    records: list[Versions] = []
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
        records.append(found)
    return records


def _url(root: str, number: int) -> str:
    return store.join(root, f"{KIND}.{number}.json")
