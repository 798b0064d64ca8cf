"""Everything a run needs to know before anything runs: resolved, checked at once, and written once as ``plan.json``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from cosmos_rl_core import outside_plugins, plugins, shipped
from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.recipe import Recipe, RewardConfig, check, read_values
from cosmos_rl_core.config.train import AnyDataset
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.outside_plugins import Pin
from cosmos_rl_core.parallel import sequence_shares
from cosmos_rl_core.pipelines import checkpoints, directories, guidance, sizes, weight_files
from cosmos_rl_core.sampling.solvers import check_settings
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from flows import launchers
from flows.defaults import DEFAULT_STORE
from flows.planning import costs, known_runs, versions
from flows.planning.datasets import data_prompts_of, is_trained_on, media_of, prompts_of
from flows.planning.solver import with_solver
from stages.artifacts.records import parsed
from stages.artifacts.request import FORMAT
from stages.contracts import STAGES, ModelRef

PLAN = "plan"


@dataclass(frozen=True)
class Settings:
    """The parameters of a training flow."""

    recipe: str
    store: str = DEFAULT_STORE
    run_id: str | None = None
    iterations: int | None = None
    overrides: tuple[str, ...] = ()
    cluster: str | None = None
    allow_numerics_change: bool = False
    remake: bool = False
    """Whether what other versions of stages made is made again."""


class Plan(Section):
    """A run, pinned: its recipe, the digest of its base model, its prompts."""

    format: Literal[1] = FORMAT
    run_id: str
    recipe: Recipe
    model: ModelRef
    prompts: tuple[Prompt, ...]
    """Training prompts; for supervised training, those of the media."""
    validation_prompts: tuple[Prompt, ...] = ()
    data_prompts: tuple[Prompt, ...] = Field(default=(), json_schema_extra={"neutral": []})
    """Prompts of the media that an algorithm with rewards trains on besides."""
    data_digest: str = Field(default="", json_schema_extra={"neutral": ""})
    """Digest of the files that the media are read from; "" where there are none or they are generated."""
    held_out_prompts: tuple[Prompt, ...] = Field(default=(), json_schema_extra={"neutral": []})
    """Prompts of the held-out media."""
    held_out_digest: str = Field(default="", json_schema_extra={"neutral": ""})
    """Digest of the files that the held-out media are read from."""
    prefixed: bool = Field(default=False, json_schema_extra=NOT_IDENTITY)
    """Whether text embeddings are stored as they come out of a frozen prefix of the transformer: decided once, so that
    a run which began without goes on without."""
    plugins: tuple[Pin, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Plugins that lie outside the package, with the digests of their files. No part of the name that a run has by
    default: an edited file is refused instead of beginning another run."""
    stage_versions: dict[str, int] = Field(json_schema_extra=NOT_IDENTITY)
    """Versions of the stages that its artifacts are of: those of the code that planned it, or that --remake took."""
    races_decided: bool
    """Whether the store refuses a second writer; where it does not, only one process may write a run."""

    @property
    def embedded_prompts(self) -> tuple[Prompt, ...]:
        """Every prompt that training conditions on: those trained on, then those that the data alone has."""
        known = {prompt.id for prompt in self.prompts}
        return (*self.prompts, *(prompt for prompt in self.data_prompts if prompt.id not in known))

    @property
    def base(self) -> ModelRef:
        """The model, for stages that do not run its transformer."""
        return self.model.model_copy(update={"embedded_guidance_scale": None})


def plan_of(settings: Settings) -> Plan:
    """The plan that these settings ask for; nothing is written. Raises :class:`ConfigError` with every mistake."""
    overrides = [*settings.overrides, *([f"train.num_iterations={settings.iterations}"] if settings.iterations else [])]
    values = read_values(settings.recipe, overrides, settings.cluster)
    mistakes: list[str] = []
    _collect(mistakes, lambda: store.check_readable(settings.store))
    paths = values.get("plugins", [])
    _collect(mistakes, lambda: outside_plugins.find(path for path in paths if isinstance(path, str)))
    try:
        recipe = check(values, settings.recipe)
    except ConfigError as error:
        raise ConfigError("\n  ".join([str(error), *mistakes, *_beyond(values)])) from error
    return make_plan(recipe, settings.run_id, settings.recipe, tuple(mistakes))


