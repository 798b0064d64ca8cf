"""Waves of stages."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.devices.devices import VISIBLE
from flows.ledger import pages
from flows.ledger.ledger import Ledger
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from tests.flows.allocated import Work


@pytest.mark.processes
def test_stages_that_do_not_fit_together_are_one_wave_and_never_run_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VISIBLE, f"GPU-{secrets.token_hex(8)}")
    work, held, log = Work(tmp_path, monkeypatch), list[list[str]](), list[str]()
    work.go()
    requests = [work.request(name) for name in ("a", "b")]
    config = LaunchConfig(device="cpu", stage_gpus={"report": (0,)})

    @contextmanager
    def holding(some: Sequence[Request]) -> Iterator[None]:
        assert len(some) == 1
        held.append([one.slot.rpartition("/")[2] for one in some])
        yield

    with closing(
        Waves(work.run_url, config, Display(log.append), ledger=Ledger(work.run_url, "", log.append))
    ) as waves:
        waves.make("wave", requests, holding=holding)
    assert all(current_manifest(one) is not None for one in requests)
    assert held == [["a"], ["b"]]
    assert any(line.startswith("wave does not fit the devices at once: ") for line in log)
    (page,) = pages.pages(work.run_url)
    first, second = page.entries
    assert (page.wave, page.state, first.outcome, second.outcome) == ("wave", "closed", "made", "made")
    assert second.queued_s < first.seconds
