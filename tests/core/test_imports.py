"""The garbage collector is off during imports and comes back as it was."""

import gc

import pytest

from cosmos_rl_core.imports import uncollected


@uncollected()
def fail_to_import() -> None:
    """Look at the collector, also after a block within the block."""
    assert not gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
    assert not gc.isenabled()
    raise ImportError("no such library")


def test_the_collector_is_off_inside_and_as_before_afterwards():
    assert gc.isenabled()
    with pytest.raises(ImportError, match="no such library"):
        fail_to_import()
    assert gc.isenabled()
