"""What is said of slots of a limit in Prefect that cannot be taken."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from flows.devices.waiting import Waiting
from flows.running import gpus
from stages.artifacts.request import Request


@pytest.mark.parametrize(("count", "words"), [(1, "1 slot of"), (2, "2 slots of")])
def test_slots_are_counted_in_words(monkeypatch: pytest.MonkeyPatch, count: int, words: str):
    def refused(*_: Any, **__: Any) -> None:
        raise gpus.ConcurrencySlotAcquisitionError("there is no such limit")

    monkeypatch.setattr(gpus, "concurrency", refused)
    launch = LaunchConfig(device="cuda", processes=count, gpu_limit="gpus")
    requests = [cast(Request, SimpleNamespace(stage="rollout"))]
    with pytest.raises(ConfigError, match=f"cannot take {words} the limit 'gpus': there is no"):
        gpus.taken(requests, launch, Waiting(print, lambda: None)).__enter__()
