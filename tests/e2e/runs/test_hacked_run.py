"""A policy that raises its reward by ruining its pictures, and the default limits that stop it."""

from pathlib import Path

import pytest

from flows.warning.decisions import decisions_on
from stages.artifacts.slots import current_of
from tests.e2e.flow_process import NO_PREFECT, Flows

RECIPE = "configs/tiny/nft.toml"
SMALL_FILES = "rewards=[{ weight = 1.0, fn = { name = 'jpeg' } }]"
"""Pale, flat pictures compress best; the prompts ask for signs that can be read."""
ITERATIONS = 16


def judged(flows: Flows) -> dict[int, list[str]]:
    """The words of the decisions on each iteration whose limits tripped."""
    found: dict[int, list[str]] = {}
    for k in range(ITERATIONS):
        _, manifest = current_of(str(flows.root / f"iterations/{k:04d}/warn"))
        if manifest is not None and (words := [one.word for one in decisions_on(manifest)]):
            found[k] = words
    return found


@pytest.mark.slow
def test_a_run_that_hacks_its_reward_is_stopped_by_the_statistics_of_its_pictures(tmp_path: Path):
    flows = Flows(tmp_path, {}, RECIPE)
    flows.program = NO_PREFECT
    options = [
        word
        for change in (SMALL_FILES, "validation.n_generation=1", "early_warning.on_trip=stop")
        for word in ("--set", change)
    ]
    said = flows.run(*options, expect=65)
    ((k, words),) = judged(flows).items()
    assert words == ["stopped"]
    assert 0 < k < ITERATIONS
    assert f"iteration {k} exceeds its limits" in said
    assert "contrast of pixel_statistics fell" in said
    assert not (flows.root / f"iterations/{k:04d}/update").exists()
    # Nothing but another recipe lets it go on: it hacks the reward that trains it.
    assert f"iteration {k} exceeds its limits" in flows.run(*options, expect=65)
    assert judged(flows) == {k: ["stopped"]}
    assert "contrast of pixel_statistics fell" in flows.command("status")
    assert flows.nothing_is_left()
