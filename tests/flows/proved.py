"""A tiny finished run that an audit has no fault with, made in this process, and forgers who edit it.

Pictures and weights are made up; samples, scores, advantages, metrics and heads follow from the plan as in a real run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.canonical import canonical_json, digest, sha256
from cosmos_rl_core.estimates.estimate import mean_of
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.storage import store as stores
from flows import post_train
from flows.auditing import audit as auditing
from flows.auditing.audit import audit
from flows.planning.plan import METRICS_FILE, Settings, freeze, plan_of
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.running.wave import NUMERICS
from flows.session import loop
from flows.watching.tracking import Tracker
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import cut
from stages.artifacts.manifest import Manifest, content_of
from stages.artifacts.records import FileEntry, Pinned, place_of
from stages.artifacts.request import Input, Request, fingerprint_of, recipe_of
from stages.artifacts.slots import current_manifest, current_of
from stages.formats.samples import StoredSample, read_index, unit_files
from stages.formats.tables import to_parquet
from stages.fragment import without_pictures
from stages.generating.encoding import with_media
from stages.generating.plans import grid_facts, planned
from stages.reporting.contracts import Fragment
from stages.scoring.advantages import advantages
from tests import hand_made
from tests.flows.conftest import RECIPE

RUN_ID = "proved"
WEIGHTS = "00000.safetensors"
WORDS = ("AC", "K7", "HP", "XY", "ZZ", "QQ")
KEPT = ("rollout.keep={ tensors = 1, media = 2 }", "train.ckpt.max_keep=2")
FAILED = "i0001-"
"""Beginning of the ids of samples of the rollout, one of whose samples is not finite and one has no score."""
Body = dict[str, Any]


class Proved:
    """A store with the run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store"

    @property
    def root(self) -> Path:
        """The run."""
        return self.store / "runs" / RUN_ID

    def plan(self, run_id: str = RUN_ID, keep: tuple[str, ...] = KEPT, iterations: int = 3) -> Run:
        """Freeze the plan of a run."""
        prompts, recipe = self.folder / "prompts.jsonl", self.folder / "tiny.toml"
        lines = (json.dumps({"prompt": f'a sign that says "{word}"'}) for word in WORDS)
        prompts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        text = RECIPE.replace('name = "ocr"\nlocal_dir = "WORDS"', f'name = "prompts"\npath = "{prompts}"')
        recipe.write_text(text.replace("[[rewards]]", "[[rewards]]\nmax_failed_fraction = 0.3"), encoding="utf-8")
        settings = Settings(str(recipe), str(self.store), run_id, iterations, overrides=keep)
        return Run(freeze(plan_of(settings), str(self.store)), str(self.store))

    def run(
        self,
        run_id: str = RUN_ID,
        keep: tuple[str, ...] = KEPT,
        iterations: int = 3,
        look: Callable[[], None] = lambda: None,
    ) -> Run:
        """Make a run to its end; ``look`` is called whenever something was written."""
        run = self.plan(run_id, keep, iterations)
        notes: list[str] = []
        with Tracker(run, notes.append) as tracker:

            def launch(_: str, *requests: Request) -> list[Manifest]:
                look()
                manifests: list[Manifest] = []
                for request in requests:
                    manifests.append(current_manifest(request) or self._make(run, request))
                    look()
                tracker.done(requests, manifests)
                look()
                return manifests

            loop.make(run, launch)
        assert notes == []
        return run

    def _make(self, run: Run, request: Request) -> Manifest:
        pinned = Pinned(stage=request.stage, numerics=hand_made.NUMERICS)
        stores.put_if_absent(stores.join(run.url, NUMERICS, f"{request.stage}.json"), pinned.sealed())
        made = {"rollout": rollout, "reward": scores, "update": update, "fragment": fragment}.get(request.stage)
        files, summary = made(request) if made else ({f"current/{WEIGHTS}": weights(1.0)}, {})
        hand_made.make(request, files, **summary)
        # As it is read again: its names are sorted.
        found = current_manifest(request)
        assert found is not None
        return found


