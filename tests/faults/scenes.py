"""Places in which processes are killed: a store right before, the commands at work there, and what they leave."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.auditing.audit import audit
from flows.planning import requests
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, input_of
from tests.caption_server import Asked, Reply, serving, size_of_pictures
from tests.e2e.flow_process import COLD, ITERATIONS, PREFECT, RUN_ID, Flows, Started, metrics
from tests.faults import kinds
from tests.faults.bases import ON_TWO, STAYING, TWO_RANKS, Bases, end
from tests.faults.held import Hold

Contents = dict[str, Any]
ITERATION = ("report", "export", "fragment", "update", "reward-ocr", "rollout")
"""Stages of the last iteration, from the last to the first."""


@dataclass
class Scene:
    """A store and commands on it."""

    flows: Flows
    pattern: str
    """Paths of files whose changes are counted."""
    starts: list[Callable[[], Started]]
    """The commands, begun at once."""
    contents: Callable[[], Contents]
    """What they leave; equal after an interruption."""
    runs: tuple[str, ...] = (RUN_ID,)
    """Runs of which an audit must find nothing wrong."""
    deletes: bool = False
    """Whether manifests may go."""
    ends: ExitStack = field(default_factory=ExitStack)
    """What else is at work meanwhile."""
    again: list[Callable[[], Started]] | None = None
    """What is given after a kill, if not the same commands."""

    def hold(self, at: int) -> Hold:
        """An order to hold the next commands, in a folder of its own: the scene's may be full."""
        return Hold(self.flows.folder.with_name(f"{self.flows.folder.name}-hold"), self.pattern, at)

    def faults(self) -> list[str]:
        """What an audit finds wrong."""
        return [str(fault) for run in self.runs for fault in audit(self.flows.store, run).faults]


def slots_of(flows: Flows) -> Contents:
    """Digests of the result of every slot of the store with a current artifact; every byte is read."""
    root, found = Path(flows.store), Contents()
    for slot in sorted({path.parent for path in root.rglob("manifest.*.json")}):
        generation, manifest = current_of(str(slot))
        if manifest is None:
            found[str(slot.relative_to(root))] = f"ended, {generation}"
            continue
        artifact = Artifact(input_of(str(slot)))
        for name in artifact.names():
            if not artifact.lacks(name.partition("/")[0]):
                artifact.read(name)
        found[str(slot.relative_to(root))] = manifest.content
    return found


def _run_of(flows: Flows) -> Contents:
    """What a whole run leaves."""
    return {"slots": slots_of(flows), "metrics": metrics(flows)}


def _files(flows: Flows) -> list[str]:
    """Every file of the store, without what processes write about themselves."""
    paths = (str(path.relative_to(flows.store)) for path in Path(flows.store).rglob("*") if path.is_file())
    return sorted(path for path in paths if "lease" not in path and not path.endswith("sweep"))


def _again(ended: tuple[str, ...], base: str, options: tuple[str, ...], pattern: str) -> Callable[..., Scene]:
    """A run of which some stages are made again."""

    def scene(bases: Bases, folder: Path) -> Scene:
        flows = bases.copy(base, folder)
        end(flows, *ended)
        return Scene(flows, pattern, [lambda: flows.start(*options)], lambda: _run_of(flows))

    return scene


def _embed(bases: Bases, folder: Path) -> Scene:
    """Two runs at once that embed the same texts into one pool, from nothing."""
    flows = bases.copy("empty", folder)

    def start(run: str) -> Callable[[], Started]:
        command = ("run", flows.recipe, "--store", flows.store, "--run-id", run, "--iterations", "1")
        return lambda: flows.start_command(flows.program, *command)

    runs = ("first", "second")
    return Scene(flows, "/dataset/", [start(run) for run in runs], lambda: slots_of(flows), runs)


def _prefect(bases: Bases, folder: Path) -> Scene:
    """The last iteration under ``cosmos-flows`` itself, with the Prefect server that it starts."""
    flows = bases.copy("tiny", folder)
    end(flows, *ITERATION)
    home = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    flows.program = PREFECT
    flows.environment |= home
    return Scene(flows, "/store/", [flows.start], lambda: _run_of(flows))


