"""Dated JSON of what was measured: ``<date>-<device>-<what>.json``, which a later run of that day replaces."""

import argparse
import datetime
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.numerics import numerics

FOLDER = Path(__file__).parent / "results"


def device_name() -> str:
    """As its maker calls it, or ``cpu``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def write(folder: Path, what: str, found: dict[str, Any]) -> Path:
    """With the day (UTC), the device, and what else decides numbers and speed."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    path = folder / f"{date}-{_plain(device_name())}-{_plain(what)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"date": date, "device": device_name(), "what": what, "numerics": numerics(torch), **found}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return path


class Measured:
    """A benchmark's settings, and the load of the machine before it and after."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        self._load_before = os.getloadavg()[0]

    def write(self, what: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
        """Write the rows to the folder ``--output``, and print its path."""
        settings = {name: value for name, value in vars(self._settings).items() if name != "output"}
        machine = {"loads": [self._load_before, os.getloadavg()[0]], "cpus": os.cpu_count()}
        found = {"settings": settings | machine, "measured": rows, **more}
        print(f"wrote {write(self._settings.output, what, found)}")


def write_tests(folder: Path, device: str, reports: Sequence[pytest.TestReport]) -> Path:
    """How the tests of a session ended, and the numbers that they recorded, such as drifts between precisions."""
    ended = [report for report in reports if report.when == "call" or not report.passed]
    found = {
        "on": device,
        "outcomes": dict(Counter(report.outcome for report in ended)),
        "seconds": sum(report.duration for report in reports),
        "not_passed": [report.nodeid for report in ended if not report.passed],
        "measured": {report.nodeid: dict(report.user_properties) for report in ended if report.user_properties},
    }
    return write(folder, "tests", found)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