def _beyond(values: dict[str, Any]) -> list[str]:
    """What a recipe that is not valid still shows to be wrong outside it: its base model, prompts and rewards."""
    mistakes: list[str] = []
    if isinstance(name := _look(values, "policy", "model_name_or_path"), str):
        _collect(mistakes, lambda: directories.resolve_path(name))
    prompts: list[Prompt] = []
    for place in (("train", "train_policy", "dataset"), ("validation", "dataset")):
        if (dataset := _valid(AnyDataset, _look(values, *place))) is not None:
            prompts += _collect(mistakes, lambda dataset=dataset: prompts_of(dataset)) or ()
    for place in (("train", "train_policy", "data"), ("validation", "data")):
        if (data := _valid(AnyDataset, _look(values, *place))) is not None:
            _collect(mistakes, lambda data=data: prompts_of(data))
    rewards = values.get("rewards")
    for value in rewards if isinstance(rewards, list) else []:
        if (reward := _valid(RewardConfig, value)) is not None:
            _collect(mistakes, lambda reward=reward: _check_reward(reward, tuple(prompts)))
    return mistakes


def _look(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _valid(kind: Any, value: Any) -> Any:
    """The validated value, or None where validation has already complained."""
    try:
        return TypeAdapter(kind).validate_python(value) if isinstance(value, dict) else None
    except ValidationError:
        return None


def make_plan(recipe: Recipe, run_id: str | None, source: str, known: tuple[str, ...] = ()) -> Plan:
    """Resolve and check all that plan time can know. Raises one :class:`ConfigError` with every mistake, old or new."""
    mistakes = [*known, *launchers.misplaced(recipe.launch)]
    damaged = _collect(mistakes, lambda: _damages(recipe)) or []
    recipe = recipe if damaged else _collect(mistakes, lambda: with_solver(recipe)) or recipe
    model = None if damaged else _collect(mistakes, lambda: _model(recipe))
    prompts = _collect(mistakes, lambda: prompts_of(recipe.train.train_policy.dataset)) or ()
    held_out = _collect(mistakes, lambda: prompts_of(recipe.validation.dataset) if recipe.validation else ()) or ()
    data_prompts, data_digest = _collect(mistakes, lambda: data_prompts_of(recipe)) or ((), "")
    judged_by = recipe.validation.data if recipe.validation else None
    held_out_data = _collect(mistakes, lambda: media_of(recipe, judged_by, "validation.data")) or ((), "")
    for reward in recipe.rewards:
        _collect(mistakes, lambda reward=reward: _check_reward(reward, (*prompts, *held_out)))
    _collect(mistakes, lambda: check_settings(recipe.policy.diffusers.sample))
    wanted = recipe.prompts_per_iteration if recipe.train.train_policy.rewarded else 0
    if prompts and wanted > len(prompts):
        mistakes.append(f"one iteration needs {wanted} prompts, the dataset has {len(prompts)}")
    overlap = {p.id for p in (*prompts, *data_prompts)} & {p.id for p in held_out}
    if overlap:
        mistakes.append(f"{len(overlap)} validation prompts are also trained on, e.g. {min(overlap)}")
    if judged_by is not None and is_trained_on(
        recipe, judged_by, held_out_data, (data_prompts or prompts, data_digest)
    ):
        mistakes.append("validation.data has media that are trained on; name others, or another split")
    if recipe.train.train_policy.rewarded:
        _collect(mistakes, lambda: costs.needs_of(recipe).check(recipe.policy.diffusers.sample.rollout))
    _collect(mistakes, lambda: _check_dropout(recipe))
    if model is not None:
        mistakes += _unfit(recipe)
        _collect(mistakes, lambda: _check_given_frames(recipe))
        _collect(mistakes, lambda: costs.policy_bytes(recipe))
        _collect(mistakes, lambda: costs.check_budget(recipe))
        _collect(mistakes, lambda: _check_shared_videos(recipe))
        embedded = {prompt.id for prompt in (*prompts, *data_prompts, *held_out_data[0])}
        _collect(mistakes, lambda: costs.check_embeddings(recipe, len(embedded)))
    if model is None and not damaged:
        mistakes.append("the model is not here, so sizes and memory cannot be planned")
    if mistakes or model is None:
        lines = [f"{source}:", *(f"  {mistake}" for mistake in dict.fromkeys([*mistakes, *damaged]))]
        # Nobody has to edit a recipe for files that did not arrive whole.
        raise (ConfigError if mistakes else ArtifactError)("\n".join(lines))
    plan = Plan(
        run_id="?",
        recipe=recipe,
        model=model,
        prompts=prompts,
        validation_prompts=held_out,
        data_prompts=data_prompts,
        data_digest=data_digest,
        held_out_prompts=held_out_data[0],
        held_out_digest=held_out_data[1],
        prefixed=sizes.has_frozen_prefix(directories.resolve_path(model.path), recipe.policy.lora),
        plugins=outside_plugins.pins(model.adapter),
        stage_versions={name: stage.version for name, stage in STAGES.items()},
        races_decided=True,
    )
    name = run_id or f"{Path(source).stem}-{digest(plan.identity())[:8]}"
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"run id {name!r} must be letters, digits, '-', '_' and '.'")
    return plan.model_copy(update={"run_id": name})


