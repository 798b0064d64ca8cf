"""One tiny pipeline a model plugin, shared by all that tests conformance."""

from pathlib import Path

import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.parallel.precision import ParamDtype
from tests.families import Family, family_of, has_autocast


@pytest.fixture(scope="session")
def families_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session", params=plugins.known("models"))
def family(request: pytest.FixtureRequest, families_dir: Path, device: torch.device) -> Family:
    """Each model plugin there is."""
    return family_of(request.param, families_dir, device)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> ParamDtype:
    """What transformers compute with."""
    if request.param == "bfloat16" and not has_autocast(device):
        pytest.skip("this device has no autocast")
    return request.param
