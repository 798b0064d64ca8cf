"""Memory of the ranks of a machine that load a VLM, next to its bounds and its plan, and the bits that they load."""

import os
import re
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.vlm.recipe import checked
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.vlms import _folders
from flows.sizes.memory import MODEL, READING, StageMemory
from flows.vlm import memory
from stages.artifacts.attempt import Attempt
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.vlm.contracts import VlmPolicy, VlmRef
from stages.vlm.loading import load, prompts_of
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.ranks import start_ranks
from tests.stages.vlm_data import Talks

EVERY = ("vision", "projector", "language")
LORA = LoraConfig(r=2, lora_alpha=4.0, target_modules=("all-linear",))
RANKS = 4
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 7, "head_dim": 64}
WIDE |= {"num_attention_heads": 16, "num_key_value_heads": 4}
MIB = 2**20
SMALL = "small"
"""Folder of a model that ranks load first, with what libraries need once."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def talks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """Conversations, and a model of 400 MiB in float32, in files of this type; next to it a small one."""
    folder = tmp_path_factory.mktemp("vlm")
    values = tiny.config(QWEN3)
    text = values["text_config"] | WIDE
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [12, 10, 10]}
    vision = values["vision_config"] | {"out_hidden_size": WIDE["hidden_size"]}
    (folder / "model").mkdir()
    path = tiny.save_model(folder / "model", QWEN3, text_config=text, vision_config=vision)
    if request.param == "bfloat16":
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
        model.save_pretrained(path)
    (folder / SMALL).mkdir()
    tiny.save_model(folder / SMALL, QWEN3)
    return Talks(folder / "data", path)


@dataclass
class Watched:
    """Proportional sizes of the ranks' memory over time: a page that several processes map counts once in all."""

    folder: Path
    before_bytes: int = 0
    most_bytes: int = 0
    """Most bytes of all ranks together at one moment."""
    samples: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watched":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        return self.most_bytes - self.before_bytes

    def _watch(self) -> None:
        ready = [self.folder / f"ready-{rank}" for rank in range(RANKS)]
        # A file is there before its text is.
        while not all(file.exists() and file.stat().st_size for file in ready) and not self._done.wait(0.01):
            pass
        if self._done.is_set():
            return
        processes = [int(file.read_text(encoding="utf-8")) for file in ready]
        self.before_bytes = sum(map(proportional_bytes, processes))
        (self.folder / "go").touch()
        while not all((self.folder / f"loaded-{rank}").exists() for rank in range(RANKS)) and not self._done.is_set():
            self.most_bytes = max(self.most_bytes, sum(map(proportional_bytes, processes)))
            self.samples += 1
        self.most_bytes = max(self.most_bytes, sum(map(proportional_bytes, processes)))
        (self.folder / "seen").touch()


def proportional_bytes(process: int) -> int:
    return 1024 * _kibibytes(Path(f"/proc/{process}/smaps_rollup"), "Pss")


def _kibibytes(file: Path, name: str) -> int:
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB", file.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found)


def load_watched(talks: Talks, folder: Path, lora: LoraConfig | None, shards: int) -> None:
    """On each rank: load, with the parent looking on; then say how much more was resident at most, and compare bits."""
    parallelism = Parallelism(world_size=RANKS, dp_shard_size=shards)
    group, status = Group(240.0, parallelism), Path("/proc/self/status")
    outcome, execution = Outcome(folder, group.rank), Execution(parallelism=parallelism)

    def loaded(path: str) -> Any:
        vlm = VlmRef(path=path, digest=_folders.digest(path))
        config = VlmPolicy(vlm=vlm, lora=lora, trains=EVERY)
        request = Request(stage="vlm_policy", slot=f"{folder}/slot", seed=0, config=config)
        context = Context(Attempt(request, {}, 1, "a"), group, outcome, execution=execution)
        return load(config, prompts_of(vlm), context, "float32")

    loaded(str(Path(talks.model).with_name(SMALL)))
    (folder / f"ready-{group.rank}").write_text(str(os.getpid()), encoding="utf-8")
    until(folder / "go")
    # From now on the peak is this rank's own: a fork inherits its server's.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _kibibytes(status, "VmRSS")
    model, weights = loaded(talks.model)
    grown_bytes = 1024 * (_kibibytes(status, "VmHWM") - before)
    (folder / f"loaded-{group.rank}").write_text(str(grown_bytes), encoding="utf-8")
    until(folder / "seen")
    stored = load_file(Path(talks.model, "model.safetensors"))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            assert not parameter.any()
            continue
        expected = stored.pop(name.replace(".base_layer.", ".")).float()
        if isinstance(parameter, DTensor):
            first, count = weights.shards.rows(len(expected))
            parameter, expected = parameter.to_local(), expected[first : first + count]
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected), name
    assert not stored
    group.close()


def until(file: Path) -> None:
    deadline_s = time.monotonic() + 240
    while not file.exists():
        assert time.monotonic() < deadline_s, f"nobody wrote {file.name}"
        time.sleep(0.005)


def planned(talks: Talks, lora: LoraConfig | None, shards: int) -> StageMemory:
    adapters = None if lora is None else {"r": lora.r, "lora_alpha": lora.lora_alpha}
    values = {
        "policy": {"model_name_or_path": talks.model, "trains": [*EVERY], "lora": adapters},
        "train": {
            "num_iterations": 1,
            "train_policy": {"type": "vlm_sft", "datasets": {"mine": talks.options.model_dump(mode="json")}},
        },
        "launch": {"processes": RANKS, "dp_shard_size": shards},
    }
    (found,) = memory.stages(checked(values, "test")[0], talks.model, ["vlm_finetune"])
    return found


@pytest.mark.processes
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_ranks_that_share_weights_read_the_base_once(talks: Talks, lora: LoraConfig | None, tmp_path: Path):
    """Together they never hold more than 1.2 of the model, and each what was planned."""
    with Watched(tmp_path) as watched:
        start_ranks(partial(load_watched, talks, tmp_path, lora, RANKS), tmp_path, RANKS, 300)
    rows = planned(talks, lora, RANKS).rows
    whole_bytes = planned(talks, lora, 1).rows[MODEL].device
    assert whole_bytes > 400 * MIB
    assert watched.samples > 3
    assert 0.9 * whole_bytes < watched.grown_bytes < 1.2 * whole_bytes
    each = [int((tmp_path / f"loaded-{rank}").read_text(encoding="utf-8")) for rank in range(RANKS)]
    assert each == pytest.approx([rows[MODEL].device + rows[READING].cpu] * RANKS, rel=0.15)


@pytest.mark.processes
def test_ranks_with_whole_weights_hold_each_a_model_and_no_more(talks: Talks, tmp_path: Path):
    with Watched(tmp_path) as watched:
        start_ranks(partial(load_watched, talks, tmp_path, None, 1), tmp_path, RANKS, 300)
    rows = planned(talks, None, 1).rows
    assert watched.grown_bytes < 1.05 * RANKS * (rows[MODEL].device + rows[READING].cpu)
    each = [int((tmp_path / f"loaded-{rank}").read_text(encoding="utf-8")) for rank in range(RANKS)]
    assert each == pytest.approx([rows[MODEL].device + rows[READING].cpu] * RANKS, rel=0.15)
