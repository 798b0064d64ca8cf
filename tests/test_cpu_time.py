"""The limit of CPU time that fast tests have."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import subprocess, sys, time
import pytest

SPIN = "import time; began = time.process_time()\\nwhile time.process_time() < began + 0.6: pass"

def test_waits(): time.sleep(0.6)

def test_computes(): exec(SPIN)

def test_has_another_process_compute(): subprocess.run([sys.executable, "-c", SPIN], check=True)

@pytest.mark.slow
def test_may_compute(): exec(SPIN)
"""


@pytest.mark.processes
def test_what_computes_longer_than_the_limit_fails_unless_it_is_slow(pytester: pytest.Pytester):
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\ncpu_limit_s = "0.5"\nmarkers = ["slow"]')
    pytester.makeconftest("from tests.cpu_time import add_option as pytest_addoption, pytest_runtest_call")
    pytester.makepyfile(TESTS)
    ended = pytester.runpytest_inprocess("-p", "no:xdist", "-q")
    ended.assert_outcomes(passed=2, failed=2)
    ended.stdout.fnmatch_lines(["*took * s of CPU time, at most 0.5: make it cheaper, or mark it slow*"])
