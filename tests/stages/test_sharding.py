"""Ranks that share one copy of the weights make the same samples and, rounding aside, the same policies as one rank."""

from pathlib import Path
from typing import Any

import pytest

from flows.requests import Run
from stages.artifacts import input_of
from stages.contracts import Request
from stages.policy import read_part
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.test_wan import LORA, recipe


def aside(request: Request, name: str) -> Request:
    return request.model_copy(update={"slot": f"{request.slot}-{name}"})


def started(tmp_path: Path, values: dict[str, Any]) -> Run:
    run = make_run(tmp_path, values)
    for request in (run.policy(), run.embed()):
        make(request, tmp_path)
    return run


def furthest(a: Request, b: Request, part: str) -> float:
    mine, others = (read_part(input_of(request.slot), part) for request in (a, b))
    assert mine.keys() == others.keys()
    return max(float((mine[name] - others[name]).abs().max()) for name in mine)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_samples_are_the_same_bytes_and_policies_the_same_but_for_rounding(
    lora: dict[str, Any] | None, wan_path: str, prompt_dir: str, tmp_path: Path
):
    run = started(tmp_path, recipe(wan_path, prompt_dir, lora))
    alone = run.rollout(0)
    make(alone, tmp_path)
    shared = aside(alone, "shared")
    make_on_ranks(shared, tmp_path, 2, "--dp-shard-size", "2")
    assert input_of(alone.slot).content == input_of(shared.slot).content

    for reward in run.rewards(alone.slot, 0):
        make(reward, tmp_path)
    update = run.update(0)
    make(update, tmp_path)
    on_four = aside(update, "on-four")
    make_on_ranks(on_four, tmp_path, 4, "--dp-shard-size", "2")
    for part, bound in (("current", 2e-4), ("old", 2e-4), ("ema", 2e-4), ("optimizer", 1e-5)):
        print(part, furthest(update, on_four, part))
    for part, bound in (("current", 2e-4), ("old", 2e-4), ("ema", 2e-4), ("optimizer", 1e-5)):
        assert furthest(update, on_four, part) < bound