def run_url(store_url: str, run_id: str) -> str:
    """Where a run's artifacts go."""
    return store.join(store.absolute(store_url), "runs", run_id)


def freeze(plan: Plan, store_url: str) -> Plan:
    """Write ``plan.json``, or read the one that stands. Refuses a recipe that resolves otherwise, naming what differs.

    The number of iterations and how processes are launched are not frozen: the returned plan has those of the recipe at
    hand.
    """
    root = run_url(store_url, plan.run_id)
    url = store.join(root, "plan.json")
    store.check_writable(root)
    if store.read_if_exists(url) is None:
        plan = plan.model_copy(update={"races_decided": store.decides_races(root)})
        store.put_if_absent(url, seal(PLAN, plan.model_dump(mode="json", exclude={"format"})))
    frozen = read_plan(store_url, plan.run_id)
    outside_plugins.check_same(frozen.plugins, plan.plugins)
    changes = differences(frozen.identity(), plan.identity())
    changes = [change for change in changes if not change.startswith(("races_decided", "run_id"))]
    if changes:
        shown = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"run {plan.run_id} was planned otherwise:\n{shown}\n"
            "use the recipe it was planned with, or another --run-id"
        )
    return frozen.model_copy(update={"recipe": plan.recipe, "model": plan.model, "plugins": plan.plugins})


def read_plan(store_url: str, run_id: str) -> Plan:
    """The plan of a run that exists. Raises :class:`ConfigError` if there is none."""
    url = store.join(run_url(store_url, run_id), "plan.json")
    data = store.read_if_exists(url)
    if data is None:
        raise ConfigError(known_runs.absent(store.join(store.absolute(store_url), "runs"), run_id))
    body = unseal(data, PLAN, url)
    # An edited plugin does not keep people from looking at a run; the stages refuse it.
    outside_plugins.use(body.get("plugins", []), verify=False)
    plan = parsed(Plan, body, url)
    if plan.run_id != run_id:
        raise ArtifactError(f"{url} is the plan of run {plan.run_id!r}; restore the one of {run_id!r} from a copy")
    newest = versions.newest(run_url(store_url, run_id), run_id)
    return plan if newest is None else plan.model_copy(update={"stage_versions": newest.versions})


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Leaves that differ, as ``a.b: old -> new``."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))]
    if old == new:
        return []
    return [f"{where}: {_brief(old)} -> {_brief(new)}"]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _collect(mistakes: list[str], resolve: Any) -> Any:
    try:
        return resolve()
    except ConfigError as error:
        # The same files may be asked for twice: by their prompts and by their digest.
        if str(error) not in mistakes:
            mistakes.append(str(error))
        return None


def _damages(recipe: Recipe) -> list[str]:
    """What is wrong with the files of the base model, found without reading them."""
    found = weight_files.damages(directories.resolve_path(recipe.policy.model_name_or_path))
    return [*found, "fetch the model again, or another copy of these files"] if found else []


def _model(recipe: Recipe) -> ModelRef:
    name = recipe.policy.model_name_or_path
    path = directories.resolve_path(name)
    adapter = directories.adapter_name(path)
    # A shipped pipeline keeps its name, so that a run can go on where the package is installed elsewhere.
    kept = name if name.startswith(shipped.PREFIX) else path
    guarded = directories.spec(path).guardrail_package is not None and recipe.policy.diffusers.guardrail != "off"
    digest = directories.pipeline_digest(path)
    return ModelRef(
        path=kept,
        adapter=adapter,
        digest=digest,
        guardrail=("guardrail",) if guarded else (),
        complex_human_instruction=recipe.policy.diffusers.complex_human_instruction,
        embedded_guidance_scale=guidance.embedded_scale(path, recipe.policy.diffusers.embedded_guidance_scale),
    )


