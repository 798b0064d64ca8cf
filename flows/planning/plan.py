"""The plan of a run: its recipe with everything resolved, checked before anything runs, written once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from cosmos_rl_core import outside_plugins, shipped
from cosmos_rl_core.canonical import differences, digest
from cosmos_rl_core.config.base import as_read
from cosmos_rl_core.config.launch import readable
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.reading import Values
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import SnapshotOptions
from cosmos_rl_core.datasets import _shares
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ArtifactError, ConfigError, Mistakes
from cosmos_rl_core.pipelines import directories, guidance, weight_files
from cosmos_rl_core.recipes import effects
from cosmos_rl_core.recipes.reading import checked, read_values
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from flows.checking import checks, room
from flows.checking.misplaced import misplaced
from flows.defaults import DEFAULT_STORE
from flows.lineage.origin import StoredRollouts
from flows.planning import inits, kinds, versions
from flows.planning.base import AnyPlan, BasePlan, Slots, run_url
from flows.planning.datasets import read_datasets
from flows.sizes import costs
from flows.sizes.basis import Basis, largest
from stages.artifacts.records import parsed
from stages.contracts import MediaShape, ModelRef
from stages.registry import STAGES

PLAN = "plan"
PLAN_FILE = "plan.json"
"""Name of the file of a run that is written first."""
METRICS_FILE = "metrics.jsonl"
"""Name of the file with the numbers of a run: a line for each optimizer step and artifact."""


class ForkOf(NamedTuple):
    """The run that a new one is a fork of."""

    run: str
    """Id of the run."""
    at: int
    """The policy version that the fork begins with."""
    rewards: str | None = None
    """A TOML file with the ``[[rewards]]`` of the fork; None for the rewards of the run."""
    stored: StoredRollouts | None = None
    """Set for a fork that trains on the rollouts of the run."""


@dataclass(frozen=True)
class Settings:
    """The parameters of a training flow."""

    recipe: str
    """Path of a TOML recipe; for a fork the words that name its origin."""
    store: str = DEFAULT_STORE
    run_id: str | None = None
    iterations: int | None = None
    overrides: Sequence[str] = ()
    cluster: str | None = None
    allow_numerics_change: bool = False
    remake: bool = False
    """Make artifacts of other stage versions again."""
    accept_scorer: bool = False
    """Continue with another scorer of a reward service than the run began with."""
    fork: ForkOf | None = None
    """The run whose recipe is taken in place of a file."""
    of_study: bool = False
    """Whether the run belongs to a study. The command of the study continues such a run."""

    @property
    def changes(self) -> list[str]:
        """Return all overrides, with the number of iterations as one of them."""
        return [*self.overrides, *([f"train.num_iterations={self.iterations}"] if self.iterations else [])]


class Plan(BasePlan[Recipe]):
    """A recipe with the digests of its base model and media, and its prompts."""

    @property
    def embedded_prompts(self) -> tuple[Prompt, ...]:
        """Return every prompt that training conditions on: the training prompts, then the other prompts of the data."""
        known = {prompt.id for prompt in self.prompts}
        return (*self.prompts, *(prompt for prompt in self.data_prompts if prompt.id not in known))

    @property
    def every_prompt(self) -> tuple[Prompt, ...]:
        """Return the prompts of rollouts, of evaluations and of media that are no prepared dataset."""
        return (*self.prompts, *self.validation_prompts, *self.data_prompts, *self.held_out_prompts)

    def prompts_of(self, k: int) -> tuple[Prompt, ...]:
        """Return the prompts of iteration k.

        Each pass over the prompts has its own order. A pass ends when too few prompts are left for a whole iteration.
        Each set of a mixture has its own passes.
        """
        wanted, seed = self.recipe.prompts_per_iteration, self.recipe.train.seed
        if self.shares:
            return tuple(self.prompts[i] for i in _shares.chosen(self.shares, wanted, seed, k))
        epoch, place = divmod(k, len(self.prompts) // wanted)
        order = _shares.order_of(len(self.prompts), seed, "prompt order", epoch)
        return tuple(self.prompts[i] for i in order[place * wanted : (place + 1) * wanted].tolist())

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts that rollouts or supervised training use."""
        return len(self.prompts) or (self.data_snapshot.prompts if self.data_snapshot else 0)

    @property
    def base(self) -> ModelRef:
        """Return the model for stages that do not run its transformer."""
        unguided = {"embedded_guidance_scale": None, "supervised_guidance_scale": None} | _no_options()
        return self.model.model_copy(update=unguided)

    @property
    def sampled(self) -> ModelRef:
        """Return the model for stages that make samples, or train on them alone."""
        return self.model.model_copy(update={"supervised_guidance_scale": None})

    @property
    def supervised(self) -> ModelRef:
        """Return the model for stages with a loss on media."""
        scale = self.model.supervised_guidance_scale
        own = {} if scale is None else {"embedded_guidance_scale": scale}
        return self.sampled.model_copy(update=own | _no_options())

    @property
    def below(self) -> LoraConfig | None:
        """Return the settings of the frozen adapter that the trained one is stacked on; None without one."""
        return inits.below(self.recipe, self.init)

    @property
    def basis(self) -> Basis:
        """Return the facts that decide the memory of its stages."""
        known = [pinned.pictures for pinned in self.snapshots]
        return Basis(self.below, largest(costs.base_path(self.recipe), self.every_prompt, known), self.generates)

    @property
    def lineage(self) -> str:
        """Return in words what the run begins with; "" for the base model, and for fresh weights."""
        return "; ".join(words for words in (super().lineage, self._init_in_words) if words)

    @property
    def _init_in_words(self) -> str:
        if self.init is None:
            return ""
        weights = f"LoRA of rank {self.init.lora.r}" if self.init.lora else "all weights"
        how = "frozen below a new adapter" if self.below else "trained further"
        against = "itself" if self.recipe.policy.reference == "init" else "the base model"
        return f"{self.init.source} ({weights}, {self.init.digest[:12]}), {how}; the reference is {against}"

    @property
    def settled(self) -> Recipe:
        """Return the recipe with the gradient checkpointing that was decided for it."""
        return room.settled(self.recipe, self.checkpointing)

    @property
    def media(self) -> MediaShape:
        """Return the shape of generated and encoded media."""
        diffusers = self.recipe.policy.diffusers
        return MediaShape(size=diffusers.inference_size, frames=diffusers.train_frames)


