"""The fixtures of the suite of models, and what of it is left to `make test-all`."""

from collections.abc import Iterator

import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.models.conftest import dtype, families_dir, family
from cosmos_rl_core.models import qwen_image_edit

__all__ = ["dtype", "families_dir", "family"]


def exhaustive() -> set[str]:
    """Return the first model whose tokens are packed and the first whose are not: every case of theirs is fast."""
    models = {plugins.load("models", name).SPEC.packing > 1: name for name in reversed(plugins.known("models"))}
    return set(models.values())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave half precision, and sampling without guidance, of all other models to `make test-all`."""
    every_case_of = exhaustive()
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        seldom = given.get("dtype") == "bfloat16" or given.get("guidance_scale") == 1.0
        if seldom and "family" in given and given["family"] not in every_case_of:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def small_references() -> Iterator[None]:
    """Let Qwen-Image-Edit scale pictures to 128 x 128 pixels for its VAE, which takes seconds for 1024 x 1024."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_image_edit, "VAE_PIXELS", 128 * 128)
        patch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 128 * 128)
        yield