def _unfit(recipe: Recipe) -> list[str]:
    """What this model cannot do here, or not without packages that are not installed."""
    mistakes: list[str] = []
    path, diffusers = directories.resolve_path(recipe.policy.model_name_or_path), recipe.policy.diffusers
    _collect(mistakes, lambda: directories.check_runs(path))
    _collect(mistakes, lambda: checkpoints.check(path))
    _collect(mistakes, lambda: directories.check_guardrail(path, diffusers.guardrail))
    if diffusers.complex_human_instruction is not None:
        _collect(mistakes, lambda: directories.check_takes_instruction(path))
    if diffusers.sample.negative_prompt is not None:
        _collect(mistakes, lambda: guidance.check_takes_negative_prompt(path))
    _collect(mistakes, lambda: sizes.check_prompt_length(path, diffusers.max_prompt_length))
    if recipe.validation is not None:
        _collect(mistakes, lambda: guidance.stock_scale(directories.spec(path), diffusers.sample.guidance_scale))
    return mistakes


def _check_dropout(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if adapters would drop out where a loss compares densities, or tokens are shared."""
    lora, policy = recipe.policy.lora, recipe.train.train_policy
    if lora is None or lora.lora_dropout == 0:
        return
    if recipe.launch.cp_size > 1:
        raise ConfigError(
            f"policy.lora.lora_dropout = {lora.lora_dropout:g}: what drops out is drawn for all tokens of a video at "
            f"once, and with launch.cp_size = {recipe.launch.cp_size} no process has them. Set one of the two to its "
            "default"
        )
    if costs.needs_of(recipe).transitions:
        raise ConfigError(
            f"policy.lora.lora_dropout = {lora.lora_dropout:g}: {policy.type} trains on the ratio of the policy's "
            "density to that of the rollout, which is exactly 1 until weights move; with dropout in one of the two it "
            "would be noise. Set it to 0"
        )


def _check_shared_videos(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if ``launch.cp_size`` processes cannot share a video of this model and size."""
    num_peers, diffusers = recipe.launch.cp_size, recipe.policy.diffusers
    if num_peers == 1:
        return
    path = directories.resolve_path(recipe.policy.model_name_or_path)
    shape = sizes.latent_shape(path, diffusers.inference_size, diffusers.train_frames)
    try:
        sequence_shares.check(directories.spec(path), directories.settings(path, "transformer"), shape, num_peers)
    except ConfigError as error:
        raise ConfigError(f"launch.cp_size = {num_peers}: {error}") from error


def _check_given_frames(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if this model cannot be given so many frames, or would have none to generate."""
    most, frames = recipe.train.train_policy.given_frames[1], recipe.policy.diffusers.train_frames
    if most == 0:
        return
    path = directories.resolve_path(recipe.policy.model_name_or_path)
    setting, name = f"train.train_policy.max_num_conditional_frames = {most}", directories.pipeline_class(path)
    if most > (able := directories.spec(path).max_given_frames):
        raise ConfigError(f"{setting}: {name} can be given {able or 'no'} latent frames{' at most' if able else ''}")
    if (total := sizes.latent_frames(path, frames)) is not None and most >= total:
        raise ConfigError(
            f"{setting} leaves none of {total} latent frames (train_frames = {frames}) to generate; lower it, or raise "
            "policy.diffusers.train_frames"
        )


def _check_reward(reward: RewardConfig, prompts: tuple[Prompt, ...]) -> None:
    kind = plugins.load("rewards", reward.fn.name)
    with plugins.errors_of("rewards", reward.fn.name):
        plugin = kind.Reward(reward.fn)
        reasons = [f"prompt {p.id}: {reason}" for p in prompts if (reason := plugin.check_prompt(p.text)) is not None]
        if not isinstance(plugin.version, str):
            raise ConfigError(f"{reward.fn.label}: version must be a string, found {plugin.version!r}")
    if reasons:
        more = f" (and {len(reasons) - 5} more)" if len(reasons) > 5 else ""
        raise ConfigError(f"{reward.fn.label} cannot score {len(reasons)} prompts: {'; '.join(reasons[:5])}{more}")
