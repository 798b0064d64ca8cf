"""`tests/` mirrors the folders of the tree: the tests of a file are found without a search.

`tests/core` mirrors `cosmos_rl_core`, `tests/stages` `stages` and `tests/flows` `flows`, where names begin without
underscores. Files of layers have tests of their names; every other file that tests import has tests of its name, or
tests that import it, in the mirror of its folder. Folders and files whose functions and classes have no bodies need no
tests: entrypoints and lists of names.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_rules import LAYERS, ROOT, imports, nodes, place, refuse, sources

pytestmark = pytest.mark.xdist_group("sources")

MIRRORS = {layer: f"tests/{layer.removeprefix('cosmos_rl_')}" for layer in LAYERS}
TESTS_THEMSELVES = ("cosmos_rl_core/conformance",)
"""Folders of code that are tests, which users run; tests/test_every_plugin_conforms.py runs them."""
DATA = ("tests/core/upstream_recipes", "tests/core/upstream_vlm_recipes", "tests/core/vlms/golden")
"""Folders of tests that mirror none: recipes of cosmos-rl, numbers of transformers."""


ON_A_SERVER = {
    "flows/infra.py": "tests/e2e/deployments/test_deployments.py",
    "flows/operations/automations.py": "tests/e2e/servers/test_automations.py",
    "flows/operations/pools.py": "tests/e2e/deployments/test_deployments.py",
    "flows/running/events.py": "tests/e2e/servers/test_events.py",
    "flows/running/launch.py": "tests/e2e/servers/test_tried_again.py",
    "flows/running/pauses.py": "tests/e2e/servers/test_dead_flow_runs.py",
}
"""Files that do nothing without a Prefect server, which tests of whole runs share, and such tests."""
WITH_OTHERS = {
    "cosmos_rl_core/captioners/text.py": "tests/stages/test_caption.py",
    "cosmos_rl_core/config/clusters.py": "tests/flows/ledger/test_ledger.py",
    "cosmos_rl_core/estimates/sample_size.py": "tests/flows/auditing/checks/test_audit_drift.py",
    "cosmos_rl_core/rewards/pixel_similarity.py": "tests/flows/cli/rewards/test_score_command.py",
    "cosmos_rl_core/shipped/__init__.py": "tests/test_wheel.py",
    "cosmos_rl_core/storage/shards.py": "tests/stages/formats/test_members.py",
    "cosmos_rl_core/tiny/autoencoders.py": "tests/core/reward_service/test_decoder.py",
    "stages/reporting/samples.py": "tests/flows/comparing/test_comparison.py",
}
"""Files that are tested together with others which use them, and such tests."""
ELSEWHERE = ON_A_SERVER | WITH_OTHERS


def mirror_of(folder: Path) -> Path:
    """Return the folder of tests of a folder of code."""
    layer, *parts = folder.relative_to(ROOT).parts
    return ROOT.joinpath(MIRRORS[layer], *(part.lstrip("_") for part in parts))


def has_bodies(path: Path) -> bool:
    """Return whether a function or a class of a file has more than a docstring."""
    defined = (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return any(len(node.body) > 1 or ast.get_docstring(node) is None for node in defined)


def has_functions(path: Path) -> bool:
    """Return whether a function of a file has more than a docstring. Fields alone are tested where they are read."""
    defined = (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(len(node.body) > 1 or ast.get_docstring(node) is None for node in defined)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, and the modules that the names of packages come from."""
    found = {name for _, name in imports(path)}
    for name in list(found):
        package, _, one = name.rpartition(".")
        given = ROOT.joinpath(*package.split("."), "__init__.py")
        if name.startswith(LAYERS) and given.is_file():
            found |= {there for _, there in imports(given) if there.rpartition(".")[2] == one}
    return frozenset(found | {name.rpartition(".")[0] for name in found})


@cache
def importers() -> dict[str, list[Path]]:
    """Return the test files that import each dotted name."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in imported(path):
            found.setdefault(name, []).append(path)
    return found


def is_in(folder: Path, *names: str) -> bool:
    return any(folder.is_relative_to(ROOT / name) for name in names)


def core_of_the_readme() -> list[Path]:
    """Return the files of the layers that README tells to read."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("The core in 12 files")[2]
    found = re.findall(r"^\| \[`([\w/]+\.py)`\]", text, re.MULTILINE)
    assert len(found) == 12
    return [ROOT / name for name in found if name.startswith(LAYERS)]


def own_tests_of(path: Path) -> list[Path]:
    """Return the test files that a file may have. Its folder's name is in front if other tests have the file's name."""
    folder, name = mirror_of(path.parent), path.stem.lstrip("_")
    return [folder / f"test_{name}.py", folder / f"test_{folder.name}_{name}.py"]


