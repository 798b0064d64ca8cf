"""What is said of slots of a limit in Prefect that cannot be taken."""

from contextlib import ExitStack
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.running import gpus
from flows.running.waiting import Waiting


@pytest.mark.parametrize(("count", "words"), [(1, "1 slot of"), (2, "2 slots of")])
def test_slots_are_counted_in_words(monkeypatch: pytest.MonkeyPatch, count: int, words: str):
    def refused(*_: Any, **__: Any) -> None:
        raise gpus.ConcurrencySlotAcquisitionError("there is no such limit")

    monkeypatch.setattr(gpus, "concurrency", refused)
    with ExitStack() as held, pytest.raises(ConfigError, match=f"cannot take {words} the limit 'gpus': there is no"):
        gpus._wait(held, "gpus", count, Waiting(print, lambda: None))
