"""The datasets of conversations in cosmos-rl's files for vision-language models."""

from functools import cache
from pathlib import Path

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.kinds import POLICY
from cosmos_rl_core.importers.cosmos_rl.rows import Upstream

NAME = "custom"
"""Name of the one dataset of an imported recipe."""
PLACES = {"llava": "annotation_path", "hf_chat": "path"}
"""The setting of each format that says where its texts are."""


def format_of(upstream: Upstream) -> str | None:
    """Return the format of the file's dataset; None if it is on a hub."""
    if upstream["custom.dataset.annotation_path"]:
        return "llava"
    return "hf_chat" if upstream["custom.dataset.path"] or _saved(upstream) else None


def num_conversations(upstream: Upstream) -> int | None:
    """Return the number of conversations of the training set; None if the set is not found or not readable."""
    name = format_of(upstream)
    if name is None:
        return None
    place = Path(str(upstream[f"custom.dataset.{PLACES[name]}"] or _saved(upstream)))
    if not place.exists():
        return None
    # The scripts with datasets of their own read no split.
    split = "" if upstream.says("custom.dataset") else upstream[f"{POLICY}.dataset.split"]
    first = (split[0] if split else "") if isinstance(split, list) else split or ""
    return _count(name, str(place), first, place.stat().st_mtime_ns)


@cache
def _count(name: str, place: str, split: str, changed_ns: int) -> int | None:
    """Count the rows of a file or folder, last changed at ``changed_ns``. Several settings depend on the number."""
    plugin = plugins.load("chat_datasets", name)
    more = {"split": split} if split else {}
    try:
        return sum(1 for _ in plugin.rows(plugin.Options(**{PLACES[name]: place}, **more))) or None
    except ConfigError:
        return None


def _saved(upstream: Upstream) -> str | None:
    """Return the folder of a dataset that ``save_to_disk`` wrote, if the file names one."""
    name = str(upstream[f"{POLICY}.dataset.name"] or "")
    return name if name and Path(name).is_dir() else None
