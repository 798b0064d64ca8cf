"""A finished run in which something was changed: a resume finds it in all that it reads, names it, and ends nothing."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.running.progress import Reporter
from stages.artifacts.generations import invalidate
from tests.damage import files_read, flipped, resealed
from tests.flows.by_hand import MONITORED, validated
from tests.flows.tracked import go, make_with_numbers

TRANSIENT = ("lease/", "progress.json")
"""Nothing is decided by these."""
DERIVED = ("metrics.jsonl",)
"""Made again of the artifacts."""
PLACE = ("place", "generation", "kind", "format")
DERIVED_FIELDS = ("recipe", "fingerprint", "content", "version", "seed", "config", "stage")


class Finished:
    """A run made by hand to its end, one stage of it twice, and a description of it."""

    def __init__(self, recipe, tmp_path: Path) -> None:
        self.store = tmp_path / "store"
        self.plan = plan_of(Settings(validated(recipe, tmp_path, MONITORED), str(self.store), run_id="hand"))
        self.root = self.store / "runs" / "hand"
        go(self.run)
        update = requests.update(self.run, 1)
        invalidate(update.slot, 1, "asked for")
        make_with_numbers(update)
        with files_read(self.store) as self.read:
            self.resume()
        self.intact = self.state()
        self.metrics = (self.root / "metrics.jsonl").read_bytes()

    @property
    def run(self) -> Run:
        """The run, its plan read."""
        return Run(freeze(self.plan, str(self.store)), str(self.store))

    def resume(self) -> None:
        """Give the command of the run again, without processes."""
        run = self.run
        with run.lease(), Reporter(run.url):
            go(run)

    def state(self) -> dict[str, bytes]:
        """Every file that counts."""
        paths = [path for path in self.store.rglob("*") if path.is_file()]
        names = {str(path.relative_to(self.store)): path for path in paths}
        return {
            name: path.read_bytes()
            for name, path in names.items()
            if not name.removeprefix("runs/hand/").startswith((*TRANSIENT, ".probe", *DERIVED))
        }

    def refuses(self, name: str, data: bytes | None, what: str) -> None:
        """A resume ends with a data error that names the file, and changes nothing."""
        path = self.store / name
        kept = path.read_bytes()
        path.unlink() if data is None else path.write_bytes(data)
        before = self.state()
        with pytest.raises(ArtifactError) as caught:
            self.resume()
        assert path.name in str(caught.value), f"{name}, {what}: the message names another file: {caught.value}"
        after = self.state()
        assert after == before, f"{name}, {what}: {sorted(after.keys() ^ before.keys())}"
        path.write_bytes(kept)


@pytest.fixture
def finished(recipe, tmp_path) -> Finished:
    return Finished(recipe, tmp_path)


def sealed(finished: Finished) -> list[str]:
    """The sealed files that a resume reads, once each."""
    return sorted(
        name
        for name in finished.read
        if name.endswith(".json") and not name.removeprefix("runs/hand/").startswith(TRANSIENT)
    )


def one_of_each_kind(finished: Finished) -> list[str]:
    """The first sealed file of each kind, of manifests the first of each stage."""
    found: dict[tuple[str, str], str] = {}
    for name in sealed(finished):
        body = json.loads((finished.store / name).read_bytes())["body"]
        found.setdefault((body["kind"], body.get("stage", "")), name)
    return list(found.values())


def damages(data: bytes) -> list[tuple[str, bytes]]:
    body = json.loads(data)["body"]
    fields = PLACE + (DERIVED_FIELDS if body["kind"] == "manifest" else ())
    return [*flipped(data), *resealed(data, fields if "place" in body else ("kind", "format"))]


def test_a_resume_reads_every_kind_of_sealed_file(finished):
    kinds = {json.loads((finished.store / name).read_bytes())["body"]["kind"] for name in sealed(finished)}
    assert kinds == {"plan", "manifest", "invalidated", "head"}
    others = {name.removeprefix("runs/hand/") for name in finished.read - {*sealed(finished)}}
    assert {name for name in others if not name.endswith(".parquet")} == {"metrics.jsonl", "lease/1.json"}
    finished.resume()
    assert finished.state() == finished.intact


def test_no_changed_value_of_a_file_that_is_read_is_accepted(finished):
    """A few of each file; all of them in the slow test."""
    for offset, name in enumerate(sealed(finished)):
        for what, data in itertools.islice(damages((finished.store / name).read_bytes()), offset, None, 197):
            finished.refuses(name, data, what)


@pytest.mark.slow
def test_no_changed_value_at_all_of_a_file_that_is_read_is_accepted(finished):
    for name in one_of_each_kind(finished):
        for what, data in damages((finished.store / name).read_bytes()):
            finished.refuses(name, data, what)


def test_no_table_that_is_read_may_have_another_byte(finished):
    tables = [name for name in finished.read if name.endswith(".parquet")]
    assert len(tables) >= 4
    for name in tables:
        data = (finished.store / name).read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            finished.refuses(name, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], f"byte {place}")


def test_manifests_cannot_be_swapped_between_slots_and_generations(finished):
    names = [name for name in sealed(finished) if Path(name).name.startswith("manifest.")]
    assert len(names) > 12
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        finished.refuses(name, (finished.store / other).read_bytes(), f"with the bytes of {other}")
    update = "runs/hand/iterations/0001/update/manifest"
    for one, other in ((1, 2), (2, 1)):
        finished.refuses(f"{update}.{one}.json", (finished.store / f"{update}.{other}.json").read_bytes(), "of another")


def test_the_lost_end_of_a_generation_is_found(finished):
    finished.refuses("runs/hand/iterations/0001/update/invalidated.1.json", None, "lost")


def test_the_records_of_another_run_are_refused(finished):
    shutil.copytree(finished.root, finished.store / "runs" / "copy")
    finished.plan = finished.plan.model_copy(update={"run_id": "copy"})
    with pytest.raises(ArtifactError, match=r"copy/plan\.json is the plan of run 'hand'"):
        finished.resume()
    (finished.store / "runs" / "copy" / "plan.json").unlink()
    with pytest.raises(ArtifactError, match=r"copy/heads/00000\.json is head 0 of runs/hand"):
        finished.resume()
    shutil.rmtree(finished.store / "runs" / "copy" / "heads")
    with pytest.raises(ArtifactError, match=r"copy/policy/manifest\.1\.json was written for .* runs/hand/policy"):
        finished.resume()


def test_derived_and_transient_files_are_made_again(finished):
    for name in ("metrics.jsonl", "progress.json", "lease/1.json", "lease/1.count"):
        path = finished.root / name
        data = path.read_bytes()
        for damaged in (b"", b"{", data[: len(data) // 2], data[:-2] + b"#\n", data.replace(b"1", b"2", 1)):
            path.write_bytes(damaged)
            finished.resume()
            assert finished.state() == finished.intact
            assert (finished.root / "metrics.jsonl").read_bytes() == finished.metrics