def found_in_the_mirror(path: Path) -> list[Path]:
    """Return the test files of a file's name or its folder's, and the test files in its mirror that import it."""
    folder = mirror_of(path.parent)
    whole = folder.with_name(f"test_{folder.name}.py")
    found = [one for one in (*own_tests_of(path), whole) if one.is_file()]
    return found + [one for one in importers().get(module_name(path), []) if one.is_relative_to(folder)]


def test_every_folder_of_code_has_tests_in_its_mirror():
    """A folder of tests; for one with few of them a test file of its name, next to which the folder would be."""
    found = {path.parent for path in sources(*LAYERS) if path.name != "__init__.py" and has_bodies(path)}
    refuse(
        [
            f"{folder.relative_to(ROOT)}:1: no tests in {mirror_of(folder).relative_to(ROOT)}"
            for folder in sorted(found)
            if not is_in(folder, *TESTS_THEMSELVES)
            if not any(mirror_of(folder).glob("test_*.py"))
            if not mirror_of(folder).with_name(f"test_{mirror_of(folder).name}.py").is_file()
        ]
    )


def test_files_of_layers_and_the_core_have_test_files_of_their_names():
    direct = [path for layer in LAYERS for path in sorted((ROOT / layer).glob("[!_]*.py"))]
    refuse(
        [
            f"{path.relative_to(ROOT)}:1: no {own_tests_of(path)[0].relative_to(ROOT)}"
            for path in dict.fromkeys((*direct, *core_of_the_readme()))
            if str(path.relative_to(ROOT)) not in ELSEWHERE
            if has_bodies(path) and not any(one.is_file() for one in own_tests_of(path))
        ]
    )


def test_files_that_tests_import_have_tests_in_their_mirrors():
    """Tests of their names, or tests that import them, in the mirror of their folder or below it."""
    refuse(
        [
            f"{place(path, 1)}: no tests of its name in {mirror_of(path.parent).relative_to(ROOT)}, nor any there that "
            f"imports it like {', '.join(str(one.relative_to(ROOT)) for one in importers()[module_name(path)])}"
            for path in sources(*LAYERS)
            if module_name(path) in importers() and has_functions(path)
            if not is_in(path, *TESTS_THEMSELVES) and str(path.relative_to(ROOT)) not in ELSEWHERE
            if not found_in_the_mirror(path)
        ]
    )


def test_tests_with_the_name_of_one_file_alone_are_in_its_mirror():
    """A name that several files and folders have says nothing about the place."""
    mirrors: dict[str, list[tuple[Path, ...]]] = {}
    for path in sources(*LAYERS):
        mirrors.setdefault(path.stem.lstrip("_"), []).append((mirror_of(path.parent),))
    for folder in sorted({path.parent for path in sources(*LAYERS)}):
        mirrors.setdefault(folder.name.lstrip("_"), []).append((mirror_of(folder), mirror_of(folder).parent))
    files = [path for name in MIRRORS.values() for path in sorted((ROOT / name).rglob("test_*.py"))]
    refuse(
        [
            f"{path.relative_to(ROOT)}:1: its name is of a file whose mirror is {places[0][0].relative_to(ROOT)}"
            for path in files
            if len(places := mirrors.get(path.stem.removeprefix("test_"), [])) == 1 and path.parent not in places[0]
        ]
    )


def test_every_folder_of_tests_mirrors_a_folder_of_code():
    mirrors = {mirror_of(path.parent) for path in sources(*LAYERS)}
    files = [
        path for name in MIRRORS.values() for path in (ROOT / name).rglob("*.*") if path.parent.name != "__pycache__"
    ]
    refuse(
        [
            f"{folder.relative_to(ROOT)}:1: mirrors no folder of code"
            for folder in sorted({path.parent for path in files} - mirrors)
            if not is_in(folder, *DATA)
        ]
    )


def test_what_the_mirror_exempts_exists_and_needs_it():
    assert [name for name in TESTS_THEMSELVES if not any(map(has_bodies, sources(name)))] == []
    assert [name for name in TESTS_THEMSELVES if mirror_of(ROOT / name).exists()] == []
    assert [name for name in ELSEWHERE if found_in_the_mirror(ROOT / name)] == []
    elsewhere = [(ROOT / name, ROOT / tests) for name, tests in ELSEWHERE.items()]
    assert [path for path, tests in elsewhere if not (path.is_file() and has_functions(path) and tests.is_file())] == []
    assert [path for path, tests in elsewhere if tests not in importers().get(module_name(path), [tests])] == []
    assert [name for name in DATA if not any((ROOT / name).iterdir()) or any((ROOT / name).rglob("*.py"))] == []
