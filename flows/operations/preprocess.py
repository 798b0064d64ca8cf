"""Bring a dataset up to date with its files: index and caption new items, and write the next snapshot."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.canonical import digest
from cosmos_rl_core.captioners._base import digest_of
from cosmos_rl_core.config.train import CaptionerOptions
from cosmos_rl_core.datasets import _sources
from cosmos_rl_core.errors import ConfigError, advised, counted
from cosmos_rl_core.recipes.dataset import DatasetConfig
from cosmos_rl_core.storage import store
from flows.planning.base import AnyRun
from flows.planning.plan import Settings, plan_of
from flows.planning.run import Run, run_of
from stages import contracts
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.garbage import renew
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import store_of
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import current_manifest, input_of, named_manifest
from stages.artifacts.snapshots import Snapshot
from stages.formats.parts import NO_ITEMS, Parts
from stages.formats.tables import read_table

SHOWN = 20
"""Largest number of items that a message names."""
Launch = Callable[[str, Request], list[Manifest]]
"""Makes an artifact: takes the name to display and a Request, and returns the manifest in a list."""


@dataclass(frozen=True)
class Added:
    """The parts and captions that a preparation added to a dataset."""

    index: Manifest | None
    """Manifest of the new part; None if only captions are new."""
    captions: tuple[Manifest, ...]
    """Manifests of new captions, most often for the new part."""
    left_out: int
    """Number of items that are left out now."""
    replaced: tuple[Input, ...] = ()
    """The parts of the snapshot before that the new part replaces."""

    @cached_property
    def changes(self) -> tuple[Any, Any]:
        """Return the tables of new and of removed items, compared with the snapshot before."""
        if self.index is None:
            return NO_ITEMS, NO_ITEMS
        part = Artifact(input_of(self.index.slot))
        items, removed = (read_table(part, name) for name in (contracts.Index.ITEMS, contracts.Index.REMOVED))
        if not self.replaced:
            return items, removed
        before: Any = Parts([Artifact(one) for one in self.replaced]).items
        return items[~items["item"].isin(before["item"])], before[~before["item"].isin(items["item"])]


def unchanged(config: DatasetConfig, store_url: str) -> Snapshot | None:
    """Return the newest snapshot if the dataset's files have not changed since; None otherwise. Read no file."""
    config = _pinned(config)
    newest = snapshots.newest(store_url, config.name)
    same = newest is not None and _made_from(newest) == (_settings(config), _captioner(config), _stamps(config))
    return newest if same else None


def preprocess(
    config: DatasetConfig, store_url: str, launch: Launch, *, verify: bool = False, merge: bool = False
) -> tuple[Snapshot, Added | None]:
    """Index and caption what has changed since the newest snapshot. Return the newest snapshot and the additions.

    The additions are None if nothing has changed. Of two processes at once, one writes the snapshot, and the other
    finds nothing new. Under other settings all files are read again; under another captioner all parts are captioned
    again. With ``verify`` all files are read, and a part is added even if none differs: so a killed verification can
    continue, and the next verification reads them again. With ``merge`` all files are read into one part.
    """
    config = _pinned(config)
    if config.caption is not None:
        plugins.load("captioners", config.caption.by).Captioner(config.caption).check()
    settings, captioner = _settings(config), _captioner(config)
    while True:
        newest, stamps = snapshots.newest(store_url, config.name), _stamps(config)
        several = merge and newest is not None and len(newest.parts) > 1
        if not (verify or several) and newest is not None and _made_from(newest) == (settings, captioner, stamps):
            return newest, None
        of_same = newest if newest is not None and newest.settings == settings and not several else None
        parts = of_same.parts if of_same else ()
        known = newest.captions if newest is not None and newest.captioner == captioner else ()
        index: Manifest | None = None
        if verify or of_same is None or of_same.stamps != stamps:
            request = _index(config, store_url, stamps, parts, verify=verify)
            # No snapshot names the part yet. An old part must not be deleted as garbage before one does.
            renew(request.slot)
            (index,) = launch("index", request)
            parts = (*parts, input_of(request.slot))
        captions, made = _captions(config, store_url, parts, known if of_same else (), known, launch)
        ours = Snapshot(
            dataset=config.name,
            number=newest.number + 1 if newest else 1,
            sources={name: options.model_dump(mode="json") for name, options in config.sources.items()},
            stamps=stamps,
            settings=settings,
            parts=parts,
            captioner=captioner,
            captions=captions,
            previous=newest.digest if newest else None,
        )
        if snapshots.put(store_url, ours):
            last = [named_manifest(one) for one in (*parts[-1:], *captions[-1:])]
            left_out = sum(cast("int", one.summary["left_out"]) for one in last)
            return ours, Added(index, made, left_out, newest.parts if newest and not of_same else ())


