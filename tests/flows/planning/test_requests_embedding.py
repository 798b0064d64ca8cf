"""Which prompts are embedded together, and when."""

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.planning import requests
from flows.planning.plan import Settings, plan_of
from flows.planning.run import Run
from flows.post_train import post_train
from flows.sizes import costs
from stages.contracts import Embed
from tests.flows.by_hand import ByHand
from tests.hand_made import make, planned


@pytest.fixture
def large(words) -> None:
    """As many prompts as are embedded in about five stages: two an iteration, 128 iterations together."""
    words(*(f'a sign that says "W{number}"' for number in range(1300)))


def waves(run: Run) -> list[str]:
    return [wave.name for wave in post_train(run)]


def of_prompts(request) -> set[str]:
    return {prompt.id for prompt in request.settings(Embed).prompts}


def test_few_prompts_are_embedded_before_everything_else(recipe, tmp_path):
    run = planned(recipe(), tmp_path)
    assert [name for name in waves(run) if "embed" in name] == ["embed"]
    assert of_prompts(run.prepared.embed_at(0)) == {prompt.id for prompt in run.plan.prompts}


@pytest.mark.usefixtures("large")
def test_prompts_of_a_large_set_are_embedded_when_iterations_need_them(recipe, tmp_path):
    run = planned(recipe(), tmp_path, iterations=130)
    names = waves(run)
    assert [name for name in names if "embed" in name] == ["iteration-0000/embed", "iteration-0128/embed"]
    assert names.index("iteration-0128/embed") == names.index("iteration-0128/rollout") - 1
    for k in (0, 127, 128, 129):
        embedded = of_prompts(run.prepared.embed_at(k))
        assert {prompt.id for prompt in run.plan.prompts_of(k)} <= embedded
        assert len(embedded) == 256
    assert run.prepared.embed_at(0).slot == run.prepared.embed_at(127).slot != run.prepared.embed_at(128).slot


@pytest.mark.usefixtures("large")
def test_each_stage_embeds_as_many_iterations_as_all_before_it_up_to_a_bound(recipe):
    plan = plan_of(Settings(recipe()))
    ranges = [costs.embedded_together(plan.recipe, 10**6, k) for k in range(128 * 64)]
    assert all(found is not None and k in found for k, found in enumerate(ranges))
    sizes = {found.start // 128: len(found) // 128 for found in ranges if found is not None}
    assert sizes == {0: 1, 1: 1, 2: 2, 4: 4, 8: 8, 16: 16, 32: 16, 48: 16}


@pytest.mark.usefixtures("large")
def test_more_iterations_leave_the_embeddings_of_a_large_set_current(recipe, tmp_path):
    shorter, longer = (planned(recipe(), tmp_path, run_id=f"of-{n}", iterations=n) for n in (3, 400))
    assert [shorter.prepared.embed_at(k) for k in range(300)] == [longer.prepared.embed_at(k) for k in range(300)]


@pytest.mark.usefixtures("large")
def test_a_rollout_reads_the_embeddings_of_its_own_prompts(recipe, tmp_path):
    run = planned(recipe(), tmp_path, iterations=130)
    make(requests.policy(run), {"current/w": b"w"})
    make(run.prepared.embed_at(0), {"index.json": b"{}"})
    (read,) = requests.rollout(run, 0).inputs["embeddings"]
    assert read.url == run.prepared.embed_at(0).slot


@pytest.mark.usefixtures("large")
def test_a_stale_rollout_finds_its_embeddings_before_it_begins(recipe, tmp_path):
    overrides = ("train.staleness=1", "rollout.n_generation=8", "train.train_batch_per_replica=2048")
    run = planned(recipe(), tmp_path, iterations=3, overrides=overrides)
    by_hand = ByHand()
    for wave in post_train(run):
        by_hand.launch(wave.name, *(step.request() for step in wave.steps))
    embedded = [name for name in by_hand.waves if name.endswith("/embed")]
    assert embedded == [f"iteration-{k:04d}/embed" for k in range(3)]


@pytest.mark.usefixtures("large")
def test_the_budget_counts_the_prompts_that_iterations_need(recipe):
    path = recipe()
    plan = plan_of(Settings(path))
    assert costs.embedded_prompts(plan.recipe, len(plan.prompts)) == 256
    each = costs.embedding_bytes(plan.recipe)
    assert plan_of(Settings(path, overrides=(f"rollout.store_budget_gb={each * 257 / 1e9}",)))
    with pytest.raises(ConfigError, match=r"text embeddings would take .* \(512 of "):
        plan_of(Settings(path, iterations=200, overrides=(f"rollout.store_budget_gb={each * 257 / 1e9}",)))
