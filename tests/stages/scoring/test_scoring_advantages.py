"""Advantages of a rollout that are pairs."""

from typing import Any

import pandas as pd
import pytest

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.errors import ArtifactError, ConfigError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.scoring.advantages import advantages
from tests.stages.conftest import make
from tests.stages.training.test_forward_passes import scored
from tests.stages.training.test_pairs import dpo_recipe, elsewhere


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Request:
    """An update on a scored rollout, made by one process."""
    folder = tmp_path_factory.mktemp("pairs")
    request = scored(dpo_recipe(), folder)
    make(request, folder)
    return request


def test_a_rollout_without_any_pair_is_refused_with_the_count(asked: Request):
    rollouts = [Artifact(source) for source in asked.inputs["rollouts"]]
    algorithm = algorithm_of(elsewhere(asked, "gap", min_gap=1e9).settings(contracts.Update).algorithm)
    with pytest.raises(ArtifactError, match="no pair can be trained on: 12 were left out"):
        advantages(asked, rollouts, algorithm)


@pytest.mark.parametrize(
    ("beats", "says"),
    [
        (None, "must return beats"),
        (lambda ids: [ids[0], *[""] * 7], "pairs .* with"),
        (lambda ids: [ids[-1], *[""] * 7], "expected other samples of its prompt"),
        (lambda ids: [""] * 8, "must be used if in a pair"),
    ],
)
def test_pairs_of_a_plugin_that_cannot_be_trained_are_refused(asked: Request, beats: Any, says: str):
    class Broken:
        needs = Needs(unit="pair")

        def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
            table = samples.assign(advantage=1.0, used=True, dropped=0)
            return table if beats is None else table.assign(beats=beats(table["sample_id"].tolist()))

        def loss(self, velocity: Any, batch: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(ConfigError, match=says):
        advantages(asked, [Artifact(source) for source in asked.inputs["rollouts"]], Broken())
