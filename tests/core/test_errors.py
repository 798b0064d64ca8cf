"""Words of errors: mistakes in one list, full disks with advice, and characters that nobody sees."""

import errno

import pytest
import torch.distributed as dist

from cosmos_rl_core.errors import ConfigError, Mistakes, StageError, UnavailableError, counted, listed, visible
from tests.core.test_foreign_errors import NCCL, SHM, judge


def test_fifty_of_many_mistakes_are_listed_and_the_others_counted():
    lines = listed("a.toml:", [f"mistake {number}" for number in range(53)]).splitlines()
    assert (len(lines), lines[0], lines[1], lines[50]) == (52, "a.toml:", "    mistake 0", "    mistake 49")
    assert lines[51] == "    and 3 more"


def test_each_mistake_is_kept_once_and_a_service_that_does_not_answer_is_no_mistake():
    found = Mistakes(["a"])

    def raises(error: Exception) -> int:
        raise error

    assert found.catch(raises, ConfigError("b")) is None
    assert found.catch(raises, ConfigError("a")) is None
    assert found.reach(raises, UnavailableError("away")) is None
    assert found.reach(int, "3") == 3
    assert (found, found.unreached) == (["a", "b"], ["away"])


def test_a_failure_that_repeats_is_not_tried_again_and_keeps_its_log():
    failed = StageError.of("crash", "it broke", log="line 1")
    again = failed.again().in_full()
    assert (failed.retryable, again.retryable, again.kind) == (True, False, "crash")
    assert str(again).startswith("it broke; the attempt before ended there too")
    assert str(again).endswith(":\nline 1")
    assert again.summary == str(failed.again())


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(f"{NCCL}Error while creating shared memory segment {SHM}"),
        RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"),
        RuntimeError("unable to write to file </torch_1>: No space left on device"),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
        OSError(errno.ENOSPC, "No space left on device", "/dev/shm/psm_1"),
    ],
    ids=str,
)
def test_full_shared_memory_names_the_setting_that_enlarges_it(error: BaseException):
    failure = judge(error)
    assert (failure.kind, failure.collective) == ("unavailable", False)
    assert failure.message == (
        f"no space left: {error}; this is shared memory (/dev/shm), not a disk; give the container more: "
        "`--shm-size` of Docker, or on Kubernetes an emptyDir of medium Memory mounted there; then run again"
    )


def test_visible_characters_stay_as_they_are():
    assert visible("Ä中 ± é\n\tb") == "Ä中 ± é\n\tb"
    assert visible("\ud800") == r"\ud800"


def test_a_noun_has_the_number_of_what_is_counted():
    assert [counted(n, noun) for n, noun in ((1, "run"), (0, "run"), (2, "policy"), (2, "key"))] == [
        "1 run",
        "0 runs",
        "2 policies",
        "2 keys",
    ]