def rollout(request: Request) -> tuple[dict[str, bytes], Body]:
    """Samples in units of two. The fourth of iteration 1 is not finite."""
    files: dict[str, bytes] = {}
    plans, config = planned(request), request.settings(contracts.Rollout)
    kernel = planned_kernel(config.sample)
    facts = {"policy": request.one("policy").content, "trained_steps": []} | grid_facts(kernel)
    lost = [plan.sample_id for plan in plans if plan.sample_id.startswith(FAILED)][3:4]
    for number, unit in enumerate(cut(plans, 2)):
        stored: list[StoredSample] = []
        for plan in unit:
            pixels = np.full((1, 4, 8, 3), plan.seed % 251, np.uint8)
            stored.append(with_media(plan, None if plan.sample_id in lost else pixels, b"latents", facts))
        files |= unit_files(number, stored)
    return files, {"samples": len(plans)} | ({"nonfinite": 1} if lost else {})


def scores(request: Request) -> tuple[dict[str, bytes], Body]:
    """Scores by place. The sixth sample of iteration 1 could not be scored, and the one that is not finite neither."""
    (source,) = request.inputs["samples"]
    samples = read_index(Artifact(source))
    unscored = ["" if finite else "not finite" for finite in samples["finite"]]
    if any(unscored):
        unscored[5] = "ServiceError: no answer"
    valid = [error == "" for error in unscored]
    numbers = [k * k % 7 / 8 if one else None for k, one in enumerate(valid)]
    table = samples[["sample_id", "prompt_id"]].assign(
        score=pd.Series(numbers, dtype="float64"), valid=valid, scorer=request.settings(contracts.Reward).scorer
    )
    answers = samples[["sample_id"]].assign(error=unscored, details="{}")
    files = {contracts.Reward.SCORES: to_parquet(table), contracts.Reward.ANSWERS: to_parquet(answers)}
    known = table.loc[table["valid"], "score"]
    failed = {"failed": len(table) - len(known)} if len(known) < len(table) else {}
    error = mean_of(known, table.loc[table["valid"], "prompt_id"]).error
    return files, {"ocr": float(known.mean()), "standard_error": error, "scored": len(known)} | failed


def update(request: Request) -> tuple[dict[str, bytes], Body]:
    """The true advantages, and made-up weights."""
    algorithm = algorithm_of(request.settings(contracts.Update).algorithm)
    table = advantages(request, [*map(Artifact, request.inputs["rollouts"])], algorithm).drop(columns="key")
    parts = ("current", "old", "optimizer")
    files = {f"{part}/{WEIGHTS}": weights(place, request.iteration) for place, part in enumerate(parts)}
    files[contracts.Update.ADVANTAGES] = to_parquet(table)
    rows = [{"step": 2 * (request.iteration or 0) + n, "loss": 0.5 - n / 8, "grad_norm": 1.0 + n} for n in range(2)]
    files[contracts.METRICS] = to_parquet(pd.DataFrame(rows))
    last = {"loss": rows[-1]["loss"], "grad_norm": rows[-1]["grad_norm"]}
    excluded = len(table[~table["used"]])
    return files, last | ({"excluded": excluded} if excluded else {})


def fragment(request: Request) -> tuple[dict[str, bytes], Body]:
    """The true numbers, without pictures."""
    return {Fragment.FRAGMENT: without_pictures(request).encode()}, {}


def weights(*numbers: float | None) -> bytes:
    """A file of tensors."""
    return save({"w": np.array([number or 0.0 for number in numbers], np.float32)})


def body_of(path: Path) -> Body:
    return json.loads(path.read_bytes())["body"]


def seal_anew(path: Path, change: Callable[[Body], object]) -> None:
    """Change a sealed record, and give it the digest that it has then."""
    body = body_of(path)
    change(body)
    path.write_bytes(canonical_json({"body": body, "sha256": digest(body)}))


