"""Scores of samples as tables."""

import json
from typing import Any

import pandas as pd

from cosmos_rl_core.rewards._base.answers import finite
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.formats.tables import read_table


def scored_numbers(label: str, artifact: Artifact) -> Any:
    """Return a table of the scored samples, by id: ``prompt_id``, and every finite number that the reward gave."""
    table = read_table(artifact, contracts.Reward.SCORES).set_index("sample_id")
    table = table[table["valid"]]
    details = read_table(artifact, contracts.Reward.ANSWERS).set_index("sample_id")["details"]
    rows = [_numbers(str(details[sample])) for sample in table.index]
    found = pd.DataFrame(rows, index=table.index, dtype="float64")
    return found.assign(**{label: table["score"].astype("float64"), "prompt_id": table["prompt_id"]})


def _numbers(details: str) -> dict[str, float]:
    return {name: number for name, value in json.loads(details).items() if (number := finite(value)) is not None}
