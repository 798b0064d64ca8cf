"""The plan of a run that fine-tunes a VLM."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.canonical import digest, sha256
from cosmos_rl_core.config.base import NOT_IDENTITY, as_written
from cosmos_rl_core.config.reading import Values
from cosmos_rl_core.config.shared import ModelRef
from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.config.vlm.recipe import VlmRecipe
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError, Mistakes
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.file_digests import Remembered
from cosmos_rl_core.vlms import _folders
from cosmos_rl_core.vlms._base import architecture, serving
from cosmos_rl_core.vlms._settings import CONFIG, json_object
from flows.checking import checks
from flows.checking.misplaced import misplaced
from flows.planning.base import BasePlan
from flows.vlm import memory
from stages.registry import STAGES
from stages.vlm.contracts import VlmRef

SHOWN = 5
"""Largest number of rows that an error lists."""


class VlmPlan(BasePlan[VlmRecipe]):
    """A recipe with the digests of its base model and of the files of its conversations."""

    prompts: tuple[Prompt, ...] = ()
    conversations: dict[str, int] = Field(default={}, json_schema_extra=NOT_IDENTITY)
    """Number of conversations of each training dataset, counted without opening media."""
    left_out: dict[str, int] = Field(default={}, json_schema_extra=NOT_IDENTITY)
    """Number of rows of each training dataset whose texts cannot be used."""
    held_out_conversations: dict[str, int] = Field(default={}, json_schema_extra=NOT_IDENTITY)
    """Number of conversations of each held-out dataset, counted without opening media."""
    order: tuple[tuple[str, ...], tuple[str, ...]] = Field(default=((), ()), json_schema_extra=NOT_IDENTITY)
    """Names of the training datasets, then of the held-out datasets, in the recipe's order, in which they are digested.
    Kept because tables of a plan that was read are sorted. Empty in plans written before this field existed."""
    media_places: dict[str, str] = Field(default={}, json_schema_extra=NOT_IDENTITY)
    """For each ``media_path``, the digest of the absolute folder that it named when the run was planned."""

    @property
    def num_prompts(self) -> int:
        """Return the number of conversations that are trained on."""
        return sum(self.conversations.values())

    @property
    def vlm(self) -> VlmRef:
        """Return the base model as a setting of stages."""
        return VlmRef(path=self.model.path, digest=self.model.digest, changes=self.recipe.policy.media.changes)

    @property
    def epochs(self) -> float:
        """Return the number of passes over the conversations, as if all datasets had equal weights."""
        train = self.recipe.train
        steps = train.num_iterations * train.train_policy.steps_per_iteration
        return steps * train.train_batch_per_replica / max(self.num_prompts, 1)


@dataclass
class _Read:
    """Findings in the files of datasets."""

    digest: str = ""
    conversations: dict[str, int] = field(default_factory=dict[str, int])
    left_out: dict[str, int] = field(default_factory=dict[str, int])


def make_plan(
    recipe: VlmRecipe,
    run_id: str | None,
    source: str,
    known: tuple[str, ...] = (),
    *,
    without_weights: bool = False,
) -> VlmPlan:
    """Resolve and check a valid recipe.

    Raises one :class:`ConfigError` with the ``known`` mistakes and all that are found here, or
    :class:`UnavailableError` if the only fault is a service that does not answer.
    With ``without_weights`` the files of the weights may be absent; the plan can then be described, not run.
    """
    mistakes = Mistakes([*known, *misplaced(recipe.launch)])
    name = run_id or Path(source).stem
    mistakes += checks.unfit(name, is_whole=bool(run_id))
    options, validation = recipe.train.train_policy, recipe.validation
    model = mistakes.catch(_model, recipe, without_weights=without_weights)
    if model is not None:
        mistakes.catch(_check_targets, recipe, model.path)
    data = _read("train.train_policy", options.datasets, options.max_left_out, mistakes)
    held_out = _Read() if validation is None else _read("validation", validation.datasets, 0.0, mistakes)
    if mistakes or mistakes.unreached or model is None:
        raise checks.refusal(source, mistakes)
    plan = VlmPlan(
        run_id="?",
        recipe=recipe,
        model=model,
        data_digest=data.digest,
        held_out_digest=held_out.digest,
        conversations=data.conversations,
        left_out=data.left_out,
        held_out_conversations=held_out.conversations,
        order=((*options.datasets,), () if validation is None else (*validation.datasets,)),
        media_places=_places(options.datasets) | _places({} if validation is None else validation.datasets),
        plugins=outside_plugins.pins(model.adapter),
        stage_versions={stage: config.version for stage, config in STAGES.items()},
        races_decided=True,
    )
    if not run_id:
        name += f"-{digest(plan.identity())[:8] if model.digest else 'unknown'}"
    return plan.model_copy(update={"run_id": name})


def written(plan: VlmPlan) -> Values:
    """Return the recipe of a plan as a person would write it, with the datasets in their order."""
    values: Values = as_written(plan.recipe)
    for section, order in zip((values["train"]["train_policy"], values.get("validation", {})), plan.order, strict=True):
        if order:
            section["datasets"] = {name: section["datasets"][name] for name in order}
    return values


def _model(recipe: VlmRecipe, *, without_weights: bool) -> ModelRef:
    """Return the base model. Raises :class:`ConfigError` if it is not here, incomplete, or of an unknown class."""
    path = _folders.resolve(recipe.policy.model_name_or_path)
    adapter, processor = serving(path)
    if not getattr(processor, "writes_texts", True):
        raise ConfigError(f"{path}: {architecture(path)} scores media and writes no answers; it cannot be trained here")
    if dropouts := list(_dropouts(json_object(path, CONFIG) or {})):
        raise ConfigError(
            f"{path}/{CONFIG}: {', '.join(dropouts)}: training has no dropout, because a retry would draw other zeros; "
            "set it to 0 in a copy of the folder"
        )
    here = any(Path(path).glob("*.safetensors"))
    if without_weights and not here:
        processor(path, recipe.policy.media.changes)
        return ModelRef(path=path, adapter=adapter, digest="")
    _folders.check(path, recipe.policy.media.changes, "")
    return ModelRef(path=path, adapter=adapter, digest=_folders.digest(path))


def _dropouts(settings: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the settings of dropout that are not 0, also inside nested settings."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _dropouts(value, f"{place}{name}.")
        elif name.endswith(("dropout", "_pdrop")) and isinstance(value, int | float) and value:
            yield f"{place}{name} = {value:g}"


def _check_targets(recipe: VlmRecipe, path: str) -> None:
    """Raise :class:`ConfigError` if a LoRA target names no module, or ``config.json`` does not give the shapes."""
    shaped = memory.model_of(recipe, path)
    assert shaped is None or shaped.trained


def _read(place: str, datasets: Mapping[str, ChatDatasetOptions], max_left_out: float, mistakes: Mistakes) -> _Read:
    """Return the digest of the files of datasets, and how many conversations each has. No medium is opened.

    Adds to ``mistakes`` the mistakes in the datasets, and to its ``unreached`` the services that do not answer.
    """
    found, files = _Read(), list[list[str]]()
    for name, options in datasets.items():
        of_one = Mistakes()
        plugin = plugins.load("chat_datasets", options.name)
        of_one.catch(_check_folder, options)
        if (digests := of_one.reach(_digests, plugin, options)) is not None:
            files += [[name, str(number), one] for number, one in enumerate(digests)]
            if (counted := of_one.reach(_count, plugin, options, max_left_out)) is not None:
                found.conversations[name], found.left_out[name] = counted
        mistakes += [f"{place}.datasets.{name}: {mistake}" for mistake in of_one]
        mistakes.unreached += [f"{place}.datasets.{name}: {away}" for away in of_one.unreached]
    found.digest = digest(files)
    return found


def _places(datasets: Mapping[str, ChatDatasetOptions]) -> dict[str, str]:
    folders = [options.media_path for options in datasets.values() if options.media_path]
    return {folder: place_of(folder) for folder in folders}


def place_of(folder: str) -> str:
    """Return a digest of a folder's absolute path or URL. ``folder`` may be relative to the current directory."""
    return sha256(store.absolute(folder).encode())[:16]