def plan_of(settings: Settings, *, without_weights: bool = False, misfits: checks.Misfits | None = None) -> Plan:
    """Return the plan for these settings and write nothing. Raises :class:`ConfigError` with every mistake.

    With ``without_weights`` files of the base model may be absent, except configs. The plan can then be described, not
    run: its model has no digest, and its default name is unknown. ``misfits`` returns a message
    for each stage that does not fit the launch settings.
    """
    mistakes = Mistakes()
    values = read_values(settings.recipe, settings.changes, settings.cluster, mistakes)
    return plan_from(values, settings, mistakes, without_weights=without_weights, misfits=misfits)


def plan_from(
    values: Values,
    settings: Settings,
    mistakes: Mistakes,
    *,
    without_weights: bool = False,
    misfits: checks.Misfits | None = None,
    told: Callable[[str], bool] = lambda sentence: True,
) -> Plan:
    """Return the plan of a recipe's values, like :func:`plan_of`. ``mistakes`` were found in the source of the values.

    ``told`` returns whether a sentence on settings without effect is a mistake: it is if a person wrote the settings.
    Raises like :func:`plan_of`.
    """
    mistakes.catch(store.check_readable, settings.store)
    paths = values.get("plugins", [])
    mistakes.catch(outside_plugins.find, (path for path in paths if isinstance(path, str)))
    kind = kinds.claiming(values)
    try:
        recipe, idle = (checked if kind is None else kind.check)(values, settings.recipe)
    except ConfigError as error:
        raise ConfigError("\n  ".join([str(error), *mistakes])) from error
    mistakes.extend(filter(told, idle))
    if misfits is not None:
        mistakes.extend(misfits(recipe.launch, (checks.stages_of if kind is None else kind.stages)(recipe)))
    source, known = settings.recipe, tuple(mistakes)
    if kind is not None:
        return kind.make_plan(recipe, settings.run_id, source, known, without_weights=without_weights)
    return make_plan(recipe, settings.run_id, source, known, settings.store, without_weights=without_weights)


