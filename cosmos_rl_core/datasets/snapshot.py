"""A dataset that ``cosmos-flows preprocess`` has prepared. A run pins its newest snapshot, or the one that is named."""

from typing import Literal

from cosmos_rl_core.config.train import SnapshotOptions


class Options(SnapshotOptions):
    """Name of the dataset, and which of its media are used."""

    name: Literal["snapshot"] = "snapshot"  # pyright: ignore[reportIncompatibleVariableOverride]
