"""Imports have a direction: no circle of folders inside a layer, none of files.

The nodes are folders, and files that lie directly in a layer. The edges are imports at any depth, under
``TYPE_CHECKING`` too, and literals that name a module.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.test_rules import (
    LAYERS,
    NAME_MODELS,
    PARTS,
    READS_ENVIRONMENT,
    ROOT,
    UNPICKLES,
    dotted,
    nodes,
    place,
    refuse,
    sources,
)

COMPOSES = (
    "cosmos_rl_core/conformance/models/tiny_pipelines.py",  # files of plugins by name
    "cosmos_rl_core/models/_loading.py",  # libraries that a pipeline's index names
    "cosmos_rl_core/plugins.py",  # plugins by kind and name
    "cosmos_rl_core/tiny/qwen3_vl.py",  # libraries
    "cosmos_rl_core/weights/counting.py",  # what counts, in a process with torch
    "flows/cli/base/lazy.py",  # commands by their modules, which tables name
    "flows/planning/kinds.py",  # kinds of runs by their folders
    "flows/launchers/__init__.py",  # launchers by name
    "stages/execution/warm/fork_server.py",  # what the stages before have imported
    "stages/execution/runner.py",  # stages by name
    "stages/registry.py",  # contracts by their folders
)
"""Files that compose the name of a module at run time. Their look-ups make no edge."""

KIND_SLICES = ("flows/vlm/", "stages/vlm/")
NAMES_A_KIND = (
    "flows/vlm_sft.py",  # the entrypoint of deployments
    "flows/sizes/memory.py",  # the folders of scorers that are VLMs
)
"""Files outside the slice of a kind of run that may name it."""

Graph = Mapping[str, set[str]]

pytestmark = pytest.mark.xdist_group("sources")


@cache
def modules() -> dict[str, Path]:
    """Every module of the layers by its dotted name; a package is its ``__init__.py``."""
    found: dict[str, Path] = {}
    for path in sources(*LAYERS):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def module_of(name: str) -> str | None:
    """The module that a dotted name is or lies in; None for names from elsewhere and for whole layers."""
    while name not in modules():
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name if "." in name else None


def names_in(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, and literals that may name a module."""
    package = path.relative_to(ROOT).parent.parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name.startswith(LAYERS) and all(map(str.isidentifier, name.split("."))):
                yield name


@cache
def files() -> Graph:
    """The modules that each module names."""
    return {
        name: {found for named in names_in(path) if (found := module_of(named)) not in (None, name)}
        for name, path in modules().items()
    }


def node_of(module: str) -> str:
    """The folder of a module; the file, if it lies directly in a layer."""
    path = modules()[module].relative_to(ROOT)
    is_alone = path.parent.name in LAYERS and path.name != "__init__.py"
    return path.as_posix() if is_alone else path.parent.as_posix()


def folders() -> Graph:
    """The folders that each folder of a layer names in the same layer."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module, named in files().items():
        node = node_of(module)
        others = {node_of(other) for other in named if other.split(".")[0] == module.split(".")[0]}
        found[node] |= others - {node}
    return found


def reachable(graph: Graph) -> dict[str, set[str]]:
    """The nodes that each node leads to."""
    found: dict[str, set[str]] = {}
    for start in graph:
        seen, left = set[str](), [start]
        while left:
            new = graph.get(left.pop(), set()) - seen
            seen |= new
            left += new
        found[start] = seen
    return found


def on_circles(graph: Graph) -> set[str]:
    """The edges that lie on a circle."""
    leads_to = reachable(graph)
    return {f"{one} -> {other}" for one in graph for other in graph[one] if one in leads_to.get(other, ())}


def test_neither_folders_nor_files_import_in_a_circle():
    assert sorted(on_circles(folders()) | on_circles(files())) == []


def test_the_rule_finds_circles_of_any_length():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set[str]()}
    assert on_circles(graph) == {"a -> b", "b -> c", "c -> a"}


def test_names_of_modules_are_composed_where_it_is_known():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources(*LAYERS)
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and dotted(node.func).rpartition(".")[2] in ("import_module", "__import__")
        and not (node.args and isinstance(node.args[0], ast.Constant))
    }
    assert found == {*COMPOSES}


def test_shared_code_names_no_kind_of_run():
    """A kind is a slice: its registration is all that shared code knows. Words in comments and docstrings count."""
    word = re.compile("vlm|vision-language", re.IGNORECASE)
    refuse(
        [
            f"{place(path, number)}: {line.strip()!r} names a kind of run; ask its registration or its contract"
            for path in sources("stages", "flows")
            if not str(path.relative_to(ROOT)).startswith((*KIND_SLICES, *NAMES_A_KIND))
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if word.search(line)
        ]
    )


def test_what_a_rule_exempts_exists():
    exempt = (*UNPICKLES, *READS_ENVIRONMENT, *NAME_MODELS, *KIND_SLICES, *NAMES_A_KIND, PARTS)
    assert [path for path in exempt if not (ROOT / path).exists()] == []