def _several(bases: Bases, folder: Path) -> Scene:
    """An update by hand on the rollouts of two iterations, each with its own behaviour and scores."""
    flows = bases.copy("tiny", folder)
    made = [requests.update(flows.planned, k) for k in (ITERATIONS - 2, ITERATIONS - 1)]
    roles = ("rollouts", "behaviours", "scores")
    both = {role: sum((one.inputs[role] for one in made), ()) for role in roles}
    slot = f"{flows.root}/what-if/update"
    request = made[1].model_copy(update={"slot": slot, "inputs": made[1].inputs | both})
    path = flows.folder / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    assert len(Request.model_validate_json(path.read_bytes()).inputs["rollouts"]) == 2
    start = lambda: flows.start_command("stages.execution.runner", str(path))  # noqa: E731
    return Scene(flows, "/what-if/", [start], lambda: slots_of(flows))


def _preprocess(at_once: int, program: str) -> Callable[..., Scene]:
    """Preparations of one dataset of pictures, which a service captions."""

    def scene(bases: Bases, folder: Path) -> Scene:
        flows, ends = bases.copy("media", folder), ExitStack()

        def slowly(asked: Asked) -> Reply:
            # Long enough that two preparations meet.
            return size_of_pictures(asked)

        server = ends.enter_context(serving(caption=slowly))
        dataset = flows.folder / "clips.toml"
        local_dir, url = json.dumps(str(flows.folder / "media")), json.dumps(server.url)
        source = f'name = "clips"\n[sources.mine]\nname = "local"\nlocal_dir = {local_dir}\n'
        caption = f'[caption]\nby = "endpoint"\nurl = {url}\nmodel = "vlm"\ninstruction = "?"\nconcurrency = 2\n'
        dataset.write_text(source + caption, encoding="utf-8")
        if program == PREFECT:
            home = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
            flows.environment |= home
            arguments = ("flows", "preprocess", str(dataset), "--store", flows.store)
        else:
            arguments = ("tests.e2e.prepare_without_prefect", str(dataset), flows.store)

        def contents() -> Contents:
            heads = [snapshots.Snapshot.read(flows.store, "clips", number) for number in (1, 2)]
            assert heads[0] is not None
            made = [current_of(source.url)[1] for source in (*heads[0].parts, *heads[0].captions)]
            # Paths of media are in an index, and each case has a folder of its own.
            return {
                "second snapshot": heads[1] is not None,
                "captions": [one.content for one in made[len(heads[0].parts) :] if one is not None],
                "summaries": [[m.stage, m.summary.get("items"), m.summary.get("captioned")] for m in made if m],
                "slots": len(slots_of(flows)),
            }

        starts = [lambda: flows.start_command(*arguments)] * at_once
        return Scene(flows, "/store/", starts, contents, runs=(), ends=ends)

    return scene


def _gc(bases: Bases, folder: Path) -> Scene:
    """The garbage of a run is deleted."""
    flows = bases.copy("garbage", folder)
    command = ("gc", RUN_ID, "--store", flows.store, "--superseded", "--older-than", "0")
    start = lambda: flows.start_command("flows", *command)  # noqa: E731
    contents = lambda: _run_of(flows) | {"files": _files_of_attempts(flows)}  # noqa: E731
    return Scene(flows, "/store/", [start], contents, deletes=True)


def _files_of_attempts(flows: Flows) -> list[str]:
    """Files of the store; the attempts have the same names in each copy of a base."""
    return _files(flows)


def _data_gc(bases: Bases, folder: Path) -> Scene:
    """A run was removed, and what it alone read of the data goes."""
    flows = bases.copy("pool", folder)
    _remove_run(flows, "second")
    command = ("data", "gc", "--store", flows.store, "--older-than", "0")
    start = lambda: flows.start_command("flows", *command)  # noqa: E731
    contents = lambda: {"slots": slots_of(flows), "files": _files(flows)}  # noqa: E731
    return Scene(flows, "/dataset/", [start], contents, ("first",), deletes=True)


def _remove_run(flows: Flows, run: str) -> None:
    root = Path(flows.store) / "runs" / run
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()


def _run_during_gc(bases: Bases, folder: Path) -> Scene:
    """A run begins while what nothing reads of the data it shares is deleted."""
    flows = bases.copy("pool", folder)
    _remove_run(flows, "second")
    command = ("run", flows.recipe, "--store", flows.store, "--run-id", "third", "--iterations", "2")
    run = lambda: flows.start_command(flows.program, *command)  # noqa: E731
    collect = lambda: flows.start_command("flows", "data", "gc", "--store", flows.store, "--older-than", "0")  # noqa: E731
    contents = lambda: {k: v for k, v in slots_of(flows).items() if k.startswith("runs/")}  # noqa: E731
    # Whoever comes first, the run has all it reads in the end.
    return Scene(flows, "/store/", [run, collect], contents, ("first", "third"), deletes=True, again=[run])


