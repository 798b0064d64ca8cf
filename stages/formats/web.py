"""An artifact's shards as webdataset reads them, streamed from the store. Needs the extra ``web``."""

from typing import Any

from webdataset.compat import WebDataset
from webdataset.gopen import gopen_schemes

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from stages.artifacts.slots import current_of


def web_dataset(slot: str, part: str, **options: Any) -> WebDataset:
    """Return the tar shards of one part of the slot's current artifact, in order, as webdataset reads them.

    Parts are ``media`` or ``tensors`` of a rollout and ``latents`` of an encoding. ``options`` are webdataset's own.
    Data is streamed and not checked against the manifest. Raises :class:`ArtifactError` if there are no such shards.
    """
    _, manifest = current_of(slot)
    files = {} if manifest is None else manifest.files
    names = [name for name in files if name.startswith(f"{part}/") and name.endswith(".tar")]
    if manifest is None or not names:
        raise ArtifactError(f"{slot} has no artifact with tar shards {part}/<n>.tar; rollouts and encodings have some")
    # Webdataset cannot open s3 URLs by itself.
    gopen_schemes["s3"] = lambda url, *_, **__: store.stream(url)
    urls = [store.join(manifest.slot, files[name].path) for name in names]
    return WebDataset(urls, **{"shardshuffle": False, **options})
