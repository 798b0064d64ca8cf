"""Facts of a node on which stages may run: ``python -m flows.launchers.ray._findings``, in the environment of a stage.

It reads a question from standard input, and writes the answer to standard output.
"""

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import CosmosRLError
from cosmos_rl_core.numerics import versions
from cosmos_rl_core.pipelines import directories, weight_files
from cosmos_rl_core.processes import die_with_parent
from cosmos_rl_core.storage import store

EQUAL = ("cosmos-rl-flows", "ray", "torch", "diffusers", "transformers")
"""Packages whose versions are compared."""
WRITTEN = ".probe/bridge"
"""Object that the bridge wrote into the store."""


class Question(Section):
    """Store and files that a stage needs."""

    run_url: str
    written: str
    """Text of :data:`WRITTEN`."""
    paths: tuple[str, ...]
    """Files and folders that a Request names."""


class Findings(Section):
    """Answer to a :class:`Question`: versions, and what is wrong on the node."""

    versions: dict[str, str]
    wrong: tuple[str, ...]
    """Messages about paths and the store."""
    unavailable: tuple[str, ...] = ()
    """Messages about a store that may answer later."""


def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages :data:`EQUAL` on this machine."""
    return {"Python": platform.python_version()} | versions(EQUAL)


def find(question: Question) -> Findings:
    """Return the facts of this machine. The store is read and written."""
    wrong, unavailable = list(_damages(question.paths)), list[str]()
    try:
        found = store.read_if_exists(store.join(question.run_url, WRITTEN))
        if found is None or found.decode(errors="replace") != question.written:
            wrong.append(f"{question.run_url} is another folder there than where the flow runs")
        else:
            # It writes and removes an object.
            store.decides_races(question.run_url)
    except CosmosRLError as error:
        (unavailable if error.retryable else wrong).append(str(error))
    return Findings(versions=installed(), wrong=tuple(wrong), unavailable=tuple(unavailable))


def _damages(paths: tuple[str, ...]) -> Iterator[str]:
    for path in paths:
        if not Path(path).exists():
            yield f"{path} is missing"
        elif Path(path, directories.INDEX).is_file():
            yield from weight_files.damages(path)


if __name__ == "__main__":
    die_with_parent()
    sys.stdout.write(find(Question.model_validate_json(sys.stdin.read())).model_dump_json())
