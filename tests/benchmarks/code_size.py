"""Count the product's code at git revisions: ``python -m tests.benchmarks.code_size 94471a2 HEAD``.

Counted are lines of ``cosmos_rl_core``, ``stages`` and ``flows`` with code on them, after ruff has formatted each tree
at 100 columns: no blank lines, comments or docstrings.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from pathlib import Path

PACKAGES = ("cosmos_rl_core", "stages", "flows")
COLUMNS = "100"
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Return the number of lines that hold code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def measure(revision: str) -> dict[str, int]:
    """Return the lines of code of each package at a git revision."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", revision, *PACKAGES], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(folder, filter="data")
        ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--quiet", "--line-length", COLUMNS, folder]
        subprocess.run(ruff, check=True)
        return {
            package: sum(lines_of_code(p.read_text(encoding="utf-8")) for p in Path(folder, package).rglob("*.py"))
            for package in PACKAGES
        }


def main(revisions: list[str]) -> None:
    """Print a line for each revision."""
    for revision in revisions:
        found = measure(revision)
        each = ", ".join(f"{package} {count}" for package, count in found.items())
        print(f"{revision}: {sum(found.values())} lines of code ({each})")


if __name__ == "__main__":
    main(sys.argv[1:] or ["HEAD"])
