"""Fixtures of the suite: one tiny pipeline a model plugin, and the device and data type of its computation."""

from pathlib import Path

import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.models.families import Family, family_of, has_autocast
from cosmos_rl_core.parallel.precision import ParamDtype


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device on which tests compute."""
    return torch.device("cpu")


@pytest.fixture(scope="session")
def families_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for tiny pipelines."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session", params=plugins.known("models"))
def family(request: pytest.FixtureRequest, families_dir: Path, device: torch.device) -> Family:
    """Return each model plugin."""
    return family_of(request.param, families_dir, device)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> ParamDtype:
    """Return the data type in which transformers compute."""
    if request.param == "bfloat16" and not has_autocast(device):
        pytest.skip("this device has no autocast")
    return request.param
