"""Runs as they are read from a store."""

from flows.planning import requests
from flows.planning.steps import read_run
from stages.artifacts.generations import has_begun
from tests.hand_made import begin, make_run


def test_an_iteration_counts_from_its_first_layout_on(recipe, tmp_path):
    run = make_run(recipe(), tmp_path)
    assert read_run(run.store_url, "hand").recipe.train.num_iterations == 2
    begin(requests.rollout(run, 2), layout={"shards": [["a"]]})
    assert has_begun(run.slots.iteration(2, "rollout"))
    assert read_run(run.store_url, "hand").recipe.train.num_iterations == 3
