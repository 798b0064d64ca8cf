"""Places of tar shards: URLs with braces, folders, and the indexes of upstream's layout."""

import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.http_client import without_secrets
from cosmos_rl_core.storage import http, store

MAX_URLS = 100_000
"""Most URLs that braces may stand for."""
METAS, VIDEO = "metas", "video"
"""Folders of upstream's layout that are read: captions and media."""

_SHARD = re.compile(r"\.(tar|tgz|tar\.(gz|bz2|xz|zst))$")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SCHEME = re.compile(r"^(?:([a-z][a-z0-9+.-]*)://|(pipe):)", re.IGNORECASE)
_READ = ("s3", "http", "https")

Places = dict[str, dict[str, str | None]]
"""By unit, the URLs of its tars, each with its stamp, or None if it was not listed. A unit is one tar, or one of each
folder of upstream's layout."""


def is_http(url: str) -> bool:
    """Return whether a URL is read from a web server, not from a store."""
    return url.startswith(("http://", "https://"))


def shown(url: str) -> str:
    """Return a URL for messages and tables, without the parts of http(s) URLs that may be secret."""
    return without_secrets(url) if is_http(url) else url


def _path(url: str) -> str:
    return url.partition("?")[0] if is_http(url) else url


def is_shard(url: str) -> bool:
    """Return whether a URL names a tar."""
    return _SHARD.search(_path(url)) is not None


def is_index(url: str) -> bool:
    """Return whether a URL names an index of upstream's layout."""
    return _path(url).endswith(".json")


def mistakes(urls: Iterable[str]) -> Iterator[str]:
    """Yield a message for each URL that cannot be read, judged without any request."""
    for url in urls:
        found = _SCHEME.match(url)
        scheme = next(filter(None, found.groups())).lower() if found else None
        if scheme is not None and scheme not in _READ:
            yield f"{url}: {scheme} is not read; known: a path, {', '.join(f'{name}://' for name in _READ)}"
        elif is_http(url) and (fault := http.fault(url)) is not None:
            yield f"{url.rpartition('@')[2]}: {fault}"
        elif is_http(url) and not is_shard(url) and not is_index(url):
            yield f"{shown(url)}: no folder can be listed over http; name its tars: {{000..012}}.tar"
        elif not url or url.endswith((".pkl", ".pickle")):
            yield f"{url!r} is no place of shards; expected a .tar, a folder of them, or an index in .json"
        try:
            expanded(url)
        except ConfigError as error:
            yield str(error)


def expanded(url: str) -> list[str]:
    """Return the URLs that braces name: ``{000..012}``, ``{a,b}``. Raises :class:`ConfigError` for other braces."""
    done, left = list[str](), [url]
    while left:
        first = left.pop()
        if (braces := _BRACES.search(first)) is None:
            done.append(first)
            continue
        choices = _choices(url, braces[1])
        if len(done) + len(left) + len(choices) > MAX_URLS:
            raise ConfigError(f"{url}: names more than {MAX_URLS} URLs")
        left += (first[: braces.start()] + choice + first[braces.end() :] for choice in reversed(choices))
    if wrong := [one for one in done if "{" in one or "}" in one]:
        raise ConfigError(f"{url}: a brace without its other half, in {wrong[0]}")
    return done


def _choices(url: str, inside: str) -> list[str]:
    """Return the texts that replace a pair of braces."""
    if (numbers := _RANGE.fullmatch(inside)) is None:
        if "," not in inside:
            raise ConfigError(f"{url}: {{{inside}}} is no range; expected {{000..012}} or {{a,b}}")
        return inside.split(",")
    first, last = numbers.groups()
    if len(first) > 18 or len(last) > 18 or not 0 <= int(last) - int(first) < MAX_URLS:
        raise ConfigError(f"{url}: {{{inside}}} is no range of at most {MAX_URLS} numbers from low to high")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def places(urls: Iterable[str]) -> Places:
    """Return the tars of each unit, by the unit's name, which is the tar's name in its folder.

    Lists folders and reads indexes. Raises :class:`ConfigError` if two units have the same name, or a folder is empty.
    """
    found: Places = {}
    wrong: list[str] = []
    for url in (one for several in urls for one in expanded(several)):
        for unit, tars in _places(url).items():
            if [*found.setdefault(unit, tars)] != [*tars]:
                both = " and ".join(shown(next(iter(each))) for each in (found[unit], tars))
                wrong.append(f"{unit} is the name of two shards: {both}; make each folder a source of its own")
    if wrong:
        raise mistakes_in("shards", wrong)
    return found


def _places(url: str) -> Places:
    if is_index(url):
        return _of_index(url)
    if is_shard(url):
        return {_path(url).rpartition("/")[2]: {url: None}}
    try:
        listed = store.stamps(url)
        found: Places = {name: {store.join(url, name): stamp} for name, stamp in listed.items() if is_shard(name)}
    except FileNotFoundError:
        found = {}
    if not found:
        # An unmounted disk looks like an empty folder, and must not count as the end of all items.
        raise ConfigError(f"no shard at {url}; expected a folder with .tar files in it")
    return found


def _of_index(url: str) -> Places:
    """Return the shards that an index of upstream's layout lists: a tar of captions and one of media each."""
    about = _read_index(url)
    names, root = about.get("data_list"), about.get("root", "")
    wrong = []
    if not isinstance(root, str) or "\\" in root:
        wrong.append("root is no text")
    if not isinstance(names, list) or not names:
        wrong.append("data_list is no list with names of tars in it")
        names = []
    for name in names:
        parts = name.split("/") if isinstance(name, str) else []
        if not parts or not is_shard(name) or {"", ".", ".."} & {*parts} or not name.isprintable():
            wrong.append(f"data_list has {str(name)[:200]!r}, which is no name of a tar below root")
    if len({*map(str, names)}) < len(names):
        wrong.append("data_list has a name twice")
    if wrong:
        raise mistakes_in(shown(url), wrong)
    here = url.rpartition("/")[0] or "."
    base = root if _SCHEME.match(root) or root.startswith("/") else store.join(here, root).rstrip("/")
    if (refused := next(mistakes([f"{base}/0.tar"]), None)) is not None:
        raise ConfigError(f"{shown(url)}: root: {refused}")
    return {name: {store.join(base, folder, name): None for folder in (METAS, VIDEO)} for name in names}


def _read_index(url: str) -> dict[str, Any]:
    try:
        file = io.BytesIO()
        http.copy(url, file) if is_http(url) else file.write(store.read(url))
        value = json.loads(file.getvalue())
        canonical_json(value)
    except FileNotFoundError as error:
        raise ConfigError(f"no index at {shown(url)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown(url)}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{shown(url)}: expected an object with root and data_list")
    return value
