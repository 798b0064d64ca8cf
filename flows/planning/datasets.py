"""The datasets of a recipe: prompts, and media of the size that the policy is trained on."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, cast

from cosmos_rl_core import plugins
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.toml import MAX_TEXT
from cosmos_rl_core.config.train import DatasetOptions, SnapshotOptions
from cosmos_rl_core.datasets._base import MediaPlugin, Prompt, Reference
from cosmos_rl_core.datasets._checked import checked_prompts
from cosmos_rl_core.datasets._shares import Share, most
from cosmos_rl_core.datasets._windows import Windows
from cosmos_rl_core.errors import ArtifactError, ConfigError, Mistakes, counted
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage import store
from flows.checking.snapshots import check_first_frames, check_items, check_references, check_weights
from flows.sizes import costs
from flows.sizes.basis import largest, typical
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.snapshots import Snapshot
from stages.contracts import Split

TRAINED = "train.train_policy.dataset"
SHOWN = 60
"""Characters that a message shows of a prompt."""


class Media(NamedTuple):
    """Media of a dataset."""

    prompts: tuple[Prompt, ...] = ()
    digest: str = ""
    """Digest of the files; ``""`` for media that are generated, and for no media."""
    snapshot: "Pinned | None" = None
    """The snapshot that holds the media; None if they are no prepared dataset."""

    def planned(self, role: str) -> dict[str, Any]:
        """Return a plan's fields on media in the role ``data`` or ``held_out``, without the captions of a snapshot."""
        prompts = () if self.snapshot else self.prompts
        return {f"{role}_prompts": prompts, f"{role}_digest": self.digest, f"{role}_snapshot": self.snapshot}


class Pinned(Section):
    """The snapshot that a run uses."""

    dataset: str
    number: int
    digest: str
    """Digest of the bytes of the snapshot."""
    items: int
    """Number of items on the side of the split that is used."""
    prompts: int
    """Number of different captions of these items."""
    later: tuple[tuple[int, ...], ...] = ()
    """For each part, the indices of later parts that say which of its media still exist; empty if all media do."""
    pictures: tuple[tuple[int, int], ...] = ()
    """Sizes of the references of the caption whose references have the most tokens; empty if no caption has any."""
    typical_pictures: tuple[tuple[int, int], ...] = ()
    """Sizes of the references of the caption with the median number of tokens."""

    def read(self, store_url: str) -> Snapshot:
        """Return the snapshot. Raises :class:`ArtifactError` if it is gone, or has another digest."""
        found = Snapshot.read(store_url, self.dataset, self.number)
        if found is None or found.digest != self.digest:
            state = "has gone" if found is None else "is another one than was planned"
            url = snapshots.url_of(store_url, self.dataset, self.number)
            raise ArtifactError(f"{url} {state}; restore it from a copy")
        return found


class PromptSet(NamedTuple):
    """Prompts of a dataset."""

    prompts: tuple[Prompt, ...] = ()
    shares: tuple[Share, ...] = ()
    """The sets of a mixture, in the order of their prompts; empty if all prompts are one set."""


class Datasets(NamedTuple):
    """The contents of a recipe's datasets."""

    prompts: tuple[Prompt, ...]
    """Prompts of rollouts; for supervised training, the captions of the media."""
    shares: tuple[Share, ...]
    validation_prompts: tuple[Prompt, ...]
    data: Media
    held_out: Media

    @property
    def captions(self) -> tuple[tuple[Prompt, ...], ...]:
        """Return the captions of media that an algorithm with rewards reads, and of the held-out media."""
        return self.data.prompts, self.held_out.prompts


