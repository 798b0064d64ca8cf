"""Files that ship inside the package: recipes, datasets, cluster profiles, pipelines, deployments and the lock.

``configs`` and ``deployments`` are links to the folders of the repository; a wheel holds their files.
"""

import difflib
from pathlib import Path
from typing import Literal, get_args

from cosmos_rl_core.errors import ConfigError

PREFIX = "package:"
"""Beginning of a path that names a shipped file: ``package:tiny/nft``."""
EXAMPLE = "configs/tiny/nft.toml or package:tiny/nft"
"""Paths of one recipe, for messages."""
Kind = Literal["recipe", "dataset", "cluster profile", "pipeline", "deployments"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_HERE = Path(__file__).parent


def files(kind: Kind) -> dict[str, Path]:
    """Return the shipped files of one kind by name, sorted. A pipeline is a folder."""
    if kind == "pipeline":
        pipelines = sorted(_HERE.parent.glob("tiny/pipelines/*/model_index.json"))
        return {f"tiny-{index.parent.name}": index.parent for index in pipelines}
    if kind == "deployments":
        return {name: _HERE / "deployments" / name for name in ("prefect.yaml", "requirements.lock")}
    folder = _HERE / ("deployments/clusters" if kind == "cluster profile" else "configs")
    paths = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.toml"))}
    if kind == "cluster profile":
        return paths
    return {name: path for name, path in paths.items() if name.startswith("data/") == (kind == "dataset")}


def listed(name: str | None = None) -> list[dict[str, str]]:
    """Return ``kind``, ``name`` and ``path`` of every shipped file, or of the one with that name.

    Raises :class:`ConfigError` with the known names if there is none.
    """
    rows: list[dict[str, str]] = []
    for kind in KINDS:
        for named, path in files(kind).items():
            rows.append({"kind": kind, "name": named, "path": str(path.resolve())})
    found = [row for row in rows if name in (None, row["name"])]
    if not found:
        known = [row["name"] for row in rows]
        close = difflib.get_close_matches(name or "", known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"nothing named {name!r} ships with this project; {hint}known: {', '.join(known)}")
    return found


def path_of(path: str, kind: Kind) -> Path:
    """Return the shipped file of a path that begins with ``package:``, otherwise the path itself.

    Raises :class:`ConfigError`, which lists the known names, if no shipped file has this kind and name. Also raises it
    if a path without ``package:`` does not exist but is the name of a shipped file.
    """
    if not path.startswith(PREFIX):
        if path in files(kind) and not Path(path).exists():
            raise ConfigError(f"no file at {path}; did you mean {PREFIX}{path}?")
        return Path(path)
    name, known = path.removeprefix(PREFIX), files(kind)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {PREFIX}{close[0]}? " if close else ""
        hint += f"known: {', '.join(known) or 'none'}"
        raise ConfigError(f"no {kind} {name!r} ships with this project; {hint}")
    return known[name].resolve()