def make_plan(
    recipe: Recipe,
    run_id: str | None,
    source: str,
    known: tuple[str, ...] = (),
    store_url: str = DEFAULT_STORE,
    *,
    without_weights: bool = False,
) -> Plan:
    """Resolve and check a valid recipe, whose ``policy.init_from`` may name a run of the store.

    Raises one :class:`ConfigError` with the ``known`` mistakes and all that are found here.
    """
    mistakes = Mistakes([*known, *misplaced(recipe.launch)])
    name = run_id or Path(source).stem
    mistakes += checks.unfit(name, is_whole=bool(run_id))
    mistakes.catch(outside_plugins.check_settings, recipe)
    damages = mistakes.catch(lambda: weight_files.damages(costs.base_path(recipe))) or []
    absent = without_weights and bool(damages) and weight_files.all_missing(damages)
    recipe, model = mistakes.catch(checks.with_pinned_files, recipe) or recipe, None
    if absent or not damages:
        recipe = mistakes.catch(checks.with_solver, recipe) or recipe
        model = mistakes.catch(_model, recipe, whole=not absent)
    begins = None
    if model is not None and recipe.policy.init_from is not None:
        begins = mistakes.catch(inits.resolve, recipe, model, partial(_origin, store_url))
    init, init_inputs = begins or (None, ())
    datasets, checkpointing = read_datasets(recipe, store_url, mistakes), None
    checks.check_training(recipe, (*datasets.prompts, *datasets.validation_prompts), mistakes)
    if model is not None:
        prompts = datasets.prompts, datasets.validation_prompts, datasets.captions
        pictures = checks.check_model(recipe, *prompts, mistakes)
        checkpointing = room.decide(recipe, Basis(inits.below(recipe, init), pictures), mistakes)
    elif not damages:
        mistakes.append(checks.nothing_to_size(recipe.policy.model_name_or_path))
    if mistakes or mistakes.unreached or model is None:
        raise checks.refusal(source, mistakes, () if absent else damages)  # A plan needs no weights.
    plan = Plan(
        run_id="?",
        recipe=recipe,
        model=model,
        prompts=() if isinstance(recipe.train.train_policy.dataset, SnapshotOptions) else datasets.prompts,
        shares=datasets.shares,
        validation_prompts=datasets.validation_prompts,
        **datasets.data.planned("data"),
        **datasets.held_out.planned("held_out"),
        init=init,
        init_inputs=init_inputs,
        prefixed=inits.leave_prefix(recipe, init),
        checkpointing=checkpointing,
        buckets=checks.buckets_of(recipe),
        plugins=outside_plugins.pins(model.adapter),
        early_warning=checks.early_warning_of(recipe),
        stage_versions={name: stage.version for name, stage in STAGES.items()},
        races_decided=True,
    )
    if not run_id:
        name += f"-{digest(plan.identity())[:8] if model.digest else 'unknown'}"
    return plan.model_copy(update={"run_id": name})


def _model(recipe: Recipe, *, whole: bool) -> ModelRef:
    name, diffusers = recipe.policy.model_name_or_path, recipe.policy.diffusers
    path = directories.resolve_path(name)
    embedded = guidance.embedded_scale(path, diffusers.embedded_guidance_scale)
    supervised = guidance.supervised_scale(path, diffusers.supervised_guidance_scale, embedded)
    return ModelRef(
        # A shipped pipeline keeps its name, so that a run can continue where the package is installed elsewhere.
        path=name if name.startswith(shipped.PREFIX) else path,
        adapter=directories.adapter_name(path),
        digest=directories.pipeline_digest(path) if whole else "",
        guardrail=("guardrail",) if directories.has_guardrail(path, diffusers.guardrail) else (),
        complex_human_instruction=diffusers.complex_human_instruction,
        embedded_guidance_scale=embedded,
        supervised_guidance_scale=supervised if effects.has_losses_on_media(recipe) else None,
        **{option: getattr(diffusers, option) for option in guidance.OPTIONS},
    )


def _no_options() -> dict[str, None]:
    """Return the settings of guidance for stages that do not guide."""
    return dict.fromkeys(guidance.OPTIONS)