def read_datasets(recipe: Recipe, store_url: str, mistakes: Mistakes) -> Datasets:
    """Return the contents of the recipe's datasets. Add to ``mistakes`` what is unreadable or does not fit."""
    policy, validation = recipe.train.train_policy, recipe.validation
    data = mistakes.reach(_trained_media, recipe, store_url) or Media()
    in_store = isinstance(policy.dataset, SnapshotOptions) and not policy.rewarded
    trained_on = PromptSet(data.prompts) if in_store else mistakes.reach(_prompts, policy.dataset, TRAINED)
    judged_on = mistakes.reach(_prompts, validation and validation.dataset, "validation.dataset") or PromptSet()
    found = Datasets(
        *(trained_on or PromptSet()),
        validation_prompts=judged_on.prompts,
        data=data,
        held_out=mistakes.reach(_media, recipe, held_out_of(recipe), "validation.data", store_url) or Media(),
    )
    wanted, available = recipe.prompts_per_iteration if policy.rewarded else 0, len(found.prompts)
    if trained_on is not None and available < wanted:
        mistakes.append(
            f"{TRAINED}: one iteration needs {counted(wanted, 'prompt')}, the dataset {policy.dataset.name!r} has "
            f"{available}; add prompts, or lower train.train_batch_per_replica"
        )
    all_needed = most(found.shares, wanted) if found.shares else []
    for number, (share, needed) in enumerate(zip(found.shares, all_needed, strict=True), 1):
        if needed > share.num_prompts:
            mistakes.append(
                f"{TRAINED}: one iteration needs up to {needed} prompts of set {number} of the mixture, which has "
                f"{share.num_prompts}; lower its weight"
            )
    trained = _ids(found.prompts) | _ids(found.data.prompts)
    if overlap := trained & _ids(found.validation_prompts):
        shown = f"e.g. {min(overlap)}"
        mistakes.append(f"{len(overlap)} validation prompts are also trained on, {shown}")
    if _trains_on_held_out(recipe, found):
        advice = (
            'set side = "train" there and side = "held_out" here, with the same held_out_share'
            if isinstance(held_out_of(recipe), SnapshotOptions)
            else "use another split"
        )
        mistakes.append(f"validation.data has media that are trained on; {advice}")
    return found


def _trains_on_held_out(recipe: Recipe, found: Datasets) -> bool:
    """Return whether trained and held-out media are the same files or, if they are generated, share a prompt."""
    media, held_out = data_of(recipe), held_out_of(recipe)
    if media is None or held_out is None or media.name != held_out.name:
        return False
    if isinstance(media, SnapshotOptions) and isinstance(held_out, SnapshotOptions):
        apart = {media.side, held_out.side} == {"train", "held_out"} and media.held_out_share == held_out.held_out_share
        return media.dataset == held_out.dataset and not apart
    shared = _ids(found.data.prompts or found.prompts) & _ids(found.held_out.prompts)
    return found.held_out.digest == found.data.digest and bool(found.held_out.digest or shared)


def _ids(prompts: tuple[Prompt, ...]) -> set[str]:
    return {prompt.id for prompt in prompts}


def _prompts(dataset: DatasetOptions | None, place: str) -> PromptSet:
    """Return the prompts of a dataset, at least one; an empty set if ``dataset`` is None.

    Raises :class:`ConfigError` naming ``place`` for a dataset without prompts, and for prompts that are too long.
    """
    if dataset is None:
        return PromptSet()
    plugin = plugins.load("datasets", dataset.name)
    if not (hasattr(plugin, "weighted") or hasattr(plugin, "prompts")):
        able = ", ".join(_with("weighted", "prompts"))
        raise ConfigError(f"{place}: the dataset {dataset.name!r} has media and no prompts; with prompts: {able}")
    with plugins.errors_of("datasets", dataset.name):
        if not hasattr(plugin, "weighted"):
            prompts = plugin.prompts(dataset)
            shipped = dataset.name in plugins.own("datasets")
            return PromptSet(_some(prompts if shipped else checked_prompts(prompts), dataset, place))
        sets = plugin.weighted(dataset)
    every = tuple(prompt for _, prompts in sets for prompt in prompts)
    shares = tuple(Share(weight=weight, num_prompts=len(prompts)) for weight, prompts in sets)
    return PromptSet(_some(every, dataset, place), shares)