class Forger:
    """Somebody who can write the whole store, and computes every digest anew."""

    def __init__(self, store: Path, run_id: str = RUN_ID) -> None:
        self.store, self.run_id, self.root = store, run_id, store / "runs" / run_id

    def file(self, slot: str, name: str) -> Path:
        """The file of an artifact of the run."""
        made = self.root / slot
        return made / body_of(made / "manifest.1.json")["files"][name]["path"]

    def table(self, slot: str, name: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
        """Change a table."""
        path = self.file(slot, name)
        path.write_bytes(to_parquet(change(pd.read_parquet(path, engine="pyarrow"))))

    def rows(self, slot: str, change: Callable[[list[Body]], object], unit: int = 0) -> None:
        """Change the rows of a unit's index."""
        path = self.file(slot, f"index/{unit:05d}.json")
        rows = json.loads(path.read_bytes())
        change(rows)
        path.write_bytes(canonical_json(rows))

    def manifest(self, slot: str, change: Callable[[Body], object]) -> None:
        """Change a manifest."""
        seal_anew(self.root / slot / "manifest.1.json", change)

    def seal(self, *, metrics: bool = True) -> None:
        """Compute all digests anew, files first, and write metrics and heads that follow from them."""
        before: dict[Path, bytes] = {}
        while before != (before := {path: path.read_bytes() for path in self.store.rglob("manifest.1.json")}):
            for path in before:
                seal_anew(path, self._follow(path.parent))
        for path in self.store.rglob("dropped.1.*.json"):
            of = sha256((path.parent / "manifest.1.json").read_bytes())
            seal_anew(path, lambda body, of=of: body.update(manifest=of))
        for path in self.store.rglob("layout.1.json"):
            recipe = body_of(path.parent / "manifest.1.json")["recipe"]
            seal_anew(path, lambda body, recipe=recipe: body.update(recipe=recipe))
        if metrics:
            self._write_metrics()
        self._write_heads()

    def _follow(self, slot: Path) -> Callable[[Body], None]:
        def change(body: Body) -> None:
            for entry in body["files"].values():
                if (path := slot / entry["path"]).exists():
                    entry.update(size=path.stat().st_size, sha256=sha256(path.read_bytes()))
            for source in (one for some in body["inputs"].values() for one in some):
                source.update(self._names(source))
            body["content"] = content_of(_entries(body))
            body["recipe"] = recipe_of(*(body[name] for name in ("stage", "version", "iteration", "seed", "config")))
            inputs = {
                role: [Input.model_validate_json(json.dumps(one)) for one in some]
                for role, some in body["inputs"].items()
            }
            body["fingerprint"] = fingerprint_of(body["recipe"], inputs)

        return change

    def _names(self, source: Body) -> Body:
        """What names an artifact as it is now."""
        data = (self.store / place_of(source["url"]) / "manifest.1.json").read_bytes()
        body = json.loads(data)["body"]
        content = content_of(_entries(body), *source["parts"])
        return {"manifest": sha256(data), "fingerprint": body["fingerprint"], "content": content}

    def _write_metrics(self) -> None:
        (self.root / METRICS_FILE).unlink()
        run, notes = read_run(str(self.store), self.run_id), list[str]()
        with Tracker(run, notes.append) as tracker:
            for wave in post_train.post_train(run):
                requests = [step.request() for step in wave.steps]
                tracker.done(requests, [found for one in requests if (found := current_of(one.slot)[1]) is not None])

    def _write_heads(self) -> None:
        previous: str | None = None
        for path in sorted((self.root / "heads").iterdir()):

            def change(body: Body, previous: str | None = previous) -> None:
                names = (name for name in body["records"] if (self.store / name).exists())
                body["previous"], body["records"] = previous, {n: sha256((self.store / n).read_bytes()) for n in names}

            seal_anew(path, change)
            previous = sha256(path.read_bytes())


def told(forger: Forger, head: str | None = None) -> list[str]:
    """Each fault in a line, its file without the run.

    Nobody works on the store, so one look finds what the others would find again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auditing, "LOOKS", 1)
        found = audit(str(forger.store), forger.run_id, head=head).faults
    return [f"{fault.file.removeprefix(f'runs/{forger.run_id}/')} {fault.field}: {fault.what}" for fault in found]


def _entries(body: Body) -> dict[str, FileEntry]:
    return {name: FileEntry.model_validate(entry) for name, entry in body["files"].items()}
