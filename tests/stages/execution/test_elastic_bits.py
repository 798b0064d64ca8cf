"""Every stage whose units workers may share: its bits depend on no number of workers, and all of them make some."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.datasets import local
from cosmos_rl_core.errors import StageError
from flows.planning import requests
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Embed
from stages.registry import STAGES
from tests.run_first import run_first
from tests.stages import small_video
from tests.stages.conftest import make, make_run
from tests.stages.every_stage import made_once
from tests.stages.generating.test_context_parallel_stages import longer
from tests.stages.test_index import Dataset, caption, image

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("elastic")]

ELASTIC = sorted(name for name, stage in STAGES.items() if stage.elastic)
CUT: dict[str, dict[str, Any]] = {
    "validate": {"batch_size": 2},
    "vlm_evaluate": {"conversations_per_shard": 1},
    "index": {"units_per_shard": 1},
    "caption": {"media_per_shard": 1, "max_left_out": 1.0},
    "describe": {"media_per_shard": 1, "max_left_out": 1.0},
}
"""Settings of stages that have a single unit otherwise."""
MEDIA = range(3)
WARM: dict[str, Any] = {"mode": "warm", "device": "cpu", "stall_timeout_s": 60.0}
TOGETHER = """
import os, time
from contextlib import suppress
from pathlib import Path

from stages.execution.handing import HandedUnits

HERE = Path(__file__).parent
hands, made = HandedUnits.hands, HandedUnits.made


def begin_together(self, count, at_once):
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    expected = min(int((HERE / "workers").read_text()), -(-count // (at_once * ranks)))
    for some in hands(self, count, at_once):
        if rank == 1:
            with suppress(FileNotFoundError):
                number = int((HERE / "kill").read_text())
                (HERE / "kill").unlink()
                os.kill(os.getpid(), number)
                time.sleep(3600)
        if rank == 0:
            (HERE / f"has.{os.getpid()}").touch()
            while len([*HERE.glob("has.*")]) < expected:
                time.sleep(0.01)
        yield some


def tell(self, number):
    (HERE / f"made.{number}.{os.getpid()}").touch()
    made(self, number)


HandedUnits.hands, HandedUnits.made = begin_together, tell
"""
"""Lets each worker make its first unit when all have one. If it is told to, one ends its second rank before that."""


class Workers(Display):
    """A launcher of workers that begin together, and the lines that it prints."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append)
        self.folder, self.settings = folder, settings
        self.waves = Waves("", self._launch(), self)

    def _launch(self, **launch: Any) -> LaunchConfig:
        return LaunchConfig.model_validate({**WARM, **self.settings, **launch})

    def make(self, request: Request, count: int, slot: str, *, kill: int = 0, **launch: Any) -> Manifest:
        """Make a stage in another slot with so many workers; 0 for none."""
        for left in (*self.folder.glob("made.*"), *self.folder.glob("has.*")):
            left.unlink()
        self.lines.clear()
        (self.folder / "workers").write_text(str(count))
        if kill:
            (self.folder / "kill").write_text(str(int(kill)))
        request = request.model_copy(update={"slot": str(self.folder / slot / request.stage)})
        self.waves.run_url = str(self.folder / slot / "run")
        self.waves.config = self._launch(**launch, elastic={"max": count, "stages": ELASTIC} if count else None)
        self.waves.make(request.stage, [request])
        return Artifact(input_of(request.slot)).manifest

    @property
    def made(self) -> list[list[str]]:
        """The units that each process made."""
        found: dict[str, list[str]] = {}
        for path in self.folder.glob("made.*"):
            _, unit, process = path.name.split(".")
            found.setdefault(process, []).append(unit)
        return [*found.values()]

    def all_made(self, processes: int) -> bool:
        """Whether so many processes made units, no unit was made twice, and no number was left out."""
        units = sorted(int(unit) for some in self.made for unit in some)
        return len(self.made) == processes and units == [*range(len(units))]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("workers")
    with pytest.MonkeyPatch.context() as patch:
        run_first(TOGETHER, folder, patch)
        found = Workers(folder)
        with closing(found.waves):
            yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """A Request of every stage, with two units at least."""
    folder = tmp_path_factory.mktemp("made")
    found = made_once(tmp_path_factory)
    for number in MEDIA:
        image(folder / "pictures" / f"{number:04d}.png", number)
    dataset = Dataset(folder / "pictures", folder, captioned=False)
    found["index"] = dataset.request()
    dataset.make()
    for name in ("caption", "describe"):
        config = found[name].config.model_copy(update={"sources": dataset.sources})
        found[name] = found[name].model_copy(update={"config": config, "inputs": {"parts": tuple(dataset.parts)}})
    return found | {name: varied(found[name], **settings) for name, settings in CUT.items()}


def varied(request: Request, **settings: Any) -> Request:
    return request.model_copy(update={"config": request.config.model_copy(update=settings)})


@pytest.mark.parametrize("stage", ELASTIC)
def test_bits_depend_on_no_number_of_workers(stage: str, made: dict[str, Request], workers: Workers) -> None:
    alone, one, two = (workers.make(made[stage], count, f"by-{count}").content for count in (0, 1, 2))
    assert one == two == alone
    assert workers.all_made(2), workers.made


def make_by_groups(rollout: Request, workers: Workers, slot: str, size: str = "dp_shard_size", **settings: Any) -> None:
    """Workers of two ranks, one of which loses a rank, and one of which is asked to end."""
    two: dict[str, Any] = {size: 2, **settings}
    one = workers.make(rollout, 1, f"{slot}-one", **two)
    assert one.numerics["world_size"] == one.numerics[size] == 2
    assert workers.make(rollout, 2, f"{slot}-two", **two).content == one.content
    assert workers.all_made(4), workers.made
    for number, word in (
        (signal.SIGKILL, "is lost (killed"),
        (signal.SIGTERM, "was asked to end, and gave back units"),
    ):
        made = workers.make(rollout, 2, f"{slot}-{number.name}", kill=number, **two)
        assert made.content == one.content
        assert sum(map(len, workers.made)) == one.summary["samples"]
        (told,) = (line for line in workers.lines if "is lost" in line or "was asked" in line)
        assert word in told
        assert " units " in told


def test_a_group_is_one_worker_whichever_rank_of_it_ends(made: dict[str, Request], workers: Workers) -> None:
    make_by_groups(varied(made["rollout"], batch_size=1), workers, "forks")


@pytest.mark.slow
def test_a_group_whose_ranks_share_each_video_is_one_worker_too(
    workers: Workers, wan_path: str, prompt_dir: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path, longer(small_video.recipe(wan_path, prompt_dir, small_video.LORA)))
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    # Updates, which have no workers, must have as many ranks.
    make_by_groups(varied(requests.rollout(run, 0), batch_size=1), workers, "peers", "cp_size", processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"resident_gb": 1}, {"mode": "cold"}])
