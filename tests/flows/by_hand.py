"""Whole runs whose artifacts are made by hand: the real loop, without processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.planning.base import AnyRun
from flows.planning.run import Run
from flows.session import loop
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.reporting.contracts import Fragment
from stages.reporting.excerpt import Excerpt
from tests.flows.conftest import RECIPE
from tests.hand_made import make, planned

SFT = str(Path(__file__).parents[2] / "configs" / "tiny" / "sft.toml")
SMALL_SFT = (
    "train.num_iterations=2",
    "train.train_policy.dataset.num_items=16",
    "train.train_policy.steps_per_iteration=2",
)
HELD_OUT_MEDIA = "validation.data={ name = 'rendered_text', split = 'test', num_items = 4 }"
MONITORED = ("[[rewards]]", '[[rewards]]\nrole = "monitor"\nfn = { name = "jpeg" }\n\n[[rewards]]')
SECONDS = {
    "policy": 1.0, "embed": 2.0, "rollout": 10.0, "reward": 3.0, "update": 30.0, "finetune": 40.0,
    "export": 4.0, "evaluate": 20.0, "report": 5.0, "encode": 6.0, "validate": 7.0, "warn": 0.5,
    "fragment": 0.0,
}  # fmt: skip
FILES = {
    "rollout": ("media/00000.tar", "tensors/00000.tar", "index/00000.json"),
    "evaluate": ("media/00000.tar", "index/00000.json"),
    "update": ("current/w", "old/w"),
    "finetune": ("current/w", "old/w"),
}


class ByHand:
    """What the loop asks for: Requests by their slots, and the names of waves."""

    def __init__(self) -> None:
        self.asked: dict[str, Request] = {}
        self.waves: list[str] = []

    def launch(self, name: str, *requests: Request) -> list[Manifest]:
        """Make what is not current."""
        self.asked |= {request.slot: request for request in requests}
        self.waves.append(name)
        return [current_manifest(request) or make_one(request) for request in requests]


def make_one(request: Request, salt: str = "") -> Manifest:
    """Make a Request's artifact; its bytes are other ones with another salt."""
    data = f"{request.slot}{salt}".encode()
    files = files_of(request, data)
    scores: dict[str, Any] = {request.slot.rpartition("-")[2]: 0.25} if request.stage == "reward" else {}
    return make(request, files, seconds=SECONDS[request.stage], **scores)


def files_of(request: Request, data: bytes) -> dict[str, bytes]:
    """Files of an artifact, all with these bytes, but a fragment that says nothing."""
    if request.stage == "fragment":
        return {Fragment.FRAGMENT: Excerpt(k=request.iteration or 0).encode()}
    return dict.fromkeys(FILES.get(request.stage, ("current/w",)), data)


def make_all(run: AnyRun) -> dict[str, Request]:
    """Take a run to its end; every Request by its slot, in the order in which they were asked for."""
    by_hand = ByHand()
    loop.make(run, by_hand.launch)
    return by_hand.asked


def recipe_in(folder: Path) -> Callable[..., str]:
    """Write a recipe and its prompts; called with replacements, it is rewritten, as by the fixture ``recipe``."""
    (folder / "words").mkdir()
    lines = (f'a sign that says "{word}"' for word in ("AC", "K7", "HP", "XY"))
    (folder / "words" / "train.txt").write_text("\n".join(lines), encoding="utf-8")

    def write(*replacements: tuple[str, str]) -> str:
        text = RECIPE.replace("WORDS", str(folder / "words"))
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "tiny.toml").write_text(text, encoding="utf-8")
        return str(folder / "tiny.toml")

    return write


def validated(recipe: Any, tmp_path: Path, *replacements: tuple[str, str], freq: int = 0) -> str:
    """Path of the recipe with a held-out set of two prompts."""
    (tmp_path / "words" / "test.txt").write_text('a sign that says "ZZ"\na sign that says "QQ"', encoding="utf-8")
    held_out = f'dataset = {{ name = "ocr", split = "test", local_dir = "{tmp_path}/words" }}'
    return recipe(("[rollout]", f"[validation]\nfreq = {freq}\n{held_out}\n\n[rollout]"), *replacements)


def planned_run(recipe: Any, tmp_path: Path) -> Run:
    """A run called ``hand`` with a trained and a monitored reward, base and final policy to be evaluated."""
    return planned(validated(recipe, tmp_path, MONITORED), tmp_path, run_id="hand")


def whole_run(recipe: Any, tmp_path: Path) -> Run:
    """The same, finished."""
    run = planned_run(recipe, tmp_path)
    make_all(run)
    return run
