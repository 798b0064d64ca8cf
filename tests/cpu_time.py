"""A limit of CPU time for each fast test. Load on the machine changes it little, other than wall time."""

import os
from collections.abc import Generator

import pytest

OPTION = "cpu_limit_s"


def add_option(parser: pytest.Parser) -> None:
    """Let a project state the limit."""
    parser.addini(
        OPTION, "CPU seconds of the body of a test without the mark `slow`, and of processes that it waited for"
    )


def spent_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended and were waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test without the mark ``slow`` that takes more than the limit."""
    before_s = spent_s()
    yield
    used_s, limit_s = spent_s() - before_s, float(item.config.getini(OPTION))
    on_cpu = item.config.getoption("--device", "cpu") == "cpu"
    if used_s > limit_s and on_cpu and item.get_closest_marker("slow") is None:
        pytest.fail(f"took {used_s:.3g} s of CPU time, at most {limit_s:g}: make it cheaper, or mark it slow")
