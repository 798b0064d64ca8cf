"""What the ranks of a training tell each other before a policy is written."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import CosmosRLError
from cosmos_rl_core.parallel.distributed import Group
from tests.stages.ranks import start_ranks
from tests.stages.training.test_trainer import both, conditioning_of, trainer_of


def write_and_note_what_is_told(folder: str) -> None:
    group: Any = Group(60.0, Parallelism(world_size=2))
    trainer: Any = trainer_of(folder, "sft", LoraConfig(r=4), group=group)
    trainer.step(0, both(conditioning_of(folder)), 4, 1)
    trainer.context.attempt = SimpleNamespace(put=lambda *_: None, put_json=lambda *_: None)
    told: list[int] = []
    gather = group.gather

    def noted(value: Any) -> list[Any]:
        told.append(len(json.dumps(value)))
        return gather(value)

    group.gather = noted
    trainer.write(["ema"], 0)
    group.close()
    assert max(told) < 500 < sum(map(len, trainer.weights.parameters))


@pytest.mark.processes
def test_ranks_that_agree_tell_one_digest_not_the_checksums_of_all_tensors(tmp_path: Path):
    """512 ranks would get 512 times the checksums of every tensor of every part."""
    folder = str(tiny_pipelines.save("sd3", tmp_path / "sd3"))
    start_ranks(partial(write_and_note_what_is_told, folder), tmp_path, 2, 120.0)


def end_with_one_bit_of_the_last_rank_changed(folder: str) -> None:
    group = Group(60.0, Parallelism(world_size=4, dp_shard_size=2))
    trainer = trainer_of(folder, "sft", None, group=group)
    trainer.step(0, both(conditioning_of(folder)), 4, 1)
    rows = trainer.weights.here("ema")
    name = max(rows, key=lambda each: rows[each].numel())
    if group.rank == 3:
        rows[name].view(torch.int32).reshape(-1)[5] ^= 1
    # Ranks 0 and 2 hold the other rows.
    found = rf"different bits of 1 of \d+ tensors, e\.g\. rows 1 of ema/{re.escape(name)};"
    with pytest.raises(CosmosRLError, match=found):
        trainer.write(["ema"], 0)
    group.close()


@pytest.mark.processes
def test_all_ranks_name_rows_that_differ_also_those_that_hold_other_rows(tmp_path: Path):
    folder = str(tiny_pipelines.save("sd3", tmp_path / "sd3"))
    start_ranks(partial(end_with_one_bit_of_the_last_rank_changed, folder), tmp_path, 4, 120.0)
