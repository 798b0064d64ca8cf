"""What commands print on pages: ``python -m tests.flows.printed`` stores it, and ``python -m docs.figures`` shows it.

The plan of SD3.5 Medium follows from its published configs, the status is of a run made by hand, without processes.
"""

import contextlib
import io
import json
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cosmos_rl_core.shipped import path_of
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from docs.figures import MEASURED
from flows.cli import app as cli
from flows.library.opened_run import open_run
from flows.session import loop
from flows.terminal.commands import COMMAND
from flows.terminal.console import VisibleConsole
from flows.watching import status_table
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import place_of
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from tests.benchmarks.models import SHAPES
from tests.flows.by_hand import files_of
from tests.flows.ledger.test_ledger import entry, written
from tests.hand_made import make, planned
from tests.pages import ROOT

NUM_PROMPTS = 25_432
"""Number of prompts of the set ``pickscore``."""
CLIP = {"vocab_size": 49408, "max_position_embeddings": 77}
CONFIGS: dict[str, dict[str, Any]] = {
    "text_encoder": CLIP
    | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"intermediate_size": 3072, "projection_dim": 768},
    "text_encoder_2": CLIP
    | {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20}
    | {"intermediate_size": 5120, "projection_dim": 1280},
    "text_encoder_3": {"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24}
    | {"vocab_size": 32128, "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True},
    "vae": {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    | {"layers_per_block": 2, "norm_num_groups": 32, "mid_block_add_attention": True},
    "tokenizer": {"model_max_length": 77},
    "tokenizer_2": {"model_max_length": 77},
}
"""What differs from the tiny pipeline's settings, besides what ``tests/benchmarks/shapes`` has."""
SECONDS = {"policy": 0.9, "embed": 2.3, "encode": 7.6, "export": 0.1, "evaluate": 36.8, "rollout": 9.4}
SECONDS |= {"reward": 4.3, "warn": 0.4, "fragment": 0.3, "update": 20.8, "report": 1.3}
SCORES = {"evaluate-ocr": 0.615, "reward-ocr": 0.688, "reward-pixel_statistics": 0.833}
"""As a run of the demo's recipe measured them."""
WHY = "iteration-0000/update ended (killed, exit code -9)"


def write_sd3_5(folder: Path) -> None:
    """Write the pipeline directory of SD3.5 Medium without its weights."""
    shutil.copytree(path_of("package:tiny-sd3", "pipeline"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shape = tomllib.loads((SHAPES / "sd3_5_medium.toml").read_text(encoding="utf-8"))
    for name in (*CONFIGS, "transformer"):
        file = folder / name / ("tokenizer_config.json" if name.startswith("tokenizer") else "config.json")
        values = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(values | shape.get(name, {}) | CONFIGS.get(name, {})), encoding="utf-8")


def plan(folder: Path) -> str:
    """Return what `plan` prints for SD3.5 Medium, without where things are and which files are missing."""
    write_sd3_5(folder / "model")
    prompts = "\n".join(f"prompt {number}" for number in range(NUM_PROMPTS))
    (folder / "prompts.txt").write_text(prompts, encoding="utf-8")
    words = ["plan", f"{ROOT}/configs/nft/sd3.toml", "--cluster", f"{ROOT}/deployments/clusters/eight-gpus.toml"]
    words += ["--store", str(folder / "store"), "--set", f"policy.model_name_or_path={folder}/model"]
    words += ["--set", f"train.train_policy.dataset={{ name = 'prompts', path = '{folder}/prompts.txt' }}"]
    lines = _said(*words).splitlines()
    first, missing = (
        next(i for i, line in enumerate(lines) if line.startswith(word)) for word in ("trains", "missing")
    )
    kept = [*lines[first:missing], *lines[lines.index("", missing) :]]
    return "\n".join(line.rstrip() for line in kept)


def status(folder: Path) -> str:
    """Return what `status` shows on a terminal of 80 x 24 for a run whose first update was killed at each attempt."""
    run_id = "ddrl-tiny-be4e1a9f"
    run = planned(str(ROOT / "configs/tiny/ddrl.toml"), folder, run_id=run_id, iterations=1)
    wave = "iteration-0000/update+fragment"
    ledger, update = written(run, SECONDS, until=wave), run.slots.iteration(0, "update")
    for second in range(run.recipe.launch.max_attempts):
        page = ledger.page(wave, 0.0)
        killed = [entry("update", place_of(update), 9.7, outcome="killed")]
        page.turn(lambda killed=killed: killed)
        page.close(killed)
        store.write(store.join(update, "logs", f"20250131T12000{second}-aaaa.log"), b"")
    with contextlib.suppress(InterruptedError):
        # The update comes first in its wave, and is made last.
        loop.make(run, lambda _, *requests: [_made(request) for request in reversed(requests)][::-1])
    store.write(store.join(run.url, "progress.json"), seal("progress", {"end": "failed", "error": WHY, "wave": wave}))
    command = f"cosmos-flows run package:tiny/ddrl --store /home/me/outputs --run-id {run_id}"
    store.write(store.join(run.url, f"{COMMAND}.json"), seal(COMMAND, {"command": command}))
    store.write(store.join(run.slots.report, "index.html"), b"<html>")
    file = io.StringIO()
    with contextlib.chdir(folder):
        terminal = VisibleConsole(file=file, force_terminal=True, width=80, height=24, color_system=None)
        status_table.show(open_run(run_id, run.store_url).now(), terminal)
    return file.getvalue().replace("store/runs", "outputs/runs").rstrip("\n")


def _made(request: Request) -> Manifest:
    """Make what is not current. The first update does not end."""
    if request.stage == "update":
        raise InterruptedError
    name = request.slot.rpartition("/")[2]
    scores: dict[str, Any] = {name.partition("-")[2]: SCORES[name]} if name in SCORES else {}
    files = files_of(request, request.slot.encode())
    return current_manifest(request) or make(request, files, seconds=SECONDS[request.stage], **scores)


def _said(*words: str) -> str:
    ended = CliRunner().invoke(cli.app, words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


PRINTED = {"plan-sd3_5": plan, "status": status}


def main() -> None:
    """Store everything."""
    for name, printed in PRINTED.items():
        with tempfile.TemporaryDirectory() as folder:
            (MEASURED / f"{name}.txt").write_text(printed(Path(folder)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
