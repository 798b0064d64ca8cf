"""Damage and upgrades of a run, by the real command."""

import json
from pathlib import Path

import pytest

from cosmos_rl_core.canonical import canonical_json, digest
from flows.planning.plan import read_plan
from stages.artifacts.request import fingerprint_of, recipe_of
from stages.artifacts.slots import current_of
from tests.e2e.flow_process import AFTER_LAST_UPDATE, RUN_ID, Flows, require_same_run, require_untouched

UPDATE, ROLLOUT = "iterations/0002/update", "iterations/0002/rollout"


def one_digit_of_a_sample_id(path: Path) -> bytes:
    data = path.read_bytes()
    sample_id = json.loads(data)["body"]["layout"]["steps"][0][0][0]
    other = sample_id[:-1] + ("1" if sample_id.endswith("0") else "0")
    return data.replace(sample_id.encode(), other.encode(), 1)


def refused(flows: Flows, path: Path, data: bytes) -> None:
    """The command ends with 65, names the file, and leaves everything as it is."""
    before, kept = flows.manifests(), path.read_bytes()
    assert data != kept
    path.write_bytes(data)
    assert str(path) in flows.run(expect=65)
    path.write_bytes(kept)
    require_untouched(flows, before)
    assert not list(flows.root.rglob("invalidated.*.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("with_prefect")
def test_what_was_changed_between_a_kill_and_the_next_command_is_found(flows: Flows, reference: Flows) -> None:
    summary = flows.root / "iterations/0000/reward-ocr/manifest.1.json"
    score = json.dumps(json.loads(summary.read_bytes())["body"]["summary"]["ocr"])
    refused(flows, summary, summary.read_bytes().replace(f'"ocr":{score}'.encode(), b'"ocr":0.925'))

    flows.forget(f"{UPDATE}/manifest.1.json", *AFTER_LAST_UPDATE)
    layout = flows.root / UPDATE / "layout.1.json"
    refused(flows, layout, one_digit_of_a_sample_id(layout))

    flows.forget(f"{ROLLOUT}/manifest.1.json")
    first, second = (flows.markers(ROLLOUT, index)[0] for index in (0, 1))
    refused(flows, second, first.read_bytes())
    refused(flows, second, second.read_bytes().replace(b"00001.tar", b"00000.tar"))

    flows.run()
    require_same_run(flows, reference)


@pytest.mark.slow
@pytest.mark.usefixtures("with_prefect")
def test_a_run_of_an_older_version_goes_on_where_remake_asks_for_it(flows: Flows, reference: Flows) -> None:
    slot = str(flows.root / "report")
    _, manifest = current_of(slot)
    assert manifest is not None
    recipe = recipe_of("report", 0, manifest.iteration, manifest.seed, manifest.config)
    older = {"version": 0, "recipe": recipe, "fingerprint": fingerprint_of(recipe, manifest.inputs)}
    (flows.root / "report" / "manifest.1.json").write_bytes(manifest.model_copy(update=older).sealed())
    plan = flows.root / "plan.json"
    body = json.loads(plan.read_bytes())["body"]
    body["stage_versions"]["report"] = 0
    plan.write_bytes(canonical_json({"body": body, "sha256": digest(body)}))

    before = flows.manifests()
    said = flows.run(expect=64)
    assert f"report 0 -> {manifest.version}" in said
    assert "of another version: 1 artifact, " in said
    require_untouched(flows, before)
    assert "report" in flows.command("status")

    flows.run("--remake")
    assert set(flows.manifests()) - set(before) == {"report/manifest.2.json"}
    assert read_plan(flows.store, RUN_ID).stage_versions["report"] == manifest.version
    require_same_run(flows, reference)
    flows.run()
    assert set(flows.manifests()) - set(before) == {"report/manifest.2.json"}
