"""Runs whose samples are made by hand and whose rewards are real, and their re-scores without processes."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from cosmos_rl_core.storage import store
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.rescoring.plan import Wanted, plan_of_rescore
from flows.rescoring.report import Report, write_report
from flows.session import loop
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Pinned
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.contracts import Decode, Samples
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.samples import DECODED, StoredSample, all_rows, unit_files
from stages.generating.encoding import encoded, with_media
from stages.generating.plans import plan_samples
from tests.flows.by_hand import make_one, validated
from tests.flows.planning.test_plan_decode_share import LATENT_REWARD
from tests.hand_made import NUMERICS, make, planned

FAILING = "max_failed_fraction = 0.2"
JPEG = ('fn = { name = "ocr", line_width = 96 }', f'fn = {{ name = "jpeg" }}\n{FAILING}')
PER_UNIT = 3
UNFINISHED = "i0000-"
"""How ids of the first rollout begin, of which a sample is not finite."""


def pixels_of(sample_id: str) -> np.ndarray:
    """A picture that its id decides, and whose size as a JPEG differs from the others."""
    rng = np.random.default_rng(zlib.crc32(sample_id.encode()))
    return (rng.integers(0, 256, (1, 32, 64, 3)) * rng.random()).astype("uint8")


class Store:
    """Makes the artifacts of a run. ``undecoded`` of each rollout's samples have latents only."""

    def __init__(self, folder: Path, undecoded: int = 0) -> None:
        self._folder, self._undecoded = folder, undecoded

    def launch(self, _: str, *requests: Request) -> list[Manifest]:
        """Make what is not current."""
        return [current_manifest(request) or self.make(request) for request in requests]

    def make(self, request: Request) -> Manifest:
        """Make an artifact."""
        if request.stage in ("rollout", "evaluate"):
            return self._samples(request)
        if request.stage == "decode":
            return self._decoded(request)
        if request.stage in ("reward", "judge"):
            record = (
                f"{request.slot.partition('/iterations/')[0].partition('/exports/')[0]}/numerics/{request.stage}.json"
            )
            return execute(request, Execution(numerics_record=record), Outcome(self._folder / "outcome", 0))
        return make_one(request)

    def _samples(self, request: Request) -> Manifest:
        made: list[StoredSample] = []
        config = request.settings(Samples)
        k = request.iteration if request.stage == "rollout" else None
        for number, plan in enumerate(plan_samples(config.prompts, config.n_generation, request.seed, k)):
            tensors = None if k is None else save({"latents": pixels_of(plan.sample_id)[0].astype("float32")})
            finite = number > 0 or not plan.sample_id.startswith(UNFINISHED)
            left = finite and tensors is not None and 0 < number <= self._undecoded
            pixels = None if left or not finite else pixels_of(plan.sample_id)
            one = with_media(plan, pixels, tensors, {"policy": "p"})
            made.append(StoredSample(one.row | {"finite": True, DECODED: False}, tensors=tensors) if left else one)
        files: dict[str, bytes] = {}
        for unit, first in enumerate(range(0, len(made), PER_UNIT)):
            files |= unit_files(unit, made[first : first + PER_UNIT])
        return make(request, files, samples=len(made))

    def _decoded(self, request: Request) -> Manifest:
        config, source = request.settings(Decode), Artifact(request.one("samples"))
        rows = [row for row in all_rows(source) if row["finite"]]
        wanted = [row for row in rows if not config.undecoded_only or not row.get(DECODED, True)]
        kept = [{name: row[name] for name in row.keys() - {DECODED, "unit"}} for row in wanted]
        made = [encoded(row, pixels_of(row["sample_id"])) for row in kept]
        folder = request.slot.partition("/iterations/")[0]
        store.put_if_absent(f"{folder}/numerics/decode.json", Pinned(stage="decode", numerics=NUMERICS).sealed())
        return make(request, unit_files(0, made), samples=len(made))

    def rescore(self, wanted: Wanted) -> Report:
        """Make a re-score as its flow does, but for processes."""
        wanted.rescore.record.write(wanted.rescore.run.url)
        for stock in wanted.stocks:
            for wave in wanted.rescore.waves(stock):
                self.launch(wave.name, *(step.request() for step in wave.steps))
        return write_report(wanted)


def stored_run(recipe: Any, tmp_path: Path, url: str = "") -> tuple[Run, Store]:
    """A finished run of two iterations, whose reward is the size as a JPEG, with evaluations of policies 0 and 2.

    Its store is ``url``, by default a folder.
    """
    url = url or str(tmp_path / "store")
    plan = plan_of(Settings(validated(recipe, tmp_path, JPEG), url, run_id="hand"))
    run = Run(freeze(plan, url), url)
    hand = Store(tmp_path)
    loop.make(run, hand.launch)
    return run, hand


def run_on_latents(recipe: Any, tmp_path: Path, undecoded: int) -> tuple[Run, Store]:
    """The same, but its reward reads latents, and so many samples of a rollout have no picture."""
    plugin = tmp_path / "mean_latent.py"
    plugin.write_text(LATENT_REWARD, encoding="utf-8")
    path = recipe(
        ("[policy]", f'plugins = ["{plugin}"]\n[policy]'), (JPEG[0], f'fn = {{ name = "mean_latent" }}\n{FAILING}')
    )
    run = planned(path, tmp_path, run_id="hand", overrides=("rollout.decode_share=0.5",))
    hand = Store(tmp_path, undecoded)
    loop.make(run, hand.launch)
    return run, hand


def rewards_file(tmp_path: Path, text: str, name: str = "mine") -> str:
    """A file of rewards."""
    path = tmp_path / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def wanted(run: Run, reward: str, iterations: str | None = None, *, evaluations: bool = False) -> Wanted:
    """The plan of a re-score of a run."""
    return plan_of_rescore(run.store_url, run.plan.run_id, reward, iterations, evaluations=evaluations)