def _of_diffusion(recipe: str, run: AnyRun) -> Run:
    """Return the run of a diffusion model. Raises :class:`ConfigError` for a run of another kind."""
    if not isinstance(run, Run):
        raise ConfigError(
            f"{recipe} trains with {run.recipe.train.train_policy.type}, which reads neither text embeddings nor "
            "latents; leave it out of the recipes of the dataset"
        )
    return run


def missing(config: DatasetConfig, store_url: str) -> list[tuple[str, Request]]:
    """Return the Requests for text embeddings and latents that the dataset's recipes need and that are not current.

    Each comes with the name of its step. Raises :class:`ConfigError` with the mistakes of a recipe.
    """
    runs = [_of_diffusion(recipe, run_of(plan_of(Settings(recipe, store_url)), store_url)) for recipe in config.recipes]
    named = {request.slot: (name, request) for run in runs[::-1] for name, request in run.prepared.steps().items()}
    return [one for one in named.values() if current_manifest(one[1]) is None]


def outcome_of(snapshot: Snapshot, added: Added | None) -> str:
    """Return in words what a preparation added: a line, then one for each item that is left out or differs."""
    words = f"{snapshot.dataset}: snapshot {snapshot.number}"
    if added is None:
        return f"{words}, nothing new"
    found = ", ".join(f"{count} {word}" for word, count in counts(added).items())
    found = f"{words}: {found}".replace("left_out", "left out")
    told = left_out(added)[:SHOWN]
    found += "".join(f"\n  left out: {name}: {reason}" for name, reason in told)
    if added.index is not None and (more := added.left_out - len(told)):
        show = advised("data show", snapshot.dataset, store=store_of(added.index.slot))
        found += f"\n  {more} more left out; `{show}` says which and why"
    if names := differing(added):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        changed = f"{counted(len(names), 'item')} changed in files that look unchanged"
        found += f"\n{changed}: {', '.join(names[:SHOWN])}{more}"
    return found


def as_json(store_url: str, dataset: str, before: int) -> dict[str, Any]:
    """Return for scripts the changes of a dataset since snapshot number ``before``; 0 for all of it.

    Keys: ``dataset``, ``snapshot`` (number of the newest), ``url`` and ``digest`` of its file, ``items`` in it, ``new``
    and ``removed`` items since, ``captioned`` (items with a caption by a captioner), and ``left_out``: ``unit`` and
    ``reason`` of each file without an item.
    """
    newest, old = snapshots.newest(store_url, dataset), Snapshot.read(store_url, dataset, before, removed=True)
    assert newest is not None, "it was prepared"
    now, then = _parts_of(newest), None if old is None else _parts_of(old)
    items, earlier = set(now.items["item"]), set() if then is None else set(then.items["item"])
    return {
        "dataset": dataset,
        "snapshot": newest.number,
        "url": snapshots.url_of(store_url, dataset, newest.number),
        "digest": newest.digest,
        "items": len(items),
        "new": len(items - earlier),
        "removed": len(earlier - items),
        "captioned": int(now.items["captioner"].notna().sum()),
        "left_out": now.left_out[["unit", "reason"]].to_dict("records"),
    }


def _parts_of(snapshot: Snapshot) -> Parts:
    return Parts([Artifact(one) for one in snapshot.parts], [Artifact(one) for one in snapshot.captions])


def left_out(added: Added) -> list[tuple[str, str]]:
    """Return name and reason of each item of the newest part that is left out."""
    if added.index is None or contracts.Index.LEFT_OUT not in added.index.files:
        return []
    table = read_table(Artifact(input_of(added.index.slot)), contracts.Index.LEFT_OUT)
    return [(str(unit), str(reason)) for unit, reason in zip(table["unit"], table["reason"], strict=True)]


def differing(added: Added) -> list[str]:
    """Return the names of items whose files changed under equal stamps, as a verification found."""
    if added.index is None or contracts.Index.DIFFERING not in added.index.files:
        return []
    table = read_table(Artifact(input_of(added.index.slot)), contracts.Index.DIFFERING)
    return [str(name) for name in table["unit"]]


def counts(added: Added) -> dict[str, int]:
    """Return numbers of items: new, removed, left out in all and, if there are new captions, captioned."""
    new, removed = map(len, added.changes)
    captioned = sum(cast("int", one.summary["captioned"]) for one in added.captions)
    return {"new": new, "removed": removed, "left_out": added.left_out} | (
        {"captioned": captioned} if added.captions else {}
    )


