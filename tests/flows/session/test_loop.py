"""Groups of waves, as the loop names them: by policies, by iterations, and in long runs by blocks of them."""

from collections.abc import Callable

from flows.planning.run import Run
from flows.session import loop
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from tests.flows.by_hand import HELD_OUT_MEDIA, SFT, SMALL_SFT, ByHand, validated
from tests.hand_made import planned


def groups_of(run: Run) -> list[tuple[str, ...]]:
    """Names of the groups around each wave, and the wave's own, in order."""
    by_hand, around, seen = ByHand(), list[str](), list[tuple[str, ...]]()

    def grouped(name: str, work: Callable[[], None]) -> None:
        around.append(name)
        work()
        around.pop()

    def launch(name: str, *requests: Request) -> list[Manifest]:
        seen.append((*around, name))
        return by_hand.launch(name, *requests)

    loop.make(run, launch, grouped)
    return seen


def test_waves_are_grouped_by_iterations_and_policies(recipe, tmp_path):
    groups = groups_of(planned(validated(recipe, tmp_path), tmp_path, iterations=1))
    assert [*groups[:2], groups[-1]] == [("policy",), ("embed",), ("report",)]
    assert all(name.startswith(f"{group}/") for group, name in groups[2:-1])
    assert list(dict.fromkeys(group for group, _ in groups[2:-1])) == ["policy-0000", "iteration-0000", "policy-0001"]


def test_long_runs_are_grouped_by_blocks_of_iterations_too(tmp_path):
    settings = (*SMALL_SFT, "train.num_iterations=101", "validation.freq=50", HELD_OUT_MEDIA)
    groups = groups_of(planned(SFT, tmp_path, overrides=settings))
    blocks = dict.fromkeys(names[0] for names in groups if names[0].startswith("iterations"))
    assert list(blocks) == ["iterations-0000-0049", "iterations-0050-0099", "iterations-0100-0100"]
    by_wave = {names[-1]: names[:-1] for names in groups}
    # A single stage needs no group of its own, and a policy is judged in the block that made it.
    assert by_wave["iteration-0049/finetune"] == ("iterations-0000-0049",)
    assert by_wave["policy-0050/validate"] == ("iterations-0000-0049", "policy-0050")
    assert by_wave["policy-0000/validate"] == ("policy-0000",)
