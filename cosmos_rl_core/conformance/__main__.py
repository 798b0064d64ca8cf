"""``python -m cosmos_rl_core.conformance PATH ... --results FILE`` runs the suite on the plugins at these paths.

Writes what it found to the file as JSON, and the tiny pipelines of models, as bases of runs, next to it; progress and
the output of checks go to stdout. Exits with 0, with 1 if a check failed, with 64 if there is nothing to check.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.config.reading import with_changes
from cosmos_rl_core.conformance.checks import Checked, Checks
from cosmos_rl_core.conformance.kinds.members import BASES, GIVEN, file_of, required
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError, CosmosRLError
from cosmos_rl_core.outside_plugins import find

HERE = Path(__file__).parent
FAILED = 1
OPTIONS = (
    *("-c", os.devnull, "--rootdir", str(HERE), "--confcutdir", str(HERE), "-p", "no:cacheprovider"),
    *("-o", "tmp_path_retention_policy=none", "--disable-warnings", "-q", "--no-header"),
)
"""Settings of pytest. It ignores the settings in the folder that it runs in, and in the folders above."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check plugins, write the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cosmos_rl_core.conformance", description=__doc__)
    parser.add_argument("paths", nargs="+", help="files and folders of plugins")
    parser.add_argument("--results", type=Path, required=True, help="the file to write")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting: option=value")
    parser.add_argument("--only", default="", help="make the checks alone whose sentence has these words")
    parser.add_argument("--verbose", action="store_true", help="show where each check failed, with its values")
    options = parser.parse_args(arguments)
    try:
        work = options.results.with_name("work")
        found = check(options.paths, options.settings, options.only, work, verbose=options.verbose)
    except CosmosRLError as error:
        options.results.write_text(json.dumps({"mistake": str(error)}), encoding="utf-8")
        return error.exit_code
    bases = _bases(found, options.results.with_name("bases"))
    written = {"plugins": [asdict(one) for one in found], "bases": bases}
    options.results.write_text(json.dumps(written), encoding="utf-8")
    return FAILED if any(one.failed for one in found) else 0


def check(paths: Sequence[str], given: Sequence[str], only: str, work: Path, *, verbose: bool) -> list[Checked]:
    """Run the suite on the plugins at these paths. Checks write to the folder ``work``.

    Raises :class:`ConfigError` if a plugin cannot be checked and, without ``only``, if no check was made of a plugin.
    """
    _import(paths)
    settings = with_changes({}, Path(), given, None)
    loaded = [(kind, name) for kind in plugins.KINDS for name in sorted(plugins.loaded(kind))]
    if mistakes := [*_mistakes(loaded, settings)]:
        raise ConfigError("\n".join(mistakes))
    checked = [Checked(kind, name, _place(kind, name)) for kind, name in loaded]
    kinds = sorted({kind for kind, _ in loaded})
    files = [HERE / "kinds" / f"test_{of}.py" for of in ("files", *kinds)]
    files += [HERE / "models"] if "models" in kinds else []
    pytest.register_assert_rewrite("cosmos_rl_core.conformance")
    shown = ["--tb=short"] if verbose else ["--tb=no", "--no-summary"]
    words = [*OPTIONS, *shown, "--basetemp", str(work), *map(str, files)]
    ended = pytest.main(words, plugins=[Checks(checked, settings, only)])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise CosmosRLError(f"pytest ended with {ended!r}; its output is above")
    unchecked = [one.path for one in checked if not one.passed + one.failed + len(one.skipped)]
    if unchecked and not only:
        raise ConfigError("\n".join(f"{path}: no check was made of it" for path in unchecked))
    return checked


def _bases(checked: Sequence[Checked], root: Path) -> dict[str, Any]:
    """Write the tiny pipeline of each model, and return the settings of recipes with it; an error is a failure."""
    found = dict[str, Any]()
    if not (models := [one for one in checked if one.kind == "models"]):
        return found
    # Imported here, because it imports torch, which no plugin may do before.
    tiny_bases = importlib.import_module("cosmos_rl_core.conformance.tiny_bases")
    for one in models:
        try:
            found[one.name] = tiny_bases.write(one.name, root)
        except Exception as error:  # raised by the plugin, so of any kind
            one.failed += 1
            message = f"{type(error).__name__}: {error}"
            failure = {"check": "the stock pipeline loads the tiny pipeline", "message": message, "place": ""}
            one.failures.append(failure)
    return found


def _import(paths: Sequence[str]) -> None:
    """Import the plugins. Raises :class:`ConfigError` if a path holds none, or if a plugin imports torch."""
    for path in paths:
        find([path])
        if "torch" in sys.modules:
            advice = "import it inside the function that needs it, or, of a model, in model.py"
            raise ConfigError(f"{path} imports torch, and so would every plan: {advice}")
    find(paths)


def _mistakes(loaded: Sequence[tuple[str, str]], settings: Mapping[str, Any]) -> list[str]:
    """Return a message for each setting that the plugins need and that is not given, or that no plugin has."""
    found: list[str] = []
    known: set[str] = set()
    for kind, name in loaded:
        if kind in BASES:
            known |= plugins.load(kind, name).Options.model_fields.keys()
            missing = required(kind, name) - {*GIVEN.get(kind, ())} - settings.keys()
            found += [f"{file_of(kind, name)}: {one} has no default; give --set {one}=VALUE" for one in sorted(missing)]
        if kind == "models" and not tiny_pipelines.path_of(name).is_file():
            found.append(tiny_pipelines.missing(name))
    found += [f"--set {name}: no plugin has such a setting" for name in sorted(settings.keys() - known)]
    return found


def _place(kind: str, name: str) -> str:
    file = Path(file_of(kind, name))
    return str(file.parent if file.name == "__init__.py" else file)


if __name__ == "__main__":
    sys.exit(main())
