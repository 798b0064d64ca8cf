"""Drawing of docs/demo.svg from a finished run of configs/tiny/nft.toml: ``python -m docs.demo_picture STORE RUN``."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from cosmos_rl_core.estimates.estimate import mean_of
from flows.library import OpenedRun, open_run
from flows.planning.base import AnyRun
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.samples import read_samples

WORDS = 5
"""Held-out prompts whose first sample is shown, of the base and of the final policy."""


def main(store: str, run_id: str) -> None:
    """Draw the curve of rewards, and the same held-out samples before and after training."""
    # Equal runs give equal files.
    mpl.rcParams.update({"svg.hashsalt": "demo", "font.size": 9, "svg.fonttype": "none"})
    figure, (curve, pictures) = plt.subplots(1, 2, figsize=(9, 2.5), width_ratios=(1, 1.15), layout="constrained")
    opened = open_run(run_id, store)
    lines = [json.loads(line) for line in Path(store, "runs", run_id, "metrics.jsonl").read_text().splitlines()]
    _draw_rewards(curve, lines, opened)
    _draw_samples(pictures, opened.run)
    figure.savefig(Path(__file__).with_name("demo.svg"), metadata={"Date": None})


def _draw_rewards(axes: Any, lines: list[dict[str, Any]], opened: OpenedRun) -> None:
    """Draw the training rewards, and the held-out ones with errors over prompts."""
    trained = {line["iteration"]: line["reward/ocr_mean"] for line in lines if "reward/ocr_mean" in line}
    held_out = [line["policy_version"] for line in lines if "val/ocr_mean" in line]
    found = [mean_of(table["ocr"], table["prompt_id"]) for table in map(opened.held_out, held_out)]
    means, errors = ([getattr(one, part) for one in found] for part in ("mean", "error"))
    axes.plot([*trained], [*trained.values()], color="0.6", label="training samples")
    axes.errorbar([*held_out], means, errors, fmt="o", color="C0", capsize=3, label="held-out words")
    for version, mean in zip(held_out, means, strict=True):
        axes.annotate(f"{mean:.3f}", (version, mean), (6 if version == 0 else -30, 8), textcoords="offset points")
    axes.set(xlabel="iteration", ylabel="OCR score", ylim=(0.5, 0.9))
    axes.legend(frameon=False, loc="lower right")


def _draw_samples(axes: Any, run: AnyRun) -> None:
    """Draw a row of pictures of the base policy, and one of the final policy with the same prompts and seeds."""
    last = run.recipe.train.num_iterations
    before, after = (_first_samples(run.slots.version(k, "evaluate")) for k in (0, last))
    ids = sorted(before)[:: len(before) // WORDS][:WORDS]
    rows = [np.concatenate([_framed(of[name]) for name in ids], axis=1) for of in (before, after)]
    axes.imshow(np.concatenate(rows), interpolation="nearest")
    height, width = _framed(before[ids[0]]).shape[:2]
    axes.set_xticks([width * (i + 0.5) for i in range(WORDS)], [before[name][0] for name in ids])
    axes.set_yticks([height * 0.5, height * 1.5], ["base", f"after {last}\niterations"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _first_samples(slot: str) -> dict[str, tuple[str, np.ndarray]]:
    """Return word and pixels of the first sample of each prompt, by prompt id."""
    artifact = Artifact(input_of(slot))
    stored = [*read_samples(artifact)]
    return {
        sample.row["prompt_id"]: (sample.row["prompt"].split('"')[1], sample.pixels[0]) for sample in reversed(stored)
    }


def _framed(shown: tuple[str, np.ndarray]) -> np.ndarray:
    return np.pad(shown[1], ((2, 2), (2, 2), (0, 0)), constant_values=255)


if __name__ == "__main__":
    main(*sys.argv[1:])
