"""Small made-up runs for pages: artifacts with known pictures and scores, committed as the stages would."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.datasets._base import Prompt
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.layouts import cut
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.contracts import METRICS, MediaShape, ModelRef
from stages.formats.samples import StoredSample, unit_files
from stages.formats.tables import to_parquet
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from stages.reporting.contracts import Fragment, Report
from stages.reporting.excerpt import Excerpt
from tests.stages.conftest import make

Inputs = dict[str, list[Input]]
MODEL = ModelRef(path="package:tiny-sd3", adapter="sd3", digest="0" * 64)
SHAPE = MediaShape(size=(4, 8), frames=1)
TRAIN = (Prompt(id="a", text="a sign <b>A & B</b>"), Prompt(id="b", text='a sign "C"'))
TEST = (Prompt(id="t", text="see http://example.com/x.png"), Prompt(id="u", text="plain"))
ROLLOUT_SCORES = [[0.0, 1.0, None, 0.25, 0.5, 0.5], [0.5, 1.0, 0.75, 1.0, 1.0, 0.5]]
EVALUATION_SCORES = [[0.0, 0.25, 0.5, 0.25], [0.5, 0.25, 1.0, None]]


def commit(slot: Path, request: Request, files: dict[str, bytes], **summary: Any) -> Input:
    """Commit an artifact of these files."""
    generation, attempt_id, _ = Attempt.begin(request, print)
    attempt = Attempt(request, {}, generation, attempt_id)
    for name, data in files.items():
        attempt.put(name, data)
    attempt.commit(attempt.files, summary, print)
    return input_of(str(slot))


def ask(slot: Path, config: contracts.StageConfig, iteration: int | None, **inputs: Sequence[Input]) -> Request:
    roles = {role: tuple(sources) for role, sources in inputs.items()}
    return Request(stage=config.name, slot=str(slot), iteration=iteration, seed=7, config=config, inputs=roles)


def sample_set(
    prompts: tuple[Prompt, ...], n_generation: int, frames: int, shade: int, finite: bool = True
) -> dict[str, bytes]:
    """Samples in shards of two, each of a colour of its own."""
    plans = plan_samples(prompts, n_generation, 7, None)
    files: dict[str, bytes] = {}
    for number, unit in enumerate(cut(plans, 2)):
        stored: list[StoredSample] = []
        for place, plan in enumerate(unit):
            pixels = np.full((frames, 4, 8, 3), (shade, number * 40, place * 90), np.uint8)
            pixels[:, :, :, 0] += np.arange(frames, dtype=np.uint8)[:, None, None]
            stored.append(with_media(plan, pixels if finite else None, None, {}))
        files |= unit_files(number, stored)
    return files


def score_table(prompts: tuple[Prompt, ...], n_generation: int, scores: Sequence[float | None]) -> pd.DataFrame:
    plans = plan_samples(prompts, n_generation, 7, None)
    return pd.DataFrame(
        {
            "sample_id": [p.sample_id for p in plans],
            "prompt_id": [p.prompt.id for p in plans],
            "score": pd.Series(scores, dtype="float64"),
            "valid": [s is not None for s in scores],
            "error": ["ValueError: <i>no</i> text" if s is None else "" for s in scores],
            "details": "{}",
        }
    )


def score_files(table: pd.DataFrame) -> dict[str, bytes]:
    said = ["error", "details"]
    return {
        contracts.Reward.SCORES: to_parquet(table.drop(columns=said)),
        contracts.Reward.ANSWERS: to_parquet(table.drop(columns=["prompt_id", "score", "valid"])),
    }


def rollout_config() -> contracts.Rollout:
    numbers: dict[str, Any] = {"n_generation": 3, "sample": SolverConfig(num_steps=2), "batch_size": 2}
    return contracts.Rollout(model=MODEL, lora=None, prompts=TRAIN, media=SHAPE, samples_per_shard=2, **numbers)


def evaluate_config() -> contracts.Evaluate:
    numbers: dict[str, Any] = {"n_generation": 2, "num_steps": 2, "guidance_scale": 1.0, "batch_size": 2}
    return contracts.Evaluate(
        model=MODEL, prompts=TEST, media=SHAPE, max_prompt_length=8, samples_per_shard=2, **numbers
    )


def reward_config() -> contracts.Reward:
    return contracts.Reward.model_validate(
        {"reward": {"name": "jpeg"}, "scorer": "s", "max_attempts": 1, "max_failed_fraction": 0.5}, strict=False
    )


def update_config(k: int) -> contracts.Update:
    steps = OptimizerSteps(
        lrs=(1e-3,), ema_decays=(None,), betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0, grad_norm_clip=1.0,
        first_step=k,
    )  # fmt: skip
    return contracts.Update.model_validate(
        {
            "model": MODEL, "lora": None, "gradient_checkpointing": False, "steps": steps,
            "sample": {"num_steps": 2},
            "algorithm": {"type": "nft", "dataset": {"name": "rendered_text"}}, "reward_weights": {"jpeg": 1.0},
            "keeps_ema": False, "old_decay": 0.0,
        }
    )  # fmt: skip


def policy(root: Path, frames: int = 1) -> Input:
    config = contracts.Policy(model=MODEL, from_scratch=False, lora=None)
    return commit(root / "policy", ask(root / "policy", config, None), {"current/00000.safetensors": b"weights 0"})


def rollout(root: Path, k: int, frames: int = 1, finite: bool = True) -> Input:
    base, slot = policy(root), root / f"iterations/{k}/rollout"
    files = sample_set(TRAIN, 3, frames, 10 + k, finite)
    return commit(slot, ask(slot, rollout_config(), k, policy=[base], embeddings=[base]), files)


def scored(root: Path, samples: Input, k: int, table: pd.DataFrame) -> Input:
    slot = root / f"{Path(samples.url).parent.name}/reward-{k}"
    return commit(slot, ask(slot, reward_config(), k, samples=[samples]), score_files(table))


def update(root: Path, k: int, rollouts: Input, scores: Input) -> Input:
    base, slot = policy(root), root / f"iterations/{k}/update"
    row = {"step": k, "loss": 0.5 / (k + 1), "grad_norm": 2.0, "lr": 1e-3, "kl": 0.25 * (k + 1), "ratio": np.nan}
    sources = {"rollouts": rollouts, "scores": scores, "behaviours": base, "policy": base, "embeddings": base}
    request = ask(slot, update_config(k), k, **{role: [source] for role, source in sources.items()})
    files = {METRICS: to_parquet(pd.DataFrame([row])), "current/00000.safetensors": f"weights of {k}".encode()}
    return commit(slot, request, files, excluded=k + 1)


def fragment(root: Path, k: int, *, held_out: bool = False, name: str = "fragment", inputs: Inputs) -> Input:
    """A fragment by the real stage; its folder is named by its kind and number."""
    slot = root / f"{'exports' if held_out else 'iterations'}/{k}/{name}"
    rewards = ("jpeg",) if inputs.get("scores") else ()
    config = Fragment(held_out=held_out, rewards=rewards, headline="".join(rewards))
    make(ask(slot, config, k, **inputs), root)
    return input_of(str(slot))


def excerpt(source: Input) -> Excerpt:
    return Excerpt.read(Artifact(source).read(Fragment.FRAGMENT), source.url)


def iteration(root: Path, k: int, frames: int = 1, finite: bool = True) -> dict[str, Input]:
    """A fragment and an update, with what they were made from."""
    samples = rollout(root, k, frames, finite)
    scores = scored(root, samples, k, score_table(TRAIN, 3, ROLLOUT_SCORES[k]))
    made = fragment(root, k, inputs={"samples": [samples], "scores": [scores]})
    return {"fragments": made, "updates": update(root, k, samples, scores), "samples": samples, "scores": scores}


def evaluation(root: Path, version: int, scores: Sequence[float | None] = (), frames: int = 1) -> dict[str, Input]:
    """Held-out samples of a version with their scores."""
    base, slot = policy(root), root / f"exports/{version}/evaluate"
    made = ask(slot, evaluate_config(), None, export=[base])
    samples = commit(slot, made, sample_set(TEST, 2, frames, 100 + version))
    if not scores:
        return {"samples": samples}
    return {"samples": samples, "scores": scored(root, samples, version, score_table(TEST, 2, scores))}


def judged(root: Path, version: int, first: dict[str, Input], now: dict[str, Input]) -> Input:
    """The fragment of a version, compared with version 0."""
    inputs = {role: [source] for role, source in now.items()}
    before = {f"first_{role}".replace("_samples", ""): [source] for role, source in first.items()} if version else {}
    return fragment(root, version, held_out=True, inputs=inputs | before)


def inputs_of_run(root: Path, frames: int = 1) -> Inputs:
    """Two iterations, and evaluations of policies 0 and 2."""
    made = [iteration(root, k, frames) for k in (0, 1)]
    ends = [evaluation(root, 2 * place, EVALUATION_SCORES[place]) for place in (0, 1)]
    pages = [judged(root, 2 * place, ends[0], one) for place, one in enumerate(ends)]
    return {role: [one[role] for one in made] for role in ("fragments", "updates")} | {"judged": pages}


def page_of(root: Path, inputs: Inputs, title: str = "my run", reward: str = "jpeg", **settings: Any) -> str:
    """The page of the stage ``report``."""
    request = ask(root / "report", Report(title=title, reward=reward, **settings), None, **inputs)
    make(request, root)
    return Artifact(input_of(request.slot)).read(Report.PAGE).decode()
