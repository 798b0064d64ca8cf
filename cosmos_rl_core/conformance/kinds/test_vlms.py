"""Every plugin of vision-language models names classes of transformers."""

import pytest
import transformers

from cosmos_rl_core import plugins


@pytest.mark.parametrize("vlm", plugins.known("vlms"))
def test_its_architectures_are_classes_of_transformers(vlm: str):
    module = plugins.load("vlms", vlm)
    assert module.PROCESSORS, f"{module.__file__}: PROCESSORS is empty"
    for architecture, processor in module.PROCESSORS.items():
        writes = hasattr(getattr(transformers, architecture, None), "generate")
        wanted = getattr(processor, "writes_texts", True)
        assert writes == wanted, f"{module.__file__}: {architecture} is no class of transformers that writes texts"
