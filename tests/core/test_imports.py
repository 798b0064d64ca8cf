"""What is loaded at the start: imports without the garbage collector or a warning, and models once in a server."""

import gc
import logging
from collections.abc import Iterator

import pytest

from cosmos_rl_core.imports import (
    WARNS,
    Load,
    is_ready,
    loaded,
    loads,
    make_ready,
    uncollected,
    without_torchvision_warnings,
)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger of transformers, afterwards as it was."""
    logger = logging.getLogger(WARNS)
    before = [*logger.filters]
    yield logger
    logger.filters[:] = before


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


def test_a_block_without_the_collector_leaves_the_log_alone(logger: logging.Logger):
    logger.filters.clear()
    with uncollected():
        assert logger.filters == []
    assert logger.filters == []


def test_only_the_warning_that_torchvision_is_missing_is_left_out(logger: logging.Logger, caplog):
    without_torchvision_warnings()
    with caplog.at_level(logging.WARNING):
        logger.addHandler(caplog.handler)
        logger.warning("`A` requires torchvision (not installed); falling back to `B`")
        logger.warning("another one")
        logger.removeHandler(caplog.handler)
    assert {record.message for record in caplog.records} == {"another one"}


def read(name: str, size: int) -> bytearray:
    """Load something."""
    return bytearray(name.encode() * size)


def test_loads_of_a_process_are_recorded_as_calls_with_their_bytes():
    size = 2**26
    assert loaded(read, "a", size) == read("a", size)
    load = loads()[-1]
    assert load[:3] == (__name__, "read", ["a", size])
    assert size <= load.num_bytes < 2 * size


def test_an_object_that_is_ready_is_given_once_and_only_to_an_equal_call():
    load, found = Load(__name__, "read", ["b", 3], 0), bytearray(b"ready")
    assert not is_ready(load)
    make_ready(load, found)
    assert is_ready(load)
    assert loaded(read, "b", 2) == b"bb"
    assert loaded(read, "b", 3) is found
    assert not is_ready(load)
    assert loaded(read, "b", 3) == b"bbb"