def _some(prompts: tuple[Prompt, ...], dataset: DatasetOptions, place: str) -> tuple[Prompt, ...]:
    """Return the prompts. Raises :class:`ConfigError` with ``place`` if there are none, or like :func:`_of_length`."""
    if not prompts:
        raise ConfigError(
            f"{place}: the dataset {dataset.name!r} gives no prompts; expected at least one, so name other files of "
            "it, or another dataset"
        )
    return _of_length(prompts, place)


def _of_length(prompts: tuple[Prompt, ...], place: str) -> tuple[Prompt, ...]:
    """Return the prompts. Raises :class:`ConfigError` naming ``place`` if one is too long for every text encoder."""
    if long := [prompt for prompt in prompts if len(prompt.text) > MAX_TEXT]:
        first = f"e.g. {long[0].id} has {len(long[0].text)}, {long[0].text[:SHOWN]!r}..."
        raise ConfigError(
            f"{place}: more than {MAX_TEXT} characters in {counted(len(long), 'prompt')}, {first}; shorten or remove "
            f"{'it' if len(long) == 1 else 'each of them'}"
        )
    return prompts


def _with(*names: str) -> list[str]:
    """Return the datasets whose plugins have at least one of the functions ``names``."""
    every = {name: plugins.load("datasets", name) for name in plugins.known("datasets")}
    return [name for name, plugin in every.items() if any(hasattr(plugin, one) for one in names)]


def data_of(recipe: Recipe) -> DatasetOptions | None:
    """Return the dataset of the media that are trained on, with rewards ``train_policy.data``; None without media."""
    policy = recipe.train.train_policy
    return getattr(policy, "data", None) if policy.rewarded else policy.dataset


def held_out_of(recipe: Recipe) -> DatasetOptions | None:
    """Return the dataset of the held-out media; None without them."""
    return recipe.validation.data if recipe.validation else None


def _trained_media(recipe: Recipe, store_url: str) -> Media:
    """Return the media that are trained on. Files for supervised training come without captions.

    Raises :class:`ConfigError` for media that are needed and missing, or given and not read.
    """
    policy = recipe.train.train_policy
    if not policy.rewarded:
        media = _media(recipe, policy.dataset, TRAINED, store_url)
        # The captions of a folder are the prompts of the run.
        return media if media.snapshot else media._replace(prompts=())
    data, most = data_of(recipe), policy.given_frames[1]
    if data is None and most > 0:
        raise ConfigError(
            f"max_num_conditional_frames = {most} takes the first frames of media: name them in "
            "[train.train_policy.data], or leave it at 0"
        )
    if data is None and costs.needs_of(recipe).data_term is not None:
        raise ConfigError(
            "the loss has a term on media, with weight data_beta: name the media in [train.train_policy.data], or set "
            "data_beta = 0"
        )
    if data is not None and not costs.needs_data(recipe):
        raise ConfigError(
            "nothing reads the media in [train.train_policy.data]: leave them out, or set max_num_conditional_frames, "
            "or the weight of a loss on media if the algorithm has one, above 0"
        )
    return _media(recipe, data, "train.train_policy.data", store_url)


def _media(recipe: Recipe, data: DatasetOptions | None, place: str, store_url: str) -> Media:
    """Return the media of a dataset; empty if ``data`` is None.

    Raises :class:`ConfigError` naming ``place`` if their size is not the size that the policy is trained on.
    """
    if data is None:
        return Media()
    if isinstance(data, SnapshotOptions):
        if data.weights and place != TRAINED:
            raise ConfigError(f"{place}.weights: supervised training alone draws sources by weight; leave it out")
        return _of_snapshot(recipe, data, store_url)
    plugin = _media_plugin(data)
    diffusers = recipe.policy.diffusers
    with plugins.errors_of("datasets", data.name):
        media = plugin.Media(data)
        found, planned = media.shape, Media(_of_length(media.prompts, place), plugin.digest(data))
    if found != (expected := (diffusers.train_frames, *diffusers.inference_size)):
        raise ConfigError(
            f"{place} gives media of {_times(found)} (frames, height, width), policy.diffusers trains "
            f"on {_times(expected)}; make its settings equal"
        )
    return planned


