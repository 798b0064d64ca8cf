"""Every fault that somebody with access to the whole store can make: found, and said where it is.

An edit that computed every digest anew is found by what does not follow from the plan; any edit, by a head that was
kept.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from cosmos_rl_core.canonical import canonical_json, sha256
from flows.auditing.audit import audit
from flows.auditing.checks.faults import Fault, Findings
from flows.cli.app import app
from stages import contracts
from stages.artifacts.pool import INDEX
from tests.flows.proved import RUN_ID, Forger, Proved, body_of, seal_anew, told

ROLLOUT, REWARD, UPDATE = "iterations/0001/rollout", "iterations/0001/reward-ocr", "iterations/0001/update"
SCORES, ANSWERS, ADVANTAGES = contracts.Reward.SCORES, contracts.Reward.ANSWERS, contracts.Update.ADVANTAGES


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Proved:
    proved = Proved(tmp_path_factory.mktemp("proved"))
    proved.run()
    return proved


@pytest.fixture(scope="module")
def kept(finished: Proved) -> str:
    """The digest of the newest head, as somebody keeps it."""
    found = audit(str(finished.store), RUN_ID)
    assert found.faults == []
    return found.head.partition(" ")[2]


@pytest.fixture
def forger(finished: Proved, tmp_path: Path) -> Forger:
    """Somebody at work on a copy."""
    return Forger(shutil.copytree(finished.store, tmp_path / "store"))


def unknown(head: str) -> str:
    """The fault of a run that no longer has a head."""
    return f"heads digest: no head has the digest {head}"


def one_seed_twice(rows: list[dict[str, Any]]) -> None:
    rows[1]["seed"] = rows[0]["seed"]


def one_noise_twice(rows: list[dict[str, Any]]) -> None:
    rows[1]["noise_seed"] = rows[0]["noise_seed"]


def swap(rows: list[dict[str, Any]]) -> None:
    rows.reverse()


def twice(rows: list[dict[str, Any]]) -> None:
    rows.append(rows[-1])


def other_prompt(rows: list[dict[str, Any]]) -> None:
    rows[0]["prompt"] = "something else"


SAMPLES: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "two samples of one seed": (one_seed_twice, "samples: 2 have the seed"),
    "two samples of one noise": (one_noise_twice, "samples[1].noise_seed: "),
    "two samples swapped": (swap, "samples[0].member: "),
    "a sample missing": (lambda rows: rows.pop(), "samples: 7, expected 8"),
    "a sample twice": (twice, "samples: 9, expected 8"),
    "another prompt": (other_prompt, "samples[0].prompt: something else, expected a sign that says"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_do_not_follow_from_the_plan_are_found(forger: Forger, kept: str, name: str):
    change, expected = SAMPLES[name]
    forger.rows(ROLLOUT, change)
    forger.seal()
    found = told(forger, kept)
    assert any(line.startswith(f"{ROLLOUT}/manifest.1.json {expected}") for line in found), found
    assert unknown(kept) in found


def test_smaller_groups_than_planned_are_found_even_if_the_rollouts_settings_agree(forger: Forger):
    """All groups lack their last sample, and settings, scores, advantages and metrics agree with that."""

    def three(rows: list[dict[str, Any]]) -> None:
        rows[:] = [row for row in rows if row["member"] < 3]

    for unit in range(4):
        forger.rows(ROLLOUT, three, unit)
    forger.manifest(ROLLOUT, lambda body: (body["config"].update(n_generation=3), body["summary"].update(samples=6)))
    for slot, name in ((REWARD, SCORES), (REWARD, ANSWERS), (UPDATE, ADVANTAGES)):
        forger.table(slot, name, lambda table: table.loc[~table["sample_id"].str.endswith("-003")])
    forger.seal()
    assert f"{ROLLOUT}/manifest.1.json recipe: the settings of rollout changed (n_generation)" in told(forger)


def score(change: dict[str, Any], place: int) -> Callable[[Forger], None]:
    """An edit of a row of the scores, while the answer stays."""

    def edit(table: pd.DataFrame) -> pd.DataFrame:
        for name, value in change.items():
            table.loc[place, name] = value
        return table

    return lambda forger: forger.table(REWARD, SCORES, edit)


def answer(error: str, place: int) -> Callable[[Forger], None]:
    def edit(table: pd.DataFrame) -> pd.DataFrame:
        table.loc[place, "error"] = error
        return table

    return lambda forger: forger.table(REWARD, ANSWERS, edit)


def summary(slot: str, **change: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.manifest(slot, lambda body: body["summary"].update(change))


FAILURES: dict[str, tuple[tuple[Callable[[Forger], None], ...], str]] = {
    "excluded without a reason": (
        (score({"valid": False, "score": None}, 0),),
        "row 0, i0001-",
    ),
    "a failure as a number": ((score({"valid": True, "score": 0.5}, 5),), "a score or a reason, not both"),
    "a number for a picture that is not finite": (
        (score({"valid": True, "score": 0.5}, 3), answer("", 3)),
        "is not finite, so it cannot have a score",
    ),
    "a failure that is not counted": ((summary(REWARD, failed=1),), "summary.failed: 1, its scores give 2"),
    "a failure that is counted as scored": ((summary(REWARD, scored=8),), "summary.scored: 8, its scores give 6"),
    "no failures": (
        (lambda forger: forger.manifest(REWARD, lambda body: body["summary"].pop("failed")),),
        "summary.failed: 0, its scores give 2",
    ),
    "another mean": ((summary(REWARD, ocr=0.75),), "summary.ocr: 0.75, its scores give 0."),
    "another standard error": ((summary(REWARD, standard_error=0.0),), "summary.standard_error: 0.0, its scores give"),
    "more failures than allowed": (
        tuple(
            edit
            for place in range(1, 5)
            for edit in (score({"valid": False, "score": None}, place), answer("no", place))
        ),
        "5 of 8 samples have no score, more than max_failed_fraction",
    ),
    "excluded samples that are not counted": ((summary(UPDATE, excluded=0),), "summary.excluded: 0, its table gives 2"),
    "samples that are not finite and not counted": (
        (summary(ROLLOUT, nonfinite=0),),
        "summary.nonfinite: 0, its index gives 1",
    ),
    "refused samples that nobody refused": ((summary(ROLLOUT, refused=1),), "summary.refused: 1, its index gives 0"),
    "samples that are not counted": ((summary(ROLLOUT, samples=7),), "summary.samples: 7, its index gives 8"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failed_scores_that_do_not_add_up_are_found(forger: Forger, kept: str, name: str):
    edits, expected = FAILURES[name]
    for edit in edits:
        edit(forger)
    forger.seal()
    found = told(forger, kept)
    assert any(expected in line for line in found), found
    assert unknown(kept) in found


def with_line(change: Callable[[list[str]], Any]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        lines = data.decode().splitlines(keepends=True)
        change(lines)
        return "".join(lines).encode()

    return edit


METRICS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a number": (
        lambda data: data.replace(b'"reward/ocr_failed": 2', b'"reward/ocr_failed": 0'),
        "line 7: reward/ocr_failed is 0, the artifacts give 2",
    ),
    "dropped": (with_line(lambda lines: lines.pop(4)), "line 5: stage is rollout, the artifacts give update"),
    "last one dropped": (with_line(lambda lines: lines.pop()), "lines: 14, the artifacts give 15"),
    "twice": (
        with_line(lambda lines: lines.insert(1, lines[1])),
        "line 3: stage is reward-ocr, the artifacts give update",
    ),
    "last one twice": (with_line(lambda lines: lines.append(lines[-1])), "lines: 16, the artifacts give 15"),
    "swapped": (
        with_line(lambda lines: lines.insert(0, lines.pop(1))),
        "line 1: stage is reward-ocr, the artifacts give rollout",
    ),
    "one name more": (
        lambda data: data.replace(b'"step": 0,', b'"step": 0, "loss": 1,', 1),
        "line 1: loss is 1, the artifacts give None",
    ),
    "no number": (lambda data: data.replace(b'"step": 0', b'"step": none', 1), "line 1: no JSON that can be read"),
    "nested deep": (
        with_line(lambda lines: lines.insert(0, "[" * 200_000 + "\n")),
        "line 1: no JSON that can be read",
    ),
    "a value nested deep": (
        lambda data: data.replace(b'"step": 0', b'"step": ' + b"[" * 800 + b"]" * 800, 1),
        "line 1: step is a list, the artifacts give 0",
    ),
    "empty": (lambda _: b"", "lines: 0, the artifacts give 15"),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_do_not_follow_from_the_artifacts_are_found(forger: Forger, name: str):
    change, expected = METRICS[name]
    path = forger.root / "metrics.jsonl"
    path.write_bytes(change(path.read_bytes()))
    assert told(forger) == [f"metrics.jsonl {expected}"]


def test_a_deeply_nested_index_of_embeddings_is_reported_as_wrong_bytes(forger: Forger):
    (slot,) = (path.parent for path in forger.store.rglob("manifest.1.json") if body_of(path)["stage"] == "embed")
    files = body_of(slot / "manifest.1.json")["files"]
    index = next(slot / entry["path"] for entry in files.values()).parent.parent / INDEX
    index.write_bytes(b"{}")
    entry = {"path": str(index.relative_to(slot)), "size": 0, "sha256": ""}
    seal_anew(slot / "manifest.1.json", lambda body: body["files"].update({INDEX: entry}))
    forger.seal()
    assert told(forger) == []
    index.write_bytes(b"[" * 200_000)
    assert [line.partition(" bytes: ")[2] for line in told(forger)] == ["200000 bytes, expected 2"]


def test_parts_that_retention_deleted_are_listed_as_not_provable(finished: Proved):
    found = audit(str(finished.store), RUN_ID)
    gone = [line.removeprefix(f"runs/{RUN_ID}/iterations/") for line in found.gone]
    assert gone == [
        "0000/rollout, generation 1: media", "0000/rollout, generation 1: tensors",
        "0000/update, generation 1: old", "0000/update, generation 1: optimizer",
        "0001/rollout, generation 1: tensors",
    ]  # fmt: skip
    assert "deleted by retention, so not provable: " + found.gone[0] in found.lines()


OLD = "iterations/0000/rollout"


def test_a_deletion_without_a_tombstone_is_found(forger: Forger):
    (forger.root / OLD / "dropped.1.media.json").unlink()
    missing = [line for line in told(forger) if line.endswith(" bytes: missing")]
    assert len(missing) == 4
    assert all(f"{OLD}/attempts/" in line and "/media/" in line for line in missing)
    assert f"{OLD}/dropped.1.media.json file: missing; a head names it" in told(forger)


def test_an_edited_tombstone_is_found(forger: Forger, kept: str):
    path = forger.root / OLD / "dropped.1.media.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"media"', b'"audio"'))
    assert any(line.startswith(f"{OLD}/dropped.1.media.json ") for line in told(forger))
    for field, value in (("manifest", "0" * 64), ("part", "tensors")):
        path.write_bytes(data)
        seal_anew(path, lambda body, field=field, value=value: body.update({field: value}))
        found = told(forger)
        assert f"{OLD}/dropped.1.media.json {field}: of another {field} than the one next to it" in " ".join(found)
        # A tombstone that is none excuses no deletion.
        assert sum(line.endswith(" bytes: missing") for line in found) == 4
    assert any("a head names" in line for line in told(forger, kept))


@pytest.mark.parametrize(("slot", "part"), [(UPDATE, "current"), (ROLLOUT, "index"), (ROLLOUT, "audio")])
def test_a_tombstone_of_a_part_that_retention_never_deletes_is_found(forger: Forger, slot: str, part: str):
    """Otherwise whoever wants a file unseen could delete it and write a tombstone."""
    other = body_of(forger.root / OLD / "dropped.1.media.json")
    path = forger.root / slot / f"dropped.1.{part}.json"
    place = f"runs/{RUN_ID}/{slot}"
    digest = sha256((forger.root / slot / "manifest.1.json").read_bytes())
    path.write_bytes(json.dumps({"body": other}).encode())
    seal_anew(path, lambda body: body.update(place=place, part=part, manifest=digest))
    assert any(line.startswith(f"{slot}/dropped.1.{part}.json part: retention deletes ") for line in told(forger))


def test_a_file_with_a_tombstone_is_compared_while_it_still_exists(forger: Forger):
    """A kill between the tombstone and the deletion leaves files: they are looked at, and may be missing."""
    path = forger.file(OLD, "media/00000.tar")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"other")
    (line,) = told(forger)
    assert line.endswith(f"media/00000.tar bytes: 5 bytes, expected {_size(forger, OLD)}")


def _size(forger: Forger, slot: str) -> int:
    return body_of(forger.root / slot / "manifest.1.json")["files"]["media/00000.tar"]["size"]


def test_a_reference_in_the_place_of_an_own_artifact_is_found(forger: Forger):
    """A record in the place of a manifest that names it is no manifest."""
    path = forger.root / ROLLOUT / "manifest.1.json"
    made = body_of(path)
    place = f"runs/other/{ROLLOUT}"
    shutil.copytree(forger.root / ROLLOUT, forger.store / place)
    seal_anew(forger.store / place / path.name, lambda body: body.update(place=place))
    named = {"url": str(forger.store / place), "generation": 1, "fingerprint": made["fingerprint"]}
    named |= {"manifest": sha256((forger.store / place / path.name).read_bytes())}
    kept = {name: made[name] for name in ("format", "kind", "place", "generation")}
    path.write_bytes(json.dumps({"body": kept | {"reference": named}}).encode())
    seal_anew(path, lambda _: None)
    found = told(forger)
    assert any(line.startswith(f"{ROLLOUT}/manifest.1.json manifest: ") for line in found), found


def test_wrong_arguments_exit_with_64_and_name_what_exists(finished: Proved, tmp_path: Path):
    def asked(*words: str) -> tuple[int, str]:
        ended = CliRunner().invoke(app, ["audit", *words])
        return ended.exit_code, " ".join(ended.output.split())

    store = str(finished.store)
    for words, said in (
        (("other", "--store", store), "there is no run 'other' in the store"),
        ((RUN_ID, "--store", str(tmp_path)), "it has no run at all"),
        (
            (RUN_ID, "--store", store, "--iteration", "9"),
            f"{RUN_ID} has no iteration 9; its iterations and policy versions are 0 to 3",
        ),
        (("", "--store", store), "run id '' must be letters"),
        ((f"../runs/{RUN_ID}", "--store", store), f"run id '../runs/{RUN_ID}' must be letters"),
        ((RUN_ID, "--store", store, "--head", "abc"), "--head abc: expected the 64 hexadecimal digits"),
        ((RUN_ID, "--store", store, "--public-key", str(tmp_path / "k")), "No such file or directory"),
    ):
        code, output = asked(*words)
        assert (code, said in output) == (64, True), output
    code, output = asked(RUN_ID, "--store", store, "--head", "0" * 64)
    assert (code, "1 fault in " in output) == (65, True)


def test_a_fragment_that_does_not_follow_from_the_scores_is_found(forger: Forger):
    def better(data: bytes) -> bytes:
        excerpt = json.loads(data)
        excerpt["scores"][0]["mean"] += 0.25
        return canonical_json(excerpt)

    path = forger.file("iterations/0001/fragment", "fragment.json")
    path.write_bytes(better(path.read_bytes()))
    forger.seal()
    name = str(path.relative_to(forger.root))
    assert told(forger) == [f"{name} scores: does not follow from samples, scores and warnings"]


def test_the_numbers_of_an_update_agree_with_its_last_step(forger: Forger):
    forger.manifest(UPDATE, lambda body: body["summary"].update(loss=0.001))
    forger.seal()
    assert told(forger) == [f"{UPDATE}/manifest.1.json summary.loss: 0.001, its last optimizer step gives 0.375"]


def test_names_of_files_are_printed_in_full(forger: Forger):
    path = forger.file(ROLLOUT, "media/00000.tar")
    path.write_bytes(b"")
    output = CliRunner().invoke(app, ["audit", RUN_ID, "--store", str(forger.store), "--quick"]).output
    rows = output.partition("newest head")[0].splitlines()[1:]
    assert f"runs/{RUN_ID}/{path.relative_to(forger.root)}" in "".join(
        row.split("bytes")[0].strip().split(" ")[0] for row in rows
    )


def test_many_faults_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch):
    """A run that lost its media has a fault for each of their files."""
    compared: list[object] = []

    def equal(one: Fault, other: object) -> bool:
        compared.append(other)
        return vars(one) == vars(other)

    monkeypatch.setattr(Fault, "__eq__", equal)
    findings = Findings("/store")
    for number in 2 * [*range(100)]:
        findings.add(f"/store/media/{number:05d}.tar", "bytes", "missing")
    assert [fault.file for fault in findings.faults] == [f"media/{number:05d}.tar" for number in range(100)]
    assert len(compared) <= 100
