"""The console lines of finished waves."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd

from cosmos_rl_core.storage import store
from flows.library.collected import Collected
from flows.planning.run import Run
from flows.running.display import Display
from flows.showing import contents
from stages.artifacts import files
from stages.artifacts.manifest import Manifest
from stages.contracts import METRICS
from stages.reporting.book import Trained


def finished(**summary: float) -> Manifest:
    return Manifest.model_construct(files={}, summary=summary)


def test_a_line_adds_seconds_and_keeps_the_numbers_of_two_stages_apart() -> None:
    lines: list[str] = []
    rewards = finished(ocr=0.5, standard_error=0.1, seconds=1.0), finished(jpeg=-3.0, standard_error=0.25, seconds=0.5)
    Display(lines.append).done("iteration-0000/reward-ocr+reward-jpeg", rewards, skipped=False)
    numbers = "ocr 0.5  standard_error 0.1 | jpeg -3  standard_error 0.25"
    assert lines == [f"iteration-0000/reward-ocr+reward-jpeg   1.5 s  {numbers}"]


def test_stages_without_numbers_leave_no_mark() -> None:
    lines: list[str] = []
    Display(lines.append).done("export", (finished(seconds=2.0), finished(steps=3)), skipped=True)
    assert [line.split() for line in lines] == [["export", "kept", "steps", "3"]]


def trained(folder: Path, **columns: list[float]) -> Manifest:
    """An update of two optimizer steps, whose summary has the numbers of the last one."""
    data = io.BytesIO()
    pd.DataFrame({"step": [0, 1], **columns}).to_parquet(data)
    entry = files.write(str(folder), METRICS, [data.getvalue()])
    last = {name: values[-1] for name, values in columns.items() if name in ("loss", "grad_norm")}
    return Manifest.model_construct(slot=str(folder), files={METRICS: entry}, summary={**last, "seconds": 3.0})


def said_of(manifest: Manifest) -> dict[str, str]:
    """The numbers in the line of an update, by name."""
    lines: list[str] = []
    Display(lines.append).done("iteration-0000/update", (manifest,), skipped=False)
    words = lines[0].partition(" s  ")[2].split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_the_log_and_the_table_in_prefect_have_the_same_numbers_of_an_update(tmp_path: Path) -> None:
    manifest = trained(tmp_path, loss=[1.0, 3.0], grad_norm=[math.nan, 2.0], data_loss=[0.25, 0.5])
    said = said_of(manifest)
    assert said == {"loss": "2", "grad_norm": "2", "data_loss": "0.375"}
    found = Collected(cast(Run, SimpleNamespace(url=str(tmp_path), plan=SimpleNamespace(baseline=0, first=0))))
    steps = pd.read_parquet(io.BytesIO(files.read_entry(str(tmp_path), manifest.files[METRICS])))
    found.trained[0] = Trained(manifest, steps)
    (row,) = cast(list[dict[str, Any]], json.loads(contents.table(found, {}, {})))
    assert {name: row[name] for name in said} == said


def test_an_update_whose_table_cannot_be_read_has_a_line_without_numbers(tmp_path: Path) -> None:
    manifest = trained(tmp_path, loss=[1.0, 3.0])
    store.remove(store.join(str(tmp_path), METRICS))
    assert said_of(manifest) == {}
