"""DDRL's claim on the tiny model: does a diffusion loss on data keep a policy that is pushed by a reward near the data?

The reward is compressibility, which is easily over-optimised: in the end nothing is left to see. A second score, which
no arm trains on, says whether the word can still be read.

``python -m docs.studies.replication.study`` trains the base, then every arm with every seed on the same number of
rewarded samples, and writes ``results.md``, ``results.svg`` and ``pictures.png``. The same command, given again, goes
on after the finished runs.
"""

import argparse
import itertools
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cosmos_rl_core import plugins
from cosmos_rl_core.estimates.estimate import mean_of_independent
from flows.planning.base import AnyRun
from flows.planning.steps import read_run
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import input_of
from stages.formats.samples import num_units, read_samples, read_unit

BASE, ARM = "docs/studies/replication/base.toml", "docs/studies/replication/arm.toml"
SEEDS = (0, 1, 2)
STROKE_WIDTH = 5
"""Stroke width of the data's letters: so thick that OCR misreads a third of them. Samples of a policy that stays near
the data are read no better."""
_POLICY = "train.train_policy"
_MEDIA = f"name = 'rendered_text', split = 'train', num_items = 1024, size = [32, 64], stroke_width = {STROKE_WIDTH}"
_DATA = (f"{_POLICY}.type=ddrl", f"{_POLICY}.text_dropout=0.0", f"{_POLICY}.data={{ {_MEDIA} }}")
ARMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "kl": (f"{_POLICY}.kl_beta=0.04", f"{_POLICY}.kl_mode=flow_grpo"),
    "kl-strong": (f"{_POLICY}.kl_beta=0.4", f"{_POLICY}.kl_mode=flow_grpo"),
    "ddrl": (*_DATA, f"{_POLICY}.data_beta=0.01"),
    "ddrl-weak": (*_DATA, f"{_POLICY}.data_beta=0.001"),
    "data-alone": (*_DATA, f"{_POLICY}.data_beta=0.01", f"{_POLICY}.policy_weight=0.0"),
    "shuffled": (f"{_POLICY}.shuffle_rewards=true",),
}
"""Changes of each arm to the recipe. KL 0.04 and diffusion loss 0.01 are the published weights; no weight was tuned."""
TITLES = {
    "none": "reward alone",
    "kl": "reward, KL 0.04",
    "kl-strong": "reward, KL 0.4",
    "ddrl": "reward, diffusion loss 0.01 (DDRL)",
    "ddrl-weak": "reward, diffusion loss 0.001 (DDRL)",
    "data-alone": "diffusion loss alone",
    "shuffled": "reward, shuffled",
}
MEASURES = {
    "reward": "reward (minus kB of JPEG)",
    "ocr": "OCR (not trained on)",
    "loss": "held-out diffusion loss",
    "ink": "ink fraction",
    "edges": "edge density",
    "diversity": "diversity",
}
INK_DISTANCE = 64
"""Least difference from the background, in levels of 255 in any channel, of a pixel that counts as ink."""
PICTURES_SHOWN = 10
"""Held-out samples in a row of pictures, each of another prompt."""
LUMINANCE = (0.299, 0.587, 0.114)


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="outputs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--out", type=Path, default=Path("outputs/replication"))
    options = parser.parse_args()
    _flows("run", BASE, "--run-id", "replication-base", "--store", options.store)
    if not (options.out / "base").exists():
        _flows("export", "replication-base", str(options.out / "base"), "--store", options.store)
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda cell: _train(cell[0], cell[1], options), itertools.product(SEEDS, ARMS)))
    table = pd.concat([measured(options.store, run_id).assign(arm=arm, seed=seed) for arm, seed, run_id in runs])
    table.to_csv(options.out / "results.csv", index=False)
    (options.out / "results.md").write_text(markdown(table), encoding="utf-8")
    draw(table, options.out / "results.svg")
    draw_pictures(options.store, options.out / "pictures.png")
    print(markdown(table))


def _train(seed: int, arm: str, options: argparse.Namespace) -> tuple[str, int, str]:
    run_id = f"replication-{arm}-{seed}"
    base = f"policy.model_name_or_path={options.out / 'base' / 'pipeline'}"
    changes = [word for change in (base, f"train.seed={seed}", *ARMS[arm]) for word in ("--set", change)]
    _flows("run", ARM, "--run-id", run_id, "--store", options.store, *changes)
    return arm, seed, run_id


def _flows(*words: str) -> None:
    """Run ``cosmos-flows`` in a process of its own. Raises ``CalledProcessError`` if it fails."""
    subprocess.run([sys.executable, "-m", "flows", *words], check=True)


def measured(store_url: str, run_id: str) -> pd.DataFrame:
    """Return a row for each evaluated policy version: ``version``, and a column for each of :data:`MEASURES`."""
    run = read_run(store_url, run_id)
    versions = [k for k in range(run.recipe.train.num_iterations + 1) if run.is_due(k)]
    return pd.DataFrame([{"version": k, **_measures(run, k)} for k in versions])