def test_a_group_of_resident_or_new_processes_is_one_worker_too(
    made: dict[str, Request], workers: Workers, settings: dict[str, Any]
) -> None:
    others = Workers(workers.folder, dp_shard_size=2, elastic={"max": 2}, **settings)
    with closing(others.waves):
        make_by_groups(varied(made["rollout"], batch_size=1), others, "-".join(settings))


def test_one_note_says_how_many_texts_were_embedded_before(made: dict[str, Request], workers: Workers) -> None:
    prompts = made["embed"].settings(Embed).prompts
    workers.make(varied(made["embed"], prompts=prompts[2:]), 2, "texts")
    assert not [line for line in workers.lines if "embedded before" in line]
    workers.make(made["embed"], 2, "texts")
    (told,) = [line for line in workers.lines if "embedded before" in line]
    # The negative and the empty prompt, too.
    assert f"{len(prompts)} of {len(prompts) + 2} texts were embedded before" in told


def test_workers_name_all_media_that_cannot_be_used(made: dict[str, Request], workers: Workers, tmp_path: Path) -> None:
    for number in range(5):
        image(tmp_path / "images" / f"{number:04d}.png", number, (32, 64))
        caption(tmp_path, f"{number:04d}", "a picture")
    for number in (1, 4):
        (tmp_path / "images" / f"{number:04d}.png").write_bytes(b"")
    media = local.Options(local_dir=str(tmp_path), size=(32, 64))
    request = varied(made["encode"], dataset=media, dataset_digest=local.digest(media), items_per_shard=1)
    told: list[str] = []
    for count in (0, 2):
        with pytest.raises(StageError, match=r"2 media of the dataset 'local' cannot be used") as caught:
            workers.make(request, count, f"bad-{count}")
        told.append(str(caught.value))
        assert caught.value.kind == "data"
    assert told[0] == told[1]
    assert [name in told[1] for name in ("0001.png", "0004.png")] == [True, True]
