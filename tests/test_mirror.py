"""`tests/` mirrors the folders of the tree, and the files of layers by name: where to look for tests first.

`tests/core` mirrors `cosmos_rl_core`, `tests/stages` `stages` and `tests/flows` `flows`, where names begin without
underscores. Folders and files whose functions and classes have no bodies need no tests: entrypoints and lists of names.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.test_rules import LAYERS, ROOT, nodes, refuse, sources

pytestmark = pytest.mark.xdist_group("sources")

MIRRORS = {layer: f"tests/{layer.removeprefix('cosmos_rl_')}" for layer in LAYERS}
TESTS_THEMSELVES = ("cosmos_rl_core/conformance",)
"""Folders of code that are tests, which users run; tests/test_every_plugin_conforms.py runs them."""
DATA = ("tests/core/upstream_recipes", "tests/core/upstream_vlm_recipes", "tests/core/vlms/golden")
"""Folders of tests that mirror none: recipes of cosmos-rl, numbers of transformers."""


ON_A_SERVER = {
    "flows/infra.py": "tests/e2e/deployments/test_deployments.py",
    "flows/running/launch.py": "tests/e2e/servers/test_tried_again.py",
}
"""Files that do nothing without a Prefect server, which tests of whole runs share, and their tests."""


def mirror_of(folder: Path) -> Path:
    """Return the folder of tests of a folder of code."""
    layer, *parts = folder.relative_to(ROOT).parts
    return ROOT.joinpath(MIRRORS[layer], *(part.lstrip("_") for part in parts))


def has_bodies(path: Path) -> bool:
    """Return whether a function or a class of a file has more than a docstring."""
    defined = (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return any(len(node.body) > 1 or ast.get_docstring(node) is None for node in defined)


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
    if (tests := ON_A_SERVER.get(str(path.relative_to(ROOT)))) is not None:
        return [ROOT / tests]
    return [folder / f"test_{name}.py", folder / f"test_{path.parent.name}_{name}.py"]


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
            if has_bodies(path) and not any(one.is_file() for one in own_tests_of(path))
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
    assert [name for name in ON_A_SERVER if not (ROOT / name).is_file()] == []
    assert [name for name in DATA if not any((ROOT / name).iterdir()) or any((ROOT / name).rglob("*.py"))] == []
