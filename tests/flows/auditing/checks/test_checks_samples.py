"""Forged samples whose digests were all computed anew: what plan, settings and numerics say of them is found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.storage import shards
from flows.auditing.audit import audit
from tests.flows.proved import RUN_ID, Forger, Proved, body_of, seal_anew, told

ROLLOUT, OTHER = "iterations/0002/rollout", "iterations/0001/rollout"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    proved = Proved(tmp_path_factory.mktemp("proved"))
    proved.run()
    assert audit(str(proved.store), RUN_ID).faults == []
    return proved.store


@pytest.fixture
def forger(finished: Path, tmp_path: Path) -> Forger:
    """Somebody at work on a copy."""
    return Forger(shutil.copytree(finished, tmp_path / "store"))


def change(name: str, value: Callable[[Any], Any]) -> Callable[[Forger], None]:
    """Change a field of all rows of a unit, and of the rows next to its pictures."""

    def edit(rows: Rows) -> None:
        for row in rows:
            row[name] = value(row[name])

    def forge(forger: Forger) -> None:
        forger.rows(ROLLOUT, edit)
        path = forger.file(ROLLOUT, "media/00000.tar")
        rows = {row["sample_id"]: row for row in json.loads(forger.file(ROLLOUT, "index/00000.json").read_bytes())}
        files = shards.unpack(path.read_bytes())
        for name in files:
            sample_id, _, ending = name.partition(".")
            if ending == "json":
                files[name] = json.dumps(rows[sample_id], sort_keys=True, separators=(",", ":")).encode()
        path.write_bytes(shards.pack(files))

    return forge


def of_other(part: str) -> Callable[[Forger], None]:
    """Put a tar of another rollout in the place of a rollout's own."""

    def forge(forger: Forger) -> None:
        there = forger.root / OTHER
        name = f"{part}/00000.tar"
        source = there / body_of(there / "manifest.1.json")["files"][name]["path"]
        data = source.read_bytes() if source.exists() else shards.pack({"i0001-x-000.safetensors": b""})
        forger.file(ROLLOUT, name).write_bytes(data)

    return forge


def other_row(forger: Forger) -> None:
    path = forger.file(ROLLOUT, "media/00000.tar")
    files = shards.unpack(path.read_bytes())
    name = min(name for name in files if name.endswith(".json"))
    files[name] = files[name].replace(b"a sign", b"a line", 1)
    path.write_bytes(shards.pack(files))


def no_tar(forger: Forger) -> None:
    forger.file(ROLLOUT, "media/00000.tar").write_bytes(b"\x89PNG" * 300)


FORGED: dict[str, tuple[Callable[[Forger], None], str]] = {
    "metadata": (change("metadata", lambda found: {"reference": "ZZ"}), "samples[0].metadata: {'reference': 'ZZ'}, "),
    "policy": (change("policy", lambda _: "0" * 64), f"samples[0].policy: {'0' * 64}, expected "),
    "trained steps": (change("trained_steps", lambda _: [1]), "samples[0].trained_steps: [1], expected []"),
    "sigmas": (change("sigmas", lambda found: [found[0] * 0.95, *found[1:]]), ".sigmas: "),
    "fewer sigmas": (change("sigmas", lambda found: found[1:]), "samples[0].sigmas: "),
    "t": (change("t", lambda found: [found[0] * 0.9, *found[1:]]), "samples[0].t: "),
    "media of another rollout": (of_other("media"), "of no sample of this unit"),
    "tensors of another rollout": (of_other("tensors"), "of no sample of this unit"),
    "media that are no tar": (no_tar, "media/00000.tar bytes: cannot be read as a tar"),
    "the row next to a picture": (other_row, "not the row of the index"),
}


@pytest.mark.parametrize("name", FORGED)
def test_samples_that_contradict_plan_and_settings_are_found(forger: Forger, name: str):
    forge, expected = FORGED[name]
    forge(forger)
    forger.seal()
    found = [line for line in told(forger) if line.startswith(ROLLOUT)]
    assert any(expected in line for line in found), found


def test_a_changed_size_of_samples_is_found(forger: Forger):
    forger.manifest(ROLLOUT, lambda body: body["summary"].update(kb_per_sample=1.5))
    forger.seal()
    assert any(line.startswith(f"{ROLLOUT}/manifest.1.json summary.kb_per_sample: 1.5, ") for line in told(forger))


def test_a_rollout_whose_noise_levels_differ_from_other_rollouts_is_found(forger: Forger):
    for unit in range(len(list((forger.root / ROLLOUT).glob("attempts/*/index/*.json")))):
        forger.rows(ROLLOUT, lambda rows: [row.update(sigmas=[0.95, *row["sigmas"][1:]]) for row in rows], unit)
        forger.rows(ROLLOUT, lambda rows: [row.update(t=[0.95, *row["t"][1:]]) for row in rows], unit)
    forger.seal()
    assert any("other rollouts of the run have" in line for line in told(forger))


def test_numerics_equal_the_pinned_ones_or_the_summary_names_the_change(forger: Forger, finished: Path, tmp_path: Path):
    forger.manifest(ROLLOUT, lambda body: body["numerics"].update(threads=8))
    forger.seal()
    said = f"{ROLLOUT}/manifest.1.json numerics: threads: 1 -> 8 since the pinned ones, its summary says none"
    assert said in told(forger)
    forger.manifest(ROLLOUT, lambda body: body["summary"].update(numerics_changed="threads: 1 -> 8"))
    forger.seal()
    assert told(forger) == []

    other = Forger(shutil.copytree(finished, tmp_path / "other"))
    seal_anew(other.root / "numerics" / "update.json", lambda body: body["numerics"].update(threads=8))
    other.seal()
    assert sum(" numerics: threads: 8 -> 1 since the pinned ones" in line for line in told(other)) == 3
