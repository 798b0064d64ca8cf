"""Bring a dataset up to date with its files: index what is new, and write the next snapshot."""

from collections.abc import Callable

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.dataset import DatasetConfig
from cosmos_rl_core.datasets import _sources
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts import snapshots
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.artifacts.snapshots import Snapshot


def unchanged(config: DatasetConfig, store_url: str) -> Snapshot | None:
    """Return the newest snapshot if the dataset's files are as they were; None otherwise. Reads none of them."""
    head = snapshots.newest(store_url, config.name)
    same = head is not None and (head.settings, head.stamps) == (_settings(config), _stamps(config))
    return head if same else None


def preprocess(
    config: DatasetConfig, store_url: str, launch: Callable[[str, Request], list[Manifest]]
) -> tuple[Snapshot, Manifest | None]:
    """Index what has changed since the newest snapshot, and return the newest one and the part that was added.

    The part is None if nothing has changed. Two processes at once write one snapshot: the loser finds that nothing is
    new. Under other settings all files are read again. ``launch(name, request)`` makes a stage.
    """
    settings = _settings(config)
    while True:
        head, stamps = snapshots.newest(store_url, config.name), _stamps(config)
        if head is not None and (head.settings, head.stamps) == (settings, stamps):
            return head, None
        parts = head.parts if head is not None and head.settings == settings else ()
        request = _index(config, store_url, stamps, parts)
        (manifest,) = launch("index", request)
        ours = Snapshot(
            dataset=config.name,
            number=head.number + 1 if head else 1,
            stamps=stamps,
            settings=settings,
            parts=(*parts, input_of(request.slot)),
            previous=head.digest if head else None,
        )
        if snapshots.put(store_url, ours):
            return ours, manifest


def described(snapshot: Snapshot, added: Manifest | None) -> str:
    """Return what has become of a dataset, as one line."""
    words = f"{snapshot.dataset}: snapshot {snapshot.number}"
    if added is None:
        return f"{words}, nothing new"
    counts = {"new": "items", "removed": "removed", "left out": "left_out"}
    return f"{words}: {', '.join(f'{added.summary[name]} {word}' for word, name in counts.items())}"


def _stamps(config: DatasetConfig) -> str:
    sources = {name: _sources.source_of(options) for name, options in config.sources.items()}
    return _sources.digest(_sources.stamps(sources))


def _settings(config: DatasetConfig) -> str:
    """Return the digest of what decides an index besides the files."""
    pins = outside_plugins.named_by(config, outside_plugins.pins(""))
    code = {"version": contracts.Index.version, "plugins": [pin.identity() for pin in pins]}
    return digest(config.identity() | code)


def _index(config: DatasetConfig, store_url: str, stamps: str, parts: tuple[Input, ...]) -> Request:
    settings = contracts.Index(
        sources=config.sources,
        stamps=stamps,
        captioned=config.captioned,
        min_size=config.min_size,
        min_frames=config.min_frames,
        max_left_out=config.max_left_out,
    )
    pins = outside_plugins.pins("")
    request = Request(stage="index", slot="?", seed=0, config=settings, inputs={"parts": parts}, plugins=pins)
    slot = store.join(store.absolute(store_url), "dataset", request.fingerprint)
    return request.model_copy(update={"slot": slot})
