"""Stages of a profile that have no devices."""

from cosmos_rl_core.config.parallelism import ELASTIC_STAGES
from flows.checking.misplaced import misplaced
from stages.registry import STAGES
from tests.flows.devices.test_worker_devices import launch


def test_default_elastic_stages_have_units_and_others_are_refused_by_name() -> None:
    assert all(STAGES[stage].elastic for stage in ELASTIC_STAGES)
    assert misplaced(launch()) == []
    (found,) = misplaced(launch(elastic={"max": 2, "stages": ["rollout", "update"]}))
    assert found.startswith("launch.elastic.stages.update: unknown elastic stage; known: ")
    assert "vlm_evaluate" in found