def _origin(store_url: str, run_id: str) -> inits.Origin:
    """Return a run of the store, for a policy that begins with its weights. Raises like :func:`read_plan`."""
    plan = read_plan(store_url, run_id)
    slots = Slots(run_url(store_url, run_id), plan.recipe.train.train_policy.rewarded)
    return inits.Origin(plan.recipe, plan.model, plan.below, slots.policy)


def freeze(plan: AnyPlan, store_url: str) -> Plan:
    """Write ``plan.json`` unless it is there, and return it with the recipe of ``plan``.

    Settings that decide no result may change, such as the number of iterations and the launch settings. Raises
    :class:`ConfigError`, naming the fields, if anything else differs from the written plan.
    """
    root = run_url(store_url, plan.run_id)
    url = store.join(root, PLAN_FILE)
    store.check_writable(root)
    written = store.read_if_exists(url)
    if written is None:
        plan = plan.model_copy(update={"races_decided": store.decides_races(root)})
        is_same = store.put_if_absent(url, _sealed(plan))
    else:
        is_same = written == _sealed(plan)
    del written
    if not is_same:
        frozen = read_plan(store_url, plan.run_id)
        require_same(frozen, plan)
        return frozen.model_copy(update=_now(plan))
    # Nothing is read back: a plan of a million prompts would be in memory three times.
    record = versions.newest(root, plan.run_id)
    replaced = {} if record is None else record.replaced(plan.recipe)
    return cast("Plan", as_read(plan).model_copy(update=replaced | _now(plan)))


def _sealed(plan: AnyPlan) -> bytes:
    return seal(PLAN, plan.model_dump(mode="json", exclude={"format"}))


def _now(plan: AnyPlan) -> dict[str, Any]:
    """Return the fields of a plan that may change when a run continues."""
    now = {"recipe": plan.recipe, "model": plan.model, "plugins": plan.plugins, "origin": plan.origin}
    now |= {"early_warning": plan.early_warning} if plan.recipe.early_warning is not None else {}
    return now


def require_same(frozen: AnyPlan, plan: AnyPlan) -> None:
    """Raise :class:`ConfigError`, naming the fields, if a new plan of a run differs from the written one."""
    outside_plugins.check_same(frozen.plugins, plan.plugins)
    changes = differences(frozen.identity(), plan.identity())
    if changes := [c for c in changes if not c.startswith(("races_decided", "run_id"))]:
        shown = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"run {plan.run_id} was planned otherwise:\n{shown}\n"
            "use the recipe it was planned with, or another --run-id"
        )


def read_plan(store_url: str, run_id: str) -> Plan:
    """Return the plan of a run, with the settings that it last continued with. Raises like :func:`every_plan`."""
    return every_plan(store_url, run_id)[-1]


def every_plan(store_url: str, run_id: str) -> list[Plan]:
    """Return the plan of a run as it was written, then as each record of settings to continue with changed it.

    Raises :class:`ConfigError` if there is no run, and :class:`ArtifactError` if its plan is missing or damaged.
    """
    if mistakes := checks.misnamed(run_id):
        raise ConfigError(*mistakes)
    root = run_url(store_url, run_id)
    url = store.join(root, PLAN_FILE)
    data = store.read_if_exists(url)
    if data is None:
        raise checks.no_plan(store.absolute(store_url), run_id, url)
    body = unseal(data, PLAN, url)
    # A run can be inspected with an edited plugin; the stages refuse it.
    outside_plugins.use(body.get("plugins", []), verify=False)
    body["recipe"]["launch"] = readable(body["recipe"].get("launch", {}))
    plan = parsed(_kind_of(body), body, url)
    if plan.run_id != run_id:
        wanted = f"restore the one of {run_id!r} from a copy"
        raise ArtifactError(f"{url} is the plan of run {plan.run_id!r}; {wanted}")
    records = versions.every(root, run_id)
    return [plan, *(plan.model_copy(update=record.replaced(plan.recipe)) for record in records)]


def _kind_of(body: dict[str, Any]) -> type[Any]:
    """Return the class of a written plan."""
    kind = kinds.claiming(body.get("recipe", {}))
    return Plan if kind is None else kind.plan