def _gc_during_run(bases: Bases, folder: Path) -> Scene:
    """The garbage of a run is deleted while the run makes its last iteration again."""
    flows = bases.copy("garbage", folder)
    end(flows, *ITERATION)
    command = ("gc", RUN_ID, "--store", flows.store, "--superseded", "--older-than", "0")
    collect = lambda: flows.start_command("flows", *command)  # noqa: E731
    return Scene(flows, "/store/", [flows.start, collect], lambda: _run_of(flows), deletes=True, again=[flows.start])


def _score(bases: Bases, folder: Path) -> Scene:
    """The command that scores files of one's own."""
    flows = bases.copy("media", folder)
    media = sorted(str(path) for path in (flows.folder / "media").iterdir())
    command = ("score", *media, "--reward", "pixel_statistics", "--json")
    said: list[Started] = []

    def start() -> Started:
        said.append(flows.start_command("flows", *command))
        return said[-1]

    contents = lambda: {"scores": [one["scores"] for one in json.loads(said[-1].said)["files"]]}  # noqa: E731
    return Scene(flows, "/store/", [start], contents, runs=())


def _export(bases: Bases, folder: Path) -> Scene:
    """Weights are copied out of the store."""
    flows = bases.copy("tiny", folder)
    target = flows.folder / "exported"
    start = lambda: flows.start_command("flows", "export", RUN_ID, str(target), "--store", flows.store)  # noqa: E731

    def contents() -> Contents:
        return {str(path.relative_to(target)): path.read_bytes().hex() for path in target.rglob("*") if path.is_file()}

    return Scene(flows, "/exported/", [start], contents)


def _kind(base: str, stage: str, more: tuple[str, ...] = ()) -> Callable[[Bases, Path], Scene]:
    """One stage of a run is made again."""

    def scene(bases: Bases, folder: Path) -> Scene:
        flows = bases.copy(base, folder)
        options = kinds.prepare(flows, base, bases.inputs)
        slot = kinds.end_stage(flows, stage)
        return Scene(flows, slot, [lambda: flows.start(*options, *more)], lambda: _run_of(flows))

    return scene


ONCE = ("--set", "launch.max_attempts=1")
"""The flow itself tries no second time."""
TWO_SCORERS = (*COLD, *ONCE, "--set", "launch.stage_processes.reward=2")
SCENES: dict[str, Callable[[Bases, Path], Scene]] = {
    "rollout on 2 ranks": _again(("rollout",), "two-ranks", (*TWO_RANKS, *ONCE), "/0002/rollout"),
    "update on 2 ranks": _again(("update",), "two-ranks", (*TWO_RANKS, *ONCE), "/0002/update"),
    "update of several rollouts": _several,
    "reward by 2 processes": _again(("reward-ocr",), "tiny", TWO_SCORERS, "/0002/reward-ocr"),
    "an iteration": _again(ITERATION, "tiny", (), "/store/"),
    "an iteration by ranks that stay": _again(ITERATION, "tiny", STAYING, "/store/"),
    "an iteration by 2 ranks that stay": _again(ITERATION, "two-ranks", (*STAYING, *ON_TWO), "/store/"),
    # Only the flow writes there, while ranks that stay are idle.
    "between stages of ranks that stay": _again(ITERATION, "tiny", STAYING, "/logs/|/heads/"),
    "update after its rollout by ranks that stay": _again(
        ("update", "rollout"), "two-ranks", (*STAYING, *ON_TWO, *ONCE), "/0002/(rollout|update)"
    ),
    "an iteration under Prefect": _prefect,
    "preprocess": _preprocess(1, "tests"),
    "preprocess under Prefect": _preprocess(1, PREFECT),
    "two preprocess at once": _preprocess(2, "tests"),
    "two runs that share embeddings": _embed,
    "gc": _gc,
    "data gc": _data_gc,
    "run beside data gc": _run_during_gc,
    "gc beside its run": _gc_during_run,
    "score": _score,
    "export": _export,
    "judge by a rank that stays": _kind("judged", "reward-clip_score", (*STAYING, *ONCE)),
} | {f"{stage} of {base}": _kind(base, stage) for base, stages in kinds.KINDS.items() for stage in stages}
