"""Models that were distilled to few steps, as far as their names and settings tell."""

import re
from pathlib import Path

from cosmos_rl_core.pipelines import directories

_WORDS = re.compile(
    r"(?<![a-z])(turbo|schnell|lightning|sprint|lcm|hyper|distill(?:ed)?|(?<!\d)[1248]-?steps?)(?![a-z])"
)
_SNAPSHOT = re.compile(r"models--[^/]+--([^/]+)/snapshots/[^/]+$")
"""End of the path of a model in the cache of the hub."""


def sign_of(name: str, path: str | Path) -> str:
    """Return the sign that a model is distilled to few steps: a word of its ``name``, or a setting; "" without a sign.

    ``path`` is its pipeline directory, whose index is read. Not every distilled model has a sign.
    """
    index = directories.read_json(path, directories.INDEX)
    on = [setting for setting in directories.spec(path).unguided_settings if index.get(setting)]
    cached = _SNAPSHOT.search(name.rstrip("/"))
    found = _WORDS.search((cached[1] if cached else name.rstrip("/").rpartition("/")[2]).lower())
    return f"{on[0]} = true" if on else f"the name has {found[1]!r}" if found else ""
