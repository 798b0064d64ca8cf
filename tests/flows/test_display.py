"""The console lines of finished waves."""

from flows.running.display import Display
from stages.artifacts.manifest import Manifest


def finished(**summary: float) -> Manifest:
    return Manifest.model_construct(summary=summary)


def test_a_line_adds_seconds_and_keeps_the_numbers_of_two_stages_apart() -> None:
    lines: list[str] = []
    rewards = finished(ocr=0.5, standard_error=0.1, seconds=1.0), finished(jpeg=-3.0, standard_error=0.25, seconds=0.5)
    Display(lines.append).done("iteration-0000/reward-ocr+reward-jpeg", rewards, skipped=False)
    numbers = "ocr 0.5  standard_error 0.1 | jpeg -3  standard_error 0.25"
    assert lines == [f"iteration-0000/reward-ocr+reward-jpeg   1.5 s  {numbers}"]


def test_stages_without_numbers_leave_no_mark() -> None:
    lines: list[str] = []
    Display(lines.append).done("export", (finished(seconds=2.0), finished(steps=3)), skipped=True)
    assert [line.split() for line in lines] == [["export", "stands", "steps", "3"]]