def table_row(added: Added) -> dict[str, float]:
    """Return what was added, for a table: items, bytes and seconds."""
    row: dict[str, float] = {**counts(added)}
    row["damaged"] = row.pop("left_out")
    items, removed = added.changes
    changed = int(items["name"].isin(removed["name"]).sum())
    row |= {"changed": changed, "bytes": int(items["size_bytes"].sum()), "seconds": seconds(added)}
    row["new"], row["removed"] = row["new"] - changed, row["removed"] - changed
    return row


def seconds(added: Added) -> float:
    """Return the seconds that the stages took together."""
    made = [*([added.index] if added.index else []), *added.captions]
    return round(sum(cast("float", one.summary["seconds"]) for one in made), 3)


def _made_from(newest: Snapshot) -> tuple[str, str | None, str]:
    return newest.settings, newest.captioner, newest.stamps


def _stamps(config: DatasetConfig) -> str:
    sources = {name: _sources.source_of(options) for name, options in config.sources.items()}
    return _sources.digest(_sources.stamps(sources))


def _settings(config: DatasetConfig) -> str:
    """Return the digest of all settings and code that decide an index, in addition to the files."""
    pins = outside_plugins.named_by(config, outside_plugins.pins(""))
    code = {"version": contracts.Index.version, "plugins": [pin.identity() for pin in pins]}
    return digest(config.identity() | {"captioned": _captioned(config)} | code)


def _pinned(config: DatasetConfig) -> DatasetConfig:
    """Return the settings with the digests of all files that decide captions."""
    if config.caption is None:
        return config
    return config.model_copy(update={"caption": config.caption.pinned()})


def _captioner(config: DatasetConfig) -> str | None:
    """Return the digest of the captioner, its settings and its stage's version; None without one."""
    if config.caption is None:
        return None
    return digest([_stage_of(config.caption).version, digest_of(config.caption, outside_plugins.pins(""))])


def _stage_of(captioner: CaptionerOptions) -> type[contracts.Caption]:
    """Return the stage that runs a captioner."""
    return contracts.Describe if captioner.torch else contracts.Caption


def stages_of(config: DatasetConfig) -> list[str]:
    """Return the stages that may need devices: the captioner's, and ``embed`` and ``encode`` if recipes are named."""
    captions = [] if config.caption is None else [_stage_of(config.caption).name]
    return [*captions, *(["embed", "encode"] if config.recipes else [])]


def _captioned(config: DatasetConfig) -> bool:
    """Return whether the index leaves out items without a caption."""
    return config.captioned and config.caption is None


def _index(config: DatasetConfig, store_url: str, stamps: str, parts: tuple[Input, ...], *, verify: bool) -> Request:
    settings = contracts.Index(
        sources=config.sources,
        stamps=stamps,
        verify=verify,
        captioned=_captioned(config),
        min_size=config.min_size,
        min_frames=config.min_frames,
        max_frames=config.max_frames,
        max_seconds=config.max_seconds,
        duplicates=config.duplicates,
        max_left_out=config.max_left_out,
    )
    return _request(store_url, "index", settings, {"parts": parts})


def _captions(
    config: DatasetConfig,
    store_url: str,
    parts: tuple[Input, ...],
    captions: tuple[Input, ...],
    known: tuple[Input, ...],
    launch: Launch,
) -> tuple[tuple[Input, ...], tuple[Manifest, ...]]:
    """Caption the parts without an entry in ``captions``. Return all captions, and the manifests of the new ones.

    A medium with a caption in ``known`` keeps it. Without a captioner, both results are empty.
    """
    made: list[Manifest] = []
    if config.caption is None:
        return (), ()
    stage = _stage_of(config.caption)
    for part in range(len(captions), len(parts)):
        settings = stage(captioner=config.caption, part=part, sources=config.sources, max_left_out=config.max_left_out)
        request = _request(store_url, stage.name, settings, {"parts": parts, "captions": captions or known})
        renew(request.slot)
        made += launch(stage.name, request)
        captions = (*captions, input_of(request.slot))
    return captions, tuple(made)


def _request(
    store_url: str, stage: str, settings: contracts.StageConfig, inputs: dict[str, tuple[Input, ...]]
) -> Request:
    pins = outside_plugins.pins("")
    request = Request(stage=stage, slot="?", seed=0, config=settings, inputs=inputs, plugins=pins)
    slot = store.join(store.absolute(store_url), "dataset", request.fingerprint)
    return request.model_copy(update={"slot": slot})
