"""One Prefect server for all flows of a session, one uninterrupted run to compare with, and copies of it to work on.

The run and its copies are made by the same waves without Prefect, unless a test asks for ``with_prefect``.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cosmos_rl_core.config.parallelism import Parallelism
from flows.planning import requests
from stages.execution.execution import Execution
from tests.e2e.flow_process import AFTER_LAST_UPDATE, COLD, ITERATIONS, NO_PREFECT, Flows
from tests.e2e.prefect_server import PrefectServer
from tests.stages.ranks import run_on_ranks

RANKS_TIMEOUT_S = 120.0
TWO_RANKS = (*COLD, "--set", "launch.processes=2")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share a server on one worker, and those that share the reference runs alone on another.

    The run on two ranks takes minutes, and has a server of its own. All of them are tests of processes.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            served = "prefect_environment" in getattr(item, "fixturenames", ())
            group = "e2e-ranks" if item.path.stem == "test_two_ranks" else "e2e-server" if served else "e2e-runs"
            item.add_marker(pytest.mark.xdist_group(group))
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="package")
def prefect_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that lead a flow to a server on a free port of this machine."""
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    try:
        server.start()
        yield server.environment
    finally:
        server.stop()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Flows:
    """The run that nobody interrupted, warm. The first of pytest's workers that needs it makes it for all of them."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "reference"
    flows = Flows(folder, {})
    flows.program = NO_PREFECT
    made = folder / "made"
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            flows.run()
            assert flows.nothing_is_left()
            made.touch()
    return flows


@pytest.fixture(scope="session")
def copy_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Flows], Flows]]:
    """Makes another store with the same run in it."""
    copies: list[Flows] = []

    def copy(flows: Flows) -> Flows:
        copies.append(Flows(tmp_path_factory.mktemp("copy"), flows.given, flows.recipe))
        copies[-1].program = flows.program
        shutil.copytree(flows.store, copies[-1].store)
        return copies[-1]

    yield copy
    for flows in copies:
        flows.kill_all()


@pytest.fixture
def flows(reference: Flows, copy_of: Callable[[Flows], Flows]) -> Flows:
    """A store of the test's own, with the finished run in it; what should be made again is to be forgotten first."""
    return copy_of(reference)


@pytest.fixture
def with_prefect(flows: Flows, prefect_environment: dict[str, str]) -> None:
    """Let the test's own store be worked on by ``cosmos-flows`` itself."""
    flows.use_prefect(prefect_environment)


@pytest.fixture(scope="package")
def reference_on_two_ranks(
    reference: Flows, copy_of: Callable[[Flows], Flows], prefect_environment: dict[str, str]
) -> Flows:
    """The same run, its last update made by two ranks that nobody interrupted, forks because those start sooner."""
    flows = copy_of(reference)
    flows.use_prefect(prefect_environment)
    record = "numerics/update.json"
    flows.forget("iterations/0002/update", record, *AFTER_LAST_UPDATE)
    path = flows.folder / "update.json"
    path.write_text(requests.update(flows.planned, ITERATIONS - 1).model_dump_json(), encoding="utf-8")
    Execution(parallelism=Parallelism(world_size=2), numerics_record=str(flows.root / record)).write(path)
    run_on_ranks([str(path)], flows.folder, ranks=2, timeout_s=RANKS_TIMEOUT_S)
    flows.run()
    assert flows.nothing_is_left()
    return flows