def _of_snapshot(recipe: Recipe, options: SnapshotOptions, store_url: str) -> Media:
    """Return the media of a snapshot. Only its tables are read.

    Raises :class:`ConfigError` if there is no such snapshot, or its items cannot be trained on.
    """
    name, number = options.dataset, options.number
    snapshot = Snapshot.read(store_url, name, number) if number else snapshots.newest(store_url, name)
    if snapshot is None and (newest := snapshots.newest(store_url, name)):
        raise ConfigError(
            f"there is no snapshot {number} of the dataset {name!r} in the store {store.absolute(store_url)}; "
            f"its newest is {newest.number}"
        )
    if snapshot is None:
        known = ", ".join(sorted(snapshots.names(store_url))) or "none"
        raise ConfigError(
            f"there is no dataset {name!r} in the store {store.absolute(store_url)}; prepare it (cosmos-flows "
            f"preprocess), or name one of: {known}"
        )
    # Pandas takes long to import, and nothing else here needs it.
    parts = import_module("stages.formats.parts")
    made, captions = ([Artifact(source) for source in some] for some in (snapshot.parts, snapshot.captions))
    every = parts.Parts(made, captions)
    items = parts.side_of(every.items, split_of(options))
    if not len(items):
        raise ConfigError(f"snapshot {snapshot.number} of {name!r} has no item with side = {options.side!r}")
    if directories.spec(path := costs.base_path(recipe)).references:
        check_references(items, f"snapshot {snapshot.number} of {name!r}", snapshot.sources)
        check_first_frames(recipe, options, items, snapshot)
    check_items(items, windows_of(recipe, options), f"snapshot {snapshot.number} of {name!r}")
    check_weights(items, options.weights, TRAINED, f"snapshot {snapshot.number} of {name!r}")
    prompts = _prompts_in(items, parts.references_in)
    _of_length(prompts, f"snapshot {snapshot.number} of {name!r}")
    counts: dict[str, Any] = {"items": len(items), "prompts": len(prompts)}
    with suppress(ConfigError):  # the check of all prompts names their captions too
        counts |= {"pictures": largest(path, prompts), "typical_pictures": typical(path, prompts)}
    later = tuple(every.later()) if any(every.later()) else ()
    return Media(
        prompts, snapshot=Pinned(dataset=name, number=snapshot.number, digest=snapshot.digest, later=later, **counts)
    )


def _prompts_in(items: Any, references_in: Callable[[Any], tuple[Reference, ...]]) -> tuple[Prompt, ...]:
    """Return the captions of items with their references, sorted by id."""
    rows = items.drop_duplicates("prompt_id").sort_values("prompt_id")
    fields = zip(rows["prompt_id"], rows["caption"], rows["references"], rows["unit"], strict=True)
    return tuple(
        Prompt(
            id=prompt,
            text=text,
            references=tuple(one.model_copy(update={"source": unit}) for one in references_in(references)),
        )
        for prompt, text, references, unit in fields
    )


def weights_of(options: DatasetOptions | None) -> dict[str, float]:
    """Return the shares of a prepared dataset's sources, by name; empty if all items are drawn equally often."""
    return dict(options.weights) if isinstance(options, SnapshotOptions) else {}


def split_of(options: DatasetOptions | None) -> Split | None:
    """Return the side of a prepared dataset that is used; None for all of it, and for other media."""
    if not isinstance(options, SnapshotOptions) or options.side == "all":
        return None
    return Split(side=options.side, held_out_share=options.held_out_share)


def windows_of(recipe: Recipe, options: SnapshotOptions) -> Windows:
    """Return which frames of each medium a recipe trains on."""
    return Windows(recipe.policy.diffusers.train_frames, options.windows_per_item, options.fps)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(str(length) for length in shape)


def _media_plugin(dataset: DatasetOptions) -> MediaPlugin:
    plugin = plugins.load("datasets", dataset.name)
    if not hasattr(plugin, "Media"):
        able = ", ".join(_with("Media"))
        raise ConfigError(f"the dataset {dataset.name!r} has prompts only; with media: {able}")
    return cast("MediaPlugin", plugin)
