"""Rules of words and names, read off the sources like :mod:`tests.test_rules`."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.test_rules import LAYERS, ROOT, nodes, place, refuse, sources, violations

pytestmark = pytest.mark.xdist_group("sources")
MAX_METHODS = 20
FILE_NAME = re.compile(r"[\w-]+\.(parquet|jsonl|html)|(status|orders|request|execution|plan|layout|manifest)\.json")
"""Names of files that the product writes. Names in diffusers' directories, such as config.json, are theirs."""
NO_VERBS = re.compile(
    r"(The|A|An|Of|As|Where|That|Those|These|This|What|Who|Whether|How|Why|When|Which|Whose|One|Only|All|Each|Every|No|"
    r"None|Both|Any|If|For|In|On|By|From|To|With|Without|At|Also|Same|It|Its|Their|Yes|True|False)\b|[`\d(*_]"
)
"""Beginnings of docstrings of functions that are no verb."""
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in nodes(path) if isinstance(node, FUNCTION))


def test_docstrings_of_functions_begin_with_a_verb():
    refuse(
        [
            f"{place(path, node.lineno)}: {node.name}: {text.splitlines()[0]!r}; begin with a verb: Return, Write"
            for path in sources(*LAYERS, "docs")
            for node in functions(path)
            # The name of a test is a sentence, which its docstring goes on with.
            if not node.name.startswith("test_")
            if (text := ast.get_docstring(node)) and NO_VERBS.match(text)
        ]
    )


def test_docstrings_of_classes_begin_with_a_noun_or_a_verb():
    clause = re.compile(r"(Of|As|Where|That|Those|What|Who|Whether|How|Why|When|Which|Whose|If|For|In|On|By)\b")

    def begins_with_a_clause(node: ast.AST) -> str | None:
        text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.Module) else None
        return f"{text.splitlines()[0]!r}; name it" if text and clause.match(text) else None

    refuse(violations(sources(*LAYERS, "docs"), begins_with_a_clause))


def test_classes_are_small():
    def too_large(node: ast.AST) -> str | None:
        methods = sum(isinstance(part, FUNCTION) for part in node.body) if isinstance(node, ast.ClassDef) else 0
        return f"{methods} methods, at most {MAX_METHODS}; find the noun of some" if methods > MAX_METHODS else None

    refuse(violations(sources(*LAYERS), too_large))


def private_names() -> set[str]:
    """Private functions, classes, constants and attributes that the product defines."""
    found: set[str] = set()
    for path in sources(*LAYERS):
        for node in nodes(path):
            if isinstance(node, FUNCTION | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    modules = {name for path in sources(*LAYERS) for name in (path.stem, path.parent.name)}
    named_tuples = {"_fields", "_replace"}
    return {name for name in found - modules - named_tuples if name.startswith("_") and not name.startswith("__")}


def test_tests_use_no_private_names_of_the_product():
    private = private_names()

    def uses(node: ast.AST) -> str | None:
        if not isinstance(node, ast.Attribute) or node.attr not in private:
            return None
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return None if own else f"{ast.unparse(node)} is private; test what it does through a public name"

    def imports_one(node: ast.AST) -> str | None:
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        found = [name for name in names if name in private]
        return f"imports the private {', '.join(found)}" if found else None

    tests = sources("tests")
    refuse(violations(tests, uses) + violations(tests, imports_one))


def test_names_of_files_are_written_once():
    """Elsewhere they are constants, so that a search finds who reads and who writes a file."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources("stages", "flows"):
        words = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        for node in nodes(path):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in words else None
            if isinstance(text, str) and FILE_NAME.fullmatch(text):
                places[text].append(place(path, getattr(node, "lineno", 1)))
    refuse([f"{found[1]}: {name!r} is also at {found[0]}" for name, found in places.items() if len(found) > 1])


DIALECT = re.compile(
    r"(?<![`'\"])\b(that of|those of|ones that|ones which|beside|what it (is|was)|stands|(that|not) stand)\b",
    re.IGNORECASE,
)
"""Words that hide who does what. ``stands`` for "exists and is current", ``beside`` for "next to" and "with"."""
RECORDED = {"run beside data gc", "gc beside its run"}
"""Names in records, which stay. Words in quotes are such names, too."""


ADVERBS = {"ahead", "after", "again", "along", "apart", "before", "beside", "later", "meanwhile", "together"}


def test_modules_are_not_named_by_adverbs():
    refuse([f"{place(path, 1)}: name it by a noun" for path in sources(*LAYERS) if path.stem.strip("_") in ADVERBS])


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment, docstring, other text and name that a file defines."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and token.string.strip("\"'") not in RECORDED:
            yield token.start[0], " ".join(token.string.split())
    for node in nodes(path):
        name = getattr(node, "name", None) if isinstance(node, (*get_args(FUNCTION), ast.ClassDef)) else None
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else name
        name = node.arg if isinstance(node, ast.arg) else name
        if isinstance(name, str):
            yield getattr(node, "lineno", 1), name.replace("_", " ")


def test_prose_and_names_use_plain_words():
    patterns = ("docs/**/*.md", "docs/*.ipynb", "README.md", "Makefile", "configs/**/*.toml", "deployments/**/*.*ml")
    templates = (f"{layer}/**/templates/**/*.*" for layer in LAYERS)
    pages = [path for pattern in (*patterns, *templates) for path in ROOT.glob(pattern) if path.is_file()]
    refuse(
        [
            f"{place(path, line)}: {found[0]!r}; say it in plain words"
            for path in (*sources(*LAYERS, "docs", "tests"), *pages)
            if path != Path(__file__)
            for line, text in words_of(path)
            if (found := DIALECT.search(text))
        ]
    )


def test_names_of_tests_are_sentences_of_at_most_80_letters():
    def too_long(node: ast.AST) -> str | None:
        name = node.name.removeprefix("test_") if isinstance(node, FUNCTION) and node.name.startswith("test_") else ""
        return f"{name}: {len(name)} letters; say it shorter" if len(name) > 80 else None

    refuse(violations(sources(*LAYERS, "tests"), too_long))


def test_every_recipe_says_what_to_expect():
    """As measured, with the page that says how; else that it is not measured."""
    recipes = [path for path in sorted((ROOT / "configs").rglob("*.toml")) if path.parent.name != "data"]
    expected = re.compile(r"^# Expect: (not measured|.*\d.* \((docs/[\w-]+\.md)\))\.$", re.MULTILINE)
    told = {path: expected.search(path.read_text(encoding="utf-8").partition("\n\n")[0]) for path in recipes}
    assert [str(path.relative_to(ROOT)) for path, found in told.items() if found is None] == []
    assert [found[2] for found in told.values() if found and found[2] and not (ROOT / found[2]).is_file()] == []