def _check_folder(options: ChatDatasetOptions) -> None:
    if options.media_path and "://" not in options.media_path and not Path(options.media_path).is_dir():
        raise ConfigError(f"no folder at media_path = {options.media_path!r}; names of media begin there")


def _digests(plugin: Any, options: ChatDatasetOptions) -> list[str]:
    """Return the digests of the files of a dataset."""
    return [_sha256(url) for url in plugin.files(options)]


def _count(plugin: Any, options: ChatDatasetOptions, max_left_out: float) -> tuple[int, int]:
    """Return the number of rows with usable texts, and the number of other rows. No medium is opened.

    Raises :class:`ConfigError` if no row can be used, or if more than a share ``max_left_out`` cannot.
    """
    wrong: list[str] = []
    total = 0
    for row in plugin.rows(options):
        total += 1
        if row.reason:
            wrong.append(f"{row.name}: {row.reason}")
    if total == 0 or len(wrong) > max_left_out * total or len(wrong) == total:
        shown = "; ".join(itertools.islice(wrong, SHOWN))
        more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
        limit = f"max_left_out = {max_left_out:g}"
        raise ConfigError(
            f"{len(wrong)} of {total} conversations cannot be used, and {limit}{': ' * bool(wrong)}{shown}{more}"
        )
    return total - len(wrong), len(wrong)


def _sha256(url: str) -> str:
    return sha256(store.read(url)) if "://" in url else Remembered.of_user().sha256(Path(url))
