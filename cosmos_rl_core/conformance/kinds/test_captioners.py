"""Every captioner writes a caption for each medium, so no caption if there is no medium."""

from collections.abc import Mapping
from typing import Any

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.kinds.members import options_of

SHIPPED = {"text": {"text": "a sign"}, "endpoint": {"url": "http://host/v1", "model": "m", "instruction": "?"}}
"""Settings of shipped captioners that have no default."""


@pytest.mark.parametrize("captioner", plugins.known("captioners"))
def test_no_media_have_no_captions(captioner: str, plugin_settings: Mapping[str, Any]):
    options = options_of("captioners", captioner, plugin_settings, **SHIPPED.get(captioner, {}))
    if options is None:
        pytest.skip("its settings have no defaults")
    module = plugins.load("captioners", captioner)
    found = list(module.Captioner(options).captions([]))
    assert found == [], f"{module.__file__}: captions([]) yields {found!r}"
