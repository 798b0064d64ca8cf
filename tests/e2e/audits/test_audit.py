"""The audit of a real run: it finds whatever is changed, also where every digest was computed anew."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.canonical import canonical_json, digest, sha256
from flows.auditing.audit import audit
from flows.cli.app import app
from tests.e2e.flow_process import RUN_ID, Flows

OUTSIDE = ("logs", "lease", ".probe", "attempt.json")
"""Folders of files that nothing is decided by."""
TRANSIENT = ("progress.json",)


def files_of(flows: Flows) -> list[Path]:
    """Every file of the store that counts."""
    paths = sorted(path for path in Path(flows.store).rglob("*") if path.is_file())
    return [path for path in paths if not {*path.parts} & {*OUTSIDE} and path.name not in TRANSIENT]


@contextmanager
def damaged(files: list[Path], draw: random.Random) -> Iterator[str]:
    """One file with a bit flipped, cut, lengthened, gone, or with the bytes of another one, and its former content."""
    path, kind = draw.choice(files), draw.choice(("flipped", "cut", "longer", "gone", "swapped"))
    data = path.read_bytes()
    others = [other for other in files if other.suffix == path.suffix and other.read_bytes() != data]
    other = draw.choice(others) if kind == "swapped" and others else None
    theirs = other.read_bytes() if other else b""
    if other:
        path.write_bytes(theirs)
        other.write_bytes(data)
    elif kind == "flipped" and data:
        place = draw.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
    elif kind == "cut" and data:
        path.write_bytes(data[: draw.randrange(len(data))])
    elif kind == "gone":
        path.unlink()
    else:
        path.write_bytes(data + b"x")
    yield f"{path} {kind}"
    path.write_bytes(data)
    if other:
        other.write_bytes(theirs)


def all_found(flows: Flows, count: int) -> None:
    draw, files = random.Random(0), files_of(flows)
    missed: list[str] = []
    for _ in range(count):
        with damaged(files, draw) as what:
            missed += [] if audit(flows.store, RUN_ID).faults else [what]
    assert not missed
    assert not audit(flows.store, RUN_ID).faults


def test_an_untouched_run_has_no_fault_and_a_head_for_each_iteration(reference: Flows) -> None:
    found = audit(reference.store, RUN_ID)
    assert found.faults == []
    assert found.gone == []
    heads = sorted((reference.root / "heads").iterdir())
    assert [json.loads(head.read_bytes())["body"]["iteration"] for head in heads] == [0, 1, 2, None]
    assert found.head == f"3: {sha256(heads[-1].read_bytes())}"


@pytest.mark.parametrize("number", range(4))
def test_a_head_that_is_missing_is_found(flows: Flows, number: int) -> None:
    (flows.root / "heads" / f"{number:05d}.json").unlink()
    (fault,) = audit(flows.store, RUN_ID).faults
    missing = "no head was written after the report; the command `run` writes one"
    assert fault.what == (missing if number == 3 else "missing, but later heads are there")


def test_random_damage_is_found(flows: Flows) -> None:
    all_found(flows, 6)


@pytest.mark.slow
def test_a_thousand_random_damages_are_found(flows: Flows) -> None:
    all_found(flows, 1000)


def test_a_number_changed_with_every_later_digest_is_found_by_a_kept_head(flows: Flows) -> None:
    """Also metrics and heads were written anew, so that nothing in the store contradicts anything else."""
    kept = audit(flows.store, RUN_ID).head.partition(" ")[2]
    assert audit(flows.store, RUN_ID, head=kept).faults == []
    _edit(flows.root / "iterations/0002/reward-ocr/manifest.1.json", lambda body: body["summary"].update(seconds=0.99))
    _name_inputs_again(flows)
    faults = audit(flows.store, RUN_ID).faults
    assert {fault.file.rpartition("/")[2] for fault in faults} == {"manifest.1.json", "metrics.jsonl"}
    assert all("a head names" in fault.what for fault in faults if fault.file.endswith("manifest.1.json"))
    _write_heads_anew(flows)
    (fault,) = audit(flows.store, RUN_ID).faults
    assert (fault.file, "reward/ocr_seconds is" in fault.what) == (f"runs/{RUN_ID}/metrics.jsonl", True)
    _write_metrics_anew(flows)
    assert audit(flows.store, RUN_ID).faults == []
    (fault,) = audit(flows.store, RUN_ID, head=kept).faults
    assert fault.what == f"no head has the digest {kept}"


def test_a_run_that_was_copied_elsewhere_is_audited_there(flows: Flows, tmp_path: Path) -> None:
    shutil.copytree(flows.store, tmp_path / "copy")
    copy = tmp_path / "copy" / "runs" / RUN_ID / "iterations" / "0001" / "rollout"
    (media,) = copy.rglob("media/00000.tar")
    media.write_bytes(media.read_bytes()[:-1])
    (fault,) = audit(str(tmp_path / "copy"), RUN_ID, quick=True).faults
    assert fault.file.endswith("media/00000.tar")
    assert f"expected {len(media.read_bytes()) + 1}" in fault.what
    assert audit(flows.store, RUN_ID, quick=True).faults == []


def test_one_iteration_is_audited_with_its_inputs(flows: Flows) -> None:
    (first,) = (flows.root / "iterations" / "0000" / "rollout").rglob("index/00000.json")
    first.write_bytes(first.read_bytes() + b" ")
    (last,) = (flows.root / "iterations" / "0002" / "rollout").rglob("index/00000.json")
    last.write_bytes(last.read_bytes() + b" ")
    named = {fault.file for fault in audit(flows.store, RUN_ID, 0).faults}
    assert any("iterations/0000" in name for name in named)
    assert not any("iterations/0002" in name for name in named)


def test_the_command_prints_each_fault_and_exits_with_65(flows: Flows) -> None:
    def audited(*options: str) -> tuple[int, str]:
        ended = CliRunner().invoke(app, ["audit", RUN_ID, "--store", flows.store, *options])
        return ended.exit_code, ended.output

    code, said = audited()
    assert (code, "nothing is wrong: " in said) == (0, True)
    plan = flows.root / "plan.json"
    plan.unlink()
    code, said = audited("--json")
    (fault,) = json.loads(said)["faults"]
    assert (code, fault["file"], fault["field"]) == (65, f"runs/{RUN_ID}/plan.json", "plan")
    assert "plan.json is missing, but there is " in fault["what"]
    assert "missing, but" in " ".join(audited()[1].split())


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(path.read_bytes())["body"]
    change(body)
    path.write_bytes(canonical_json({"body": body, "sha256": digest(body)}))


def _name_inputs_again(flows: Flows) -> None:
    """Let each manifest name the bytes that its inputs have now."""

    def change(body: dict[str, Any]) -> None:
        for source in (one for sources in body["inputs"].values() for one in sources):
            # Of this copy, wherever the run was made.
            slot = Path(flows.store, source["url"].partition("/store/")[2])
            source["manifest"] = sha256((slot / "manifest.1.json").read_bytes())

    for slot in ("iterations/0002/update", "iterations/0002/fragment", "exports/0003/export", "report"):
        _edit(flows.root / slot / "manifest.1.json", change)


def _write_metrics_anew(flows: Flows) -> None:
    path = flows.root / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if (line["stage"], line["iteration"]) == ("reward-ocr", 2):
            line["reward/ocr_seconds"] = 0.99
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_heads_anew(flows: Flows) -> None:
    previous: str | None = None
    for path in sorted((flows.root / "heads").iterdir()):

        def change(body: dict[str, Any], previous: str | None = previous) -> None:
            body["previous"] = previous
            body["records"] = {name: sha256((Path(flows.store) / name).read_bytes()) for name in body["records"]}

        _edit(path, change)
        previous = sha256(path.read_bytes())
