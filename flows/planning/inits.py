"""The trained weights that policy version 0 begins with: which they are, and whether the recipe can train on them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.pipelines import directories, weight_files
from cosmos_rl_core.weights import adapter_files, lora
from cosmos_rl_core.weights.parts import CURRENT, EMA, INIT
from cosmos_rl_core.weights.shapes import frozen_prefix, matrices_of, weight_shapes
from flows.sizes import costs
from stages.artifacts.request import Input
from stages.artifacts.slots import current_of, input_of
from stages.contracts import Init, ModelRef


@dataclass(frozen=True)
class Origin:
    """A run whose policy another run may begin with."""

    recipe: Recipe
    model: ModelRef
    below: LoraConfig | None
    """Settings of the frozen adapter below its policy, if there is one."""
    policy: Callable[[int], str]
    """Returns the slot of a policy version."""


Found = tuple[Init, tuple[Input, ...]]
"""The weights that a policy begins with, and the artifacts that hold their tensors; no artifacts for a folder."""


def resolve(recipe: Recipe, model: ModelRef, origin_of: Callable[[str], Origin]) -> Found:
    """Return the weights that ``policy.init_from`` names: a run's, which ``origin_of`` finds by its id, or a folder's.

    Raises :class:`ConfigError` if it names neither, or with all reasons why this recipe cannot train on them.
    """
    named, policy = recipe.policy.init_from or "", recipe.policy
    place = f"policy.init_from = {named!r}"
    if "/" not in named:
        found = _of_run(named, model, origin_of)
    elif (folder := Path(named)).is_dir() and not (folder / directories.INDEX).is_file():
        found = _of_adapter(folder.resolve(), recipe), ()
    else:
        found = _of_pipeline(named, recipe), ()
    mistakes = list(_misfits(recipe, found[0].lora))
    if policy.init_alpha is not None and (found[1] or found[0].lora is None):
        mistakes.append("policy.init_alpha is for the folder of an adapter; leave it out")
    if mistakes:
        raise mistakes_in(place, mistakes)
    return found


def below(recipe: Recipe, init: Init | None) -> LoraConfig | None:
    """Return the settings of the frozen adapter that the trained one is stacked on; None without one."""
    return init.lora if init is not None and recipe.policy.init_mode == "stack" else None


def leave_prefix(recipe: Recipe, init: Init | None) -> bool:
    """Return whether no adapter changes the transformer's first module, which text embeddings pass through."""
    adapters = [recipe.policy.lora]
    if init is not None and recipe.policy.init_mode == "stack":
        adapters.append(init.lora)
    return all(frozen_prefix(costs.base_path(recipe), each) for each in adapters)


def _of_run(named: str, model: ModelRef, origin_of: Callable[[str], Origin]) -> Found:
    run_id, at, version = named.partition("@")
    if at and not (version.isascii() and version.isdigit()):
        raise ConfigError(f"policy.init_from = {named!r}: expected run@k, with a policy version k from 0")
    try:
        origin = origin_of(run_id)
    except ConfigError as error:
        hint = f"; a folder is named with a slash: ./{named}" if Path(named).is_dir() else ""
        raise ConfigError(f"policy.init_from = {named!r}: {error}{hint}") from error
    newest = _newest(origin)
    k = int(version) if at else newest
    if newest is None or k is None or current_of(origin.policy(k))[1] is None:
        known = "it has none yet" if newest is None else f"its newest finished one is {newest}"
        raise ConfigError(f"policy.init_from = {named!r}: run {run_id} has no policy version {version or 0}; {known}")
    if model.digest and origin.model.digest != model.digest:
        raise ConfigError(
            f"policy.init_from = {named!r}: it was trained on {origin.model.path} ({origin.model.digest[:12]}), this "
            f"recipe trains on {model.path} ({model.digest[:12]}); set policy.model_name_or_path to its base model"
        )
    # The part that `export` reads too.
    policy = input_of(origin.policy(k), EMA if origin.recipe.train.ema_enable else CURRENT)
    adapter, inputs = origin.recipe.policy.lora, (policy,)
    if adapter is not None and origin.below is not None:
        shapes = matrices_of(weight_shapes(directories.resolve_path(origin.model.path)))
        modules, others = (lora.adapted(config, shapes) for config in (origin.below, adapter))
        adapter = lora.joined(origin.below, adapter, modules, others)
        inputs = (policy, input_of(origin.policy(0), INIT))
    pinned = [source.manifest for source in inputs]
    return Init(source=f"{run_id}@{k}", digest=pinned[0] if len(pinned) == 1 else digest(pinned), lora=adapter), inputs


def _newest(origin: Origin) -> int | None:
    """Return the newest finished policy version, which may be past the planned end; None if there is none."""
    planned = origin.recipe.train.num_iterations

    def is_there(k: int) -> bool:
        return current_of(origin.policy(k))[1] is not None

    if is_there(planned):
        return next(k for k in count(planned) if not is_there(k + 1))
    return next((k for k in range(planned - 1, -1, -1) if is_there(k)), None)


def _of_adapter(folder: Path, recipe: Recipe) -> Init:
    shapes = weight_shapes(costs.base_path(recipe))
    found = adapter_files.settings(adapter_files.read(folder), shapes, recipe.policy.init_alpha)
    return Init(source=str(folder), path=str(folder), digest=adapter_files.folder_digest(folder), lora=found)


def _of_pipeline(named: str, recipe: Recipe) -> Init:
    """Return the weights of a pipeline. Raises :class:`ConfigError` unless its transformer has the base's tensors."""
    try:
        path = directories.resolve_path(named)
    except ConfigError as error:
        raise ConfigError(f"policy.init_from: {error}") from error
    if damages := weight_files.damages(path):
        raise mistakes_in(f"policy.init_from = {named!r}", damages)
    found, wanted = (weight_shapes(each) for each in (path, costs.base_path(recipe)))
    if found != wanted:
        name = min(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        shapes = [list(each[name]) if name in each else "absent" for each in (found, wanted)]
        raise ConfigError(
            f"policy.init_from = {named!r} is another transformer than policy.model_name_or_path: {name} is "
            f"{shapes[0]}, expected {shapes[1]}"
        )
    return Init(source=named, path=path, digest=directories.pipeline_digest(path))


def _misfits(recipe: Recipe, found: LoraConfig | None) -> Iterator[str]:
    """Yield why the recipe cannot train on an adapter, or on all weights if ``found`` is None."""
    policy, needs = recipe.policy, costs.needs_of(recipe)
    if policy.lora is None and found is not None:
        yield (
            "it is an adapter, and this recipe trains all weights: add [policy.lora], or fuse it into a pipeline "
            "(fuse_lora, save_pretrained) and set policy.model_name_or_path to that"
        )
    elif policy.lora is not None and found is None:
        yield (
            "it is all weights, and [policy.lora] trains an adapter: set policy.model_name_or_path to the pipeline; of "
            "a run `cosmos-flows export` writes it"
        )
    elif policy.lora is not None and found is not None and policy.init_mode == "continue":
        linear = matrices_of(weight_shapes(costs.base_path(recipe)))
        differing = list(lora.differences(found, policy.lora, linear))
        yield from differing
        if differing:
            yield "make [policy.lora] equal to it, or train a new adapter on it (policy.init_mode = 'stack')"
    if policy.init_mode == "stack" and policy.reference == "base" and needs.update_ref_every_iter:
        yield (
            "the reference is renewed (update_ref_every_iter), and a renewed one has the frozen adapter on: set "
            "policy.reference = 'init'"
        )
