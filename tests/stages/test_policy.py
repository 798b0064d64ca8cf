"""A policy that begins from weights of its own: where it began is its reference, not the base on disk."""

from pathlib import Path

import torch

from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from tests.stages.conftest import make, make_run
from tests.stages.small_video import one_iteration, recipe


def test_the_reference_of_a_policy_from_scratch_is_where_it_began(wan_path: str, prompt_dir: str, tmp_path: Path):
    """Against a run whose base is the pipeline that the one from scratch begins as."""
    values = recipe(wan_path, prompt_dir, None)
    values["policy"]["from_scratch"] = True
    fresh = make_run(tmp_path, values, "fresh")
    one_iteration(fresh, tmp_path, 1)
    make(requests.export(fresh, 0), tmp_path)
    Artifact(input_of(fresh.slots.version(0, "export"))).bring_to(tmp_path / "exported")

    based = make_run(tmp_path, recipe(str(tmp_path / "exported/pipeline"), prompt_dir, None), "based")
    one_iteration(based, tmp_path, 1)
    updates = [Artifact(input_of(run.slots.policy(1))) for run in (fresh, based)]
    found, expected = (read_table(update, METRICS) for update in updates)
    assert found.equals(expected)
    # The first step finds the policy where its reference is, the second does not.
    assert [kl > 0 for kl in found["kl"]] == [False, True]

    began = read_part(input_of(fresh.slots.policy(0)), "current")
    reference = read_part(input_of(fresh.slots.policy(1)), "reference")
    assert reference.keys() == began.keys()
    assert all(torch.equal(reference[name], began[name]) for name in began)
    # The other one finds it in its base.
    assert not updates[1].names("reference/")
