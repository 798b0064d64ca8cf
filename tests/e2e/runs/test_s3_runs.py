"""Whole runs on a real S3 server, which may go away meanwhile: the bytes of a run in a directory."""

import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_rl_core.storage import cache
from tests.e2e.flow_process import COLD, ITERATIONS, Flows, files_with, require_same_run
from tests.faulty_proxy import Exchange, cut, faulty_proxy, lost, unavailable
from tests.seaweed import BUCKET, S3_VARIABLES, SeaweedFS, started_seaweed

AWAY_S = 5.0


class FlowsOnS3(Flows):
    """The commands, on a prefix of a bucket, with copies on this node."""

    def __init__(self, folder: Path, environment: dict[str, str], server: SeaweedFS) -> None:
        self.copies = folder / "copies"
        super().__init__(folder, environment | server.variables | {cache.DIRECTORY: str(self.copies)})
        self.server = server
        self.prefix = secrets.token_hex(8)
        self.store = f"s3://{BUCKET}/{self.prefix}"

    def fetch(self) -> Flows:
        """The store as a directory, listed and read by another client."""
        here = Flows(self.folder / "fetched", {})
        self.server.fetch(self.prefix, Path(here.store))
        return here


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A server that this test alone may kill."""
    with started_seaweed(tmp_path / "seaweed") as server:
        yield server


@pytest.fixture
def on_s3(server: SeaweedFS, prefect_environment: dict[str, str], tmp_path: Path) -> Iterator[FlowsOnS3]:
    """A run of its own, of which nothing is there yet."""
    flows = FlowsOnS3(tmp_path / "flows", prefect_environment, server)
    yield flows
    flows.kill_all()


@pytest.mark.slow
def test_a_warm_run_on_s3_has_the_bytes_of_one_in_a_directory_and_the_secret_is_nowhere(
    on_s3: FlowsOnS3, reference: Flows, prefect_environment: dict[str, str]
) -> None:
    said = on_s3.run()
    here = on_s3.fetch()
    require_same_run(here, reference)
    assert "second writer" not in said
    assert files_with(on_s3.server.secret, on_s3.folder, Path(prefect_environment["PREFECT_HOME"])) == []

    before = here.manifests()
    # Embeddings lie next to the run, and each update shares a wave with its fragment.
    assert f"kept  {len(before) + 1 - ITERATIONS} waves, nothing to do" in on_s3.run()
    assert on_s3.fetch().manifests() == before
    assert "to go on" not in on_s3.command("status")
    assert on_s3.nothing_is_left()


@pytest.mark.slow
def test_a_cold_run_whose_server_is_killed_within_stages_goes_on_and_has_the_same_bytes(
    on_s3: FlowsOnS3, reference: Flows
) -> None:
    run = on_s3.start(*COLD, "--set", "launch.max_attempts=1")
    for stage, phase in (("rollout", "sampling"), ("reward", "scoring"), ("update", "training")):
        run.wait_until(lambda stage=stage, phase=phase: on_s3.phases(stage, phase), timeout_s=300)
        on_s3.server.kill()
        time.sleep(AWAY_S)
        assert run.process.poll() is None
        on_s3.server.start()
    run.finish(timeout_s=600)
    here = on_s3.fetch()
    require_same_run(here, reference)
    # Nothing was made twice: the stages waited for the store.
    assert all(len(list(logs.iterdir())) == 1 for logs in here.root.glob("iterations/*/*/logs"))
    assert on_s3.nothing_is_left()


SLOWEST_S, FAILING = 0.06, 0.04
"""Longest delay of a request, and the share of requests that fail."""


@pytest.mark.slow
def test_a_run_on_a_slow_server_that_fails_now_and_then_has_the_same_bytes(
    server: SeaweedFS, prefect_environment: dict[str, str], reference: Flows, tmp_path: Path
) -> None:
    dice = random.Random(0)
    met: Counter[str] = Counter()

    def ill(request: Exchange) -> None:
        delay_s, fault = (
            dice.uniform(0, SLOWEST_S),
            dice.choice([unavailable, cut, lost]) if dice.random() < FAILING else None,
        )
        time.sleep(delay_s)
        met["passed" if fault is None else fault.__name__] += 1
        (fault or Exchange.pass_on)(request)

    with faulty_proxy(server.endpoint) as proxy:
        proxy.always = ill
        flows = FlowsOnS3(tmp_path / "flows", prefect_environment, server)
        flows.environment[f"{S3_VARIABLES}ENDPOINT_URL"] = proxy.endpoint
        try:
            flows.start().finish(timeout_s=900)
            assert "nothing is wrong" in flows.command("audit")
        finally:
            flows.kill_all()
    assert {"unavailable", "cut", "lost"} <= met.keys(), met
    require_same_run(flows.fetch(), reference)
