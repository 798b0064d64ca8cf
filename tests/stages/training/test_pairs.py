"""Updates on pairs: no optimizer step, micro-batch or rank divides one, and both members have the same draws."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.algorithms._base import Batch, algorithm_of
from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.errors import ConfigError
from flows.auditing import differing
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.scoring.advantages import advantages
from stages.training.draws import LatentDraws, Stored
from stages.training.order import steps_of
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.training.test_forward_passes import TOKENS, gradients_of, scored, sizes_of_forwards, with_tokens
from tests.stages.training.test_transitions import recipe, table_of

LEVELS = (1.0, 0.7, 0.5, 0.2, 0.0)


def dpo_recipe(**chosen: Any) -> dict[str, Any]:
    """Two prompts of four samples, 12 pairs at two noise levels, in two optimizer steps."""
    values = recipe({"num_steps": 4, "solver": "euler"})
    algorithm = {"type": "dpo", "dataset": values["train"]["train_policy"]["dataset"], "beta": 100.0, "pairs": "all"}
    sizes = {"mini_batch": 4, "batch_size_per_optimize": 4, "timesteps_fraction": 0.5}
    values["train"]["train_policy"] = algorithm | sizes | chosen
    return values


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Request:
    """An update on a scored rollout, made by one process."""
    folder = tmp_path_factory.mktemp("pairs")
    request = scored(dpo_recipe(), folder)
    make(request, folder)
    return request


def elsewhere(request: Request, slot: str, **options: Any) -> Request:
    """The same update with other options."""
    own = request.settings(contracts.Update)
    config = own.model_copy(update={"algorithm": own.algorithm.model_copy(update=options)})
    return request.model_copy(update={"config": config, "slot": f"{request.slot}-{slot}"})


def steps_in(request: Request) -> list[list[list[str]]]:
    layout = json.loads(next(Path(request.slot).rglob("layout.1.json")).read_bytes())["body"]
    return layout["layout"]["steps"]


def advantages_in(request: Request) -> Any:
    return table_of(Artifact(input_of(request.slot)), contracts.Update.ADVANTAGES)


def pairs_in(table: Any) -> Counter[tuple[str, str]]:
    """Keys of winners and losers that a table of advantages names."""
    rows = zip(table["sample_id"], table["beats"], strict=True)
    return Counter((f"0/{winner}", f"0/{loser}") for winner, losers in rows for loser in losers.split())


def units(step: list[list[str]]) -> list[tuple[str, str]]:
    return [(batch[i], batch[i + 1]) for batch in step for i in range(0, len(batch), 2)]


# ---- order and sizes


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_no_micro_batch_divides_a_pair(num_shares: int):
    pairs = [(f"{place}/w{i}", f"{place}/l{i}") for place in (0, 1) for i in range(7)]
    how: dict[str, Any] = {"passes": 2, "per_pass": 2, "seed": 3, "iteration": 1}
    steps = steps_of(pairs, mini_batch=4, num_shares=num_shares, **how)
    assert len(steps) == 4
    for epoch in (steps[:2], steps[2:]):
        assert sorted(chain.from_iterable(map(units, epoch))) == sorted(pairs)
        assert [len(units(step)) for step in epoch] == [7, 7]
    for batch in chain.from_iterable(steps):
        assert len(batch) in {2, 4}
        assert len({key.partition("/")[0] for key in batch}) == 1
    # Ranks divide micro-batches otherwise, and never the optimizer steps.
    alone = steps_of(pairs, mini_batch=4, num_shares=1, **how)
    assert [sorted(units(step)) for step in steps] == [sorted(units(step)) for step in alone]


# ---- plans


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"mini_batch": 3}, "mini_batch = 3 divides a pair"),
        ({"mini_batch": 1}, "greater than or equal to 2"),
        ({"pairs": "best_worst", "batch_size_per_optimize": 2}, r"plans 4 optimizer steps .* at most 2 pairs"),
    ],
)
def test_a_plan_refuses_what_would_divide_pairs_or_leave_steps_without(
    chosen: dict[str, Any], says: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=says):
        scored(dpo_recipe(**chosen), tmp_path)


def test_pairs_of_recorded_steps_are_refused():
    sample = dpo_recipe()["policy"]["diffusers"]["sample"]
    config = contracts.SolverConfig.model_validate(sample | {"solver": "flow_sde"})
    with pytest.raises(ConfigError, match="recorded sampler steps"):
        Needs(unit="pair", train_on=(0,)).check(config)


# ---- updates


def test_every_pair_is_trained_once_whole_and_the_first_loss_is_log_2(asked: Request):
    table, steps = advantages_in(asked), steps_in(asked)
    pairs = pairs_in(table)
    assert Counter(chain.from_iterable(map(units, steps))) == pairs
    assert [len(batch) % 2 for batch in chain.from_iterable(steps)].count(1) == 0
    summary: dict[str, Any] = Artifact(input_of(asked.slot)).manifest.summary
    assert summary["pairs"] == len(pairs) == 12 - summary.get("pairs_dropped", 0)
    reward = {f"0/{one}": value for one, value in zip(table["sample_id"], table["reward"], strict=True)}
    assert all(reward[winner] > reward[loser] for winner, loser in pairs)
    metrics = table_of(Artifact(input_of(asked.slot)), contracts.METRICS)
    assert len(metrics) == 2
    assert metrics["loss_max"][0] == float(torch.tensor(2.0, device="cpu").log())
    assert metrics["margin"][0] == metrics["accuracy"][0] == 0
    assert metrics["margin"][1] != 0


def test_members_of_a_pair_share_all_draws_which_do_not_depend_on_the_batch(asked: Request):
    table = advantages_in(asked)
    stored = Stored.read(asked, table.assign(key=[f"0/{one}" for one in table["sample_id"]]), ["behaviour"])
    draws = LatentDraws(stored, (0, 0), LEVELS, 3, members=2)
    first, second = list(pairs_in(table))[:2]
    both, alone = draws([*first, *second], 0, (0, 1), 1.0), draws([*second], 0, (1,), 1.0)
    assert both.levels == 4  # two members at two noise levels share the conditioning of their prompt
    assert {len(tensor) for tensor in both.conditioning.values()} == {2}
    assert isinstance(both.batch, Batch)
    for tensor in (both.batch.t, both.batch.noise, both.batch.x_0):
        rows = tensor.view(2, 2, 2, *tensor.shape[1:])  # pair, level, member
        shared = tensor is not both.batch.x_0
        assert torch.equal(rows[:, :, 0], rows[:, :, 1]) == shared
        assert torch.equal(rows[:, 0], rows[:, 1]) != shared
    assert both.batch.advantages is not None
    assert both.batch.advantages.tolist() == [1.0, -1.0] * 4
    for row, key in zip((0, 1, 4, 5), (*first, *second), strict=True):
        assert torch.equal(both.batch.x_0[row], stored.tensors[key]["latents"])
    for name in ("x_0", "noise", "t"):
        assert torch.equal(getattr(both.batch, name)[6:], getattr(alone.batch, name))
    assert both.keys[6:] == alone.keys
    assert both.keys[0] == both.keys[1] != both.keys[2]


@pytest.mark.processes
def test_two_ranks_train_the_pairs_of_one_process_in_its_order(asked: Request, tmp_path: Path):
    request = asked.model_copy(update={"slot": f"{asked.slot}-ranks"})
    made = make_on_ranks(request, tmp_path, 2)
    assert made.numerics["world_size"] == 2
    shared, alone = steps_in(request), steps_in(asked)
    assert [units(step) for step in shared] == [units(step) for step in alone]
    one, other = (Artifact(input_of(each.slot)) for each in (asked, request))
    names = [name for name in one.names() if not name.startswith(contracts.RECORDS)]
    assert one.read(contracts.Update.ADVANTAGES) == other.read(contracts.Update.ADVANTAGES)
    found = [each for name in names for each in differing.of_files(name, one.read(name), other.read(name))]
    assert [each for each in found if not each.tolerated] == []


def test_sums_of_gradients_do_not_depend_on_the_forward_passes(asked: Request, tmp_path: Path):
    single = elsewhere(asked, "single", mini_batch=2)
    with sizes_of_forwards() as rows:
        make(single, tmp_path)
    assert {*rows} == {2}
    together = with_tokens(asked, 9 * TOKENS)
    with sizes_of_forwards() as rows:
        make(together, tmp_path)
    assert {*rows} <= {4, 8}
    expected = gradients_of(single)
    for other in (asked, together):
        assert torch.linalg.vector_norm(gradients_of(other) - expected) < 1e-4 * torch.linalg.vector_norm(expected)


def test_a_lack_of_memory_never_divides_a_pair(asked: Request, tmp_path: Path):
    request = elsewhere(asked, "halved", mini_batch=2)
    make(request, tmp_path, halve=True)
    assert {len(batch) for step in steps_in(request) for batch in step} == {2}


def test_shuffled_rewards_make_other_pairs(asked: Request):
    table, request = advantages_in(asked), elsewhere(asked, "shuffled", shuffle_rewards=True)
    rollouts = [Artifact(source) for source in request.inputs["rollouts"]]
    shuffled = advantages(request, rollouts, algorithm_of(request.settings(contracts.Update).algorithm))
    assert sorted(shuffled["reward"]) == sorted(table["reward"])
    assert pairs_in(shuffled) != pairs_in(table)


# ---- preferences of people


def test_an_update_trains_on_the_pairs_of_a_file(asked: Request, tmp_path: Path):
    """They are the worst of each prompt before the best, and one of another rollout."""
    table = advantages_in(asked)
    ranked = [group.sort_values("reward")["sample_id"].tolist() for _, group in table.groupby("prompt_id")]
    pairs = [(some[0], some[-1]) for some in ranked]
    file = tmp_path / "people.csv"
    lines = ["winner,loser", *map(",".join, [*pairs, ("i0007-p-000", "i0007-p-001")])]
    file.write_text("\n".join(lines), encoding="utf-8")
    request = elsewhere(asked, "people", pairs="file", preferences=str(file))
    config = request.settings(contracts.Update)
    config = config.model_copy(update={"algorithm": config.algorithm.pinned()})
    made = make(request.model_copy(update={"config": config}), tmp_path)
    assert (made.summary["pairs"], made.summary["pairs_elsewhere"]) == (2, 1)
    assert "pairs_dropped" not in made.summary
    expected = Counter((f"0/{winner}", f"0/{loser}") for winner, loser in pairs)
    assert pairs_in(advantages_in(request)) == expected
    assert Counter(chain.from_iterable(map(units, steps_in(request)))) == expected


def test_a_plan_pins_the_file_and_a_run_with_another_one_is_refused(tmp_path: Path):
    file = tmp_path / "people.jsonl"
    file.write_text('{"winner": "a", "loser": "b"}\n', encoding="utf-8")
    values = dpo_recipe(pairs="file", preferences=str(file))
    algorithm = make_run(tmp_path / "runs", values).plan.recipe.train.train_policy
    assert algorithm.identity()["preferences_count"] == 1
    assert make_run(tmp_path / "runs", values).plan.recipe.train.train_policy == algorithm
    file.write_text('{"winner": "b", "loser": "a"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="preferences_sha256"):
        make_run(tmp_path / "runs", values)