def _measures(run: AnyRun, k: int) -> dict[str, float]:
    samples = Artifact(input_of(run.slots.version(k, "evaluate")))
    rewards = {name: _manifest(run, k, f"evaluate-{name}").summary[name] for name in ("jpeg", "ocr")}
    pictures: dict[str, list[np.ndarray]] = {}
    for sample in (sample for sample in read_samples(samples) if sample.finite):
        pictures.setdefault(sample.row["prompt_id"], []).append(sample.pixels[0])
    loss = _manifest(run, k, "validate").summary["loss"]
    said = {"reward": rewards["jpeg"], "ocr": rewards["ocr"], "loss": loss}
    known = {name: math.nan if value is None else float(value) for name, value in said.items()}
    return known | statistics(list(pictures.values()))


def _manifest(run: AnyRun, k: int, stage: str) -> Manifest:
    return Artifact(input_of(run.slots.version(k, stage))).manifest


def statistics(groups: list[list[np.ndarray]]) -> dict[str, float]:
    """Return statistics of pictures grouped by prompt, each uint8 RGB ``[height, width, 3]``.

    ``ink`` is the share of pixels far from the background, the median of the border; ``edges`` the mean absolute
    difference of neighbouring pixels' luminance, across plus down, in [0, 2]; ``diversity`` the mean root-mean-square
    difference of two pictures of a prompt, in [0, 1].
    """
    pictures = np.stack([picture for group in groups for picture in group])
    border = np.concatenate(
        [pictures[:, [0, -1]].reshape(len(pictures), -1, 3), pictures[:, :, [0, -1]].reshape(len(pictures), -1, 3)],
        axis=1,
    )
    background = np.median(border, axis=1)[:, None, None]
    ink = (np.abs(pictures - background).max(axis=-1) > INK_DISTANCE).mean()
    luminance = pictures @ np.array(LUMINANCE) / 255
    edges = np.abs(np.diff(luminance, axis=1)).mean() + np.abs(np.diff(luminance, axis=2)).mean()
    pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
    apart = [np.sqrt(np.mean(((a.astype(np.float64) - b) / 255) ** 2)) for a, b in pairs]
    return {"ink": float(ink), "edges": float(edges), "diversity": float(np.mean(apart))}


def data_statistics(num_prompts: int = 40, num_pictures: int = 8) -> dict[str, float]:
    """Return the same statistics of held-out data, the first pictures of each prompt."""
    plugin = plugins.load("datasets", "rendered_text")
    media = plugin.Media(plugin.Options(split="test", num_items=num_prompts * 40, stroke_width=STROKE_WIDTH))
    groups: dict[str, list[np.ndarray]] = {}
    for index in range(len(media)):
        group = groups.setdefault(media.prompt_of(index).id, [])
        if len(group) < num_pictures:
            group.append(media.item(index)[0][0])
    return statistics(list(groups.values()))


def markdown(table: Any) -> str:
    """Return a table: data, base and final policy of each arm; mean over seeds ± standard error of that mean."""
    last = table["version"].max()
    rows = [["the data", "", "", "", *(f"{value:.3f}" for value in data_statistics().values())]]
    rows.append(["base", *(f"{value:.3f}" for value in table[table["version"] == 0][list(MEASURES)].mean())])
    for arm, title in TITLES.items():
        final = table[(table["version"] == last) & (table["arm"] == arm)][list(MEASURES)]
        found = {name: mean_of_independent(final[name]) for name in MEASURES}
        rows.append([title, *(f"{one.mean:.3f} ± {one.error:.3f}" for one in found.values())])
    header = ["", *MEASURES.values()]
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(table: Any, path: Path) -> None:
    """Draw reward, OCR and held-out loss by policy version: a line per arm with a band of one standard error."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, name in zip(panels, ("reward", "ocr", "loss"), strict=True):
        for arm, title in TITLES.items():
            by_version = table[table["arm"] == arm].groupby("version")[name]
            versions, found = zip(*((k, mean_of_independent(seeds)) for k, seeds in by_version), strict=True)
            means, errors = (np.array([getattr(one, part) for one in found]) for part in ("mean", "error"))
            (line,) = axes.plot(versions, means, label=title)
            axes.fill_between(versions, means - errors, means + errors, color=line.get_color(), alpha=0.2)
        axes.set(title=MEASURES[name], xlabel="iterations", yscale="log" if name == "loss" else "linear")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(TITLES), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def draw_pictures(store_url: str, path: Path) -> None:
    """Draw the same held-out samples of the base and of each arm's final policy, of the first seed: a row each."""
    rows = [("base", "none", True), *((title, arm, False) for arm, title in TITLES.items())]
    figure = Figure(figsize=(11, 0.6 * len(rows)), layout="constrained")
    for axes, (title, arm, is_base) in zip(figure.subplots(len(rows)), rows, strict=True):
        run = read_run(store_url, f"replication-{arm}-{SEEDS[0]}")
        version = 0 if is_base else run.recipe.train.num_iterations
        samples = Artifact(input_of(run.slots.version(version, "evaluate")))
        shown = [next(read_unit(samples, n)).pixels[0] for n in range(num_units(samples))[:PICTURES_SHOWN]]
        axes.imshow(np.hstack(shown), interpolation="nearest")
        axes.set_axis_off()
        axes.text(-8, shown[0].shape[0] / 2, title, ha="right", va="center", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
