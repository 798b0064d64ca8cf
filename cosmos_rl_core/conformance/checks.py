"""Outcomes of the checks of plugins, collected by a plugin of pytest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

KIND_OF = {"family": "models", "referring": "models", "model": "models", "algorithm": "algorithms"} | {
    "reward": "rewards",
    "dataset": "datasets",
    "solver": "solvers",
    "captioner": "captioners",
    "vlm": "vlms",
    "chat_dataset": "chat_datasets",
}
"""Kind of plugin by the name of a test's parameter whose value is the name of a plugin."""
FILE = {"kind", "name"}
"""Parameters of a test of the file of a plugin of any kind."""
MAX_LINES = 12


@dataclass
class Checked:
    """A plugin, and the outcomes of its checks."""

    kind: str
    name: str
    path: str
    passed: int = 0
    failed: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    """``check`` and ``reason`` of each check that did not apply."""
    failures: list[dict[str, str]] = field(default_factory=list)
    """``check``, ``message`` and ``place`` of each failure."""


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a test by name."""
    return dict(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def plugin_of(parameters: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the kind and the name of the plugin that a test is about; None if it is about none."""
    if parameters.keys() >= FILE:
        return parameters["kind"], parameters["name"]
    return next(((KIND_OF[key], str(parameters[key])) for key in parameters if key in KIND_OF), None)


def sentence(item: pytest.Item, parameters: Mapping[str, Any]) -> str:
    """Return the name of a test as a sentence, with the parameters that do not name the plugin."""
    words = getattr(item, "originalname", item.name).removeprefix("test_").replace("_", " ")
    plugin = {*KIND_OF, *(FILE if parameters.keys() >= FILE else ())}
    left = [value for key, value in parameters.items() if key not in plugin]
    left = [value if isinstance(value, str) else repr(value) for value in left if not isinstance(value, BaseModel)]
    return f"{words} ({', '.join(map(str, left))})" if left else words


class Checks:
    """Plugin of pytest that selects the tests of some plugins and keeps their outcomes."""

    def __init__(self, checked: Sequence[Checked], settings: Mapping[str, Any], only: str = "") -> None:
        self._settings = settings
        self._checked = {(one.kind, one.name): one for one in checked}
        self._only = only
        self._chosen: dict[str, tuple[Checked, str]] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register the mark of tests that take long. All of them run here."""
        config.addinivalue_line("markers", "slow: takes long")

    @pytest.fixture(scope="session")
    def plugin_settings(self) -> Mapping[str, Any]:
        """Return the settings of the plugins that are checked."""
        return self._settings

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests of other plugins."""
        for item in items:
            parameters = parameters_of(item)
            one, words = self._checked.get(plugin_of(parameters) or ("", "")), sentence(item, parameters)
            if one is not None and self._only in words:
                self._chosen[item.nodeid] = one, words
        items[:] = [item for item in items if item.nodeid in self._chosen]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a check. An error before or after its body is a failure, too."""
        one, words = self._chosen[report.nodeid]
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            one.skipped.append({"check": words, "reason": reason.removeprefix("Skipped: ")})
        elif report.failed:
            one.failed += 1
            one.failures.append({"check": words, **told(report)})
        elif report.when == "call":
            one.passed += 1


def told(report: pytest.TestReport) -> dict[str, str]:
    """Return the message of a failure, and the file and line of the check or of the code that it called."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr)
    # pytest's details of a comparison are left to `--verbose`.
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith(" +")][:MAX_LINES]
    lines[:1] = [line.removeprefix("AssertionError: ") for line in lines[:1]]
    return {"message": "\n".join(lines), "place": f"{crash.path}:{crash.lineno}" if crash else ""}
