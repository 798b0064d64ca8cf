"""Measure fine-tuning of a VLM against a plain loop of transformers and peft, and the memory of large datasets.

``python -m tests.benchmarks.vlm`` writes what came out into ``results/``. Set ``OMP_NUM_THREADS=1``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from transformers import AutoModelForImageTextToText

from cosmos_rl_core.chat_datasets import llava
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.conversations.encoding import IGNORED, Encoded
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.tiny import qwen3_vl, shapes
from cosmos_rl_core.vlms import _folders
from cosmos_rl_core.vlms._prompts import Prompts, joined
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.training.order import ItemOrder
from stages.vlm.contracts import VlmFinetune, VlmIndex, VlmPolicy, VlmRef, VlmTokenize
from stages.vlm.tokens import Conversations, Tokens
from tests.benchmarks import record
from tests.benchmarks.peak import peak_bytes
from tests.stages.conftest import make

BATCH, ROW, WARM_UPS = 32, 512, 3
"""A row takes about ten of the conversations."""
LONG_ROW, LONG = 4096, (100, 300)
"""Tokens of a row far longer than its conversations, and the least and the most tokens of these."""
WITHOUT = (41, 62)
"""Tokens of a conversation about a picture, and about a clip, without a question."""
LANGUAGE = ("projector", "language")
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
WIDE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 96}
"""Sizes of a language model that is large enough for its arithmetic to count on a CPU."""


class Work:
    """Generated conversations of one kind of length, their tokens, and the model.

    ``long`` ones have :data:`LONG` tokens, in rows of :data:`LONG_ROW`.
    """

    def __init__(self, folder: Path, conversations: int, *, wide: bool, long: bool = False) -> None:
        self.folder, self.long, self.row_length = folder, long, LONG_ROW if long else ROW
        if not (folder / "train").exists():
            shapes.write(folder / "train", range(conversations * 2 // 3), range(conversations // 3))
            if long:
                _lengthen(folder / "train")
            _save(folder / "model", wide=wide)
        model = str(folder / "model")
        self.vlm = VlmRef(path=model, digest=_folders.digest(model), changes={"video": {"fps": 4.0}})
        place = folder / "train"
        self.sources: Any = {
            name: llava.Options(annotation_path=f"{place}/{name}.json", media_path=f"{place}/media")
            for name in ("pictures", "clips")
        }

    def make(self, slot: str, config: Any, iteration: int | None = None, **inputs: Input) -> Any:
        given = {name: (one,) for name, one in inputs.items()}
        place = {"slot": f"{self.folder}/{slot}", "seed": 0, "iteration": iteration}
        return make(Request(stage=config.name, config=config, inputs=given, **place), self.folder)

    def input(self, slot: str) -> Input:
        return input_of(f"{self.folder}/{slot}")

    def prepare(self) -> None:
        """Make tokens."""
        files = {name: Path(options.annotation_path) for name, options in self.sources.items()}
        self.make("index", VlmIndex(sources=self.sources, files_digest=files_digest(files)))
        config = VlmTokenize(vlm=self.vlm, sources=self.sources, max_length=LONG[1])
        self.make("tokens", config, index=self.input("index"))

    def trained_s(self, name: str, steps: int, lora: LoraConfig | None) -> float:
        """Core seconds of the stage with so many optimizer steps, from its start to its artifact."""
        of_vlm: Any = {"vlm": self.vlm, "lora": lora, "trains": LANGUAGE}
        self.make(f"{name}-policy", VlmPolicy(**of_vlm))
        config = VlmFinetune(
            **of_vlm,
            gradient_checkpointing=False,
            keeps_ema=False,
            steps=_steps(steps),
            sources=self.sources,
            batch_size=BATCH,
            row_length=self.row_length,
        )
        began_s = time.process_time()
        self.make(name, config, 0, policy=self.input(f"{name}-policy"), tokens=self.input("tokens"))
        return time.process_time() - began_s

    def plain_s(self, steps: int, lora: LoraConfig | None) -> list[float]:
        """Core seconds of each optimizer step of a plain loop on the same conversations, padded to one length."""
        prompts = Prompts(self.vlm.path, self.vlm.changes)
        tokens = Tokens(Artifact(self.input("tokens")))
        conversations = Conversations(tokens, prompts, self.sources)
        model = _plain_model(self.vlm.path, lora)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01)
        seconds: list[float] = []
        order = ItemOrder(tokens.index["source"].to_numpy(), {}, BATCH, 0)
        for step in range(steps + WARM_UPS):
            began_s = time.process_time()
            batch = _padded([conversations[item] for item, _ in order.of_step(step)])
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.process_time() - began_s)
        return seconds[WARM_UPS:]


def _lengthen(folder: Path) -> None:
    """Give each conversation a question, of a letter a token, so that lengths are evenly spread between bounds."""
    for file in sorted(folder.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        fewest, most = LONG[0] - WITHOUT[0], LONG[1] - WITHOUT[1]
        for number, row in enumerate(rows):
            row["conversations"][0]["value"] = "?" * (fewest + (most - fewest) * number // max(len(rows) - 1, 1))
        file.write_text(json.dumps(rows), encoding="utf-8")


def _save(folder: Path, *, wide: bool) -> None:
    qwen3_vl.save(folder)
    if not wide:
        return
    values = qwen3_vl.config()
    rope = values["text_config"]["rope_parameters"] | {"mrope_section": [16, 16, 16]}
    values["text_config"] |= WIDE | {"rope_parameters": rope}
    values["vision_config"] |= {"out_hidden_size": WIDE["hidden_size"]}
    cls: Any = type(AutoModelForImageTextToText.from_pretrained(folder))
    torch.manual_seed(0)
    cls(cls.config_class(**values)).save_pretrained(folder)


def _plain_model(path: str, lora: LoraConfig | None) -> Any:
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model.train()
    if lora is not None:
        modules = r".*language_model.*\.(q|k|v|o)_proj"
        return get_peft_model(model, PeftLora(r=lora.r, lora_alpha=int(lora.lora_alpha), target_modules=modules))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("visual" not in name or "merger" in name)
    return model


def _padded(batch: list[Encoded]) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch as transformers takes them: padded on the right, with a mask."""

    def pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    fields = {"input_ids": 0, "labels": IGNORED, "kinds": 0}
    found = {name: pad([getattr(one, name) for one in batch], value) for name, value in fields.items()}
    mask = pad([torch.ones_like(one.input_ids) for one in batch], 0)
    found["mm_token_type_ids"] = found.pop("kinds")
    return found | {"attention_mask": mask} | joined([visual for one in batch for visual in one.visuals])


def _steps(number: int) -> OptimizerSteps:
    rates: Any = {"lrs": (1e-4,) * number, "ema_decays": (None,) * number}
    return OptimizerSteps(**rates, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.01, grad_norm_clip=1.0, first_step=0)


def throughput(work: Work, lora: LoraConfig | None, rounds: int, steps: int) -> dict[str, Any]:
    """Return tokens a core second of the stage and of the plain loop, side by side, and their ratio.

    Core seconds, of all threads of the process: on one core they are what the clock shows if nothing else runs.
    """
    lengths = Tokens(Artifact(work.input("tokens"))).index["tokens"]
    tokens = float(lengths.mean()) * BATCH
    name, ours, plain = "lora" if lora else "full", list[float](), list[float]()
    for turn in range(rounds):
        short, long = (work.trained_s(f"{name}-{turn}-{n}", n, lora) for n in (WARM_UPS, WARM_UPS + steps))
        ours.append((long - short) / steps)
        plain.append(statistics.mean(work.plain_s(steps, lora)))
    here, there = (tokens / statistics.median(some) for some in (ours, plain))
    ratios = [theirs / mine for mine, theirs in zip(ours, plain, strict=True)]
    found = {
        "trains": name,
        "row_tokens": work.row_length,
        "conversation_tokens": [int(lengths.min()), int(lengths.max())],
        "tokens_per_core_s": here,
        "plain_tokens_per_core_s": there,
        "ratio": statistics.median(ratios),
    }
    return found | {"ratios": ratios}


def peak_mib(folder: Path, conversations: int) -> float:
    """Peak memory of a process that trains three steps on a dataset of so many conversations."""
    command = [sys.executable, "-m", "tests.benchmarks.vlm", "--child", str(folder), str(conversations)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.vlm", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--conversations", type=int, default=192, help="of the comparison")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[3000, 12000], help="conversations, of which memory is told"
    )
    parser.add_argument("--output", type=Path, default=record.FOLDER)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.child:
        work = Work(Path(settings.child[0]), int(settings.child[1]), wide=False)
        work.trained_s("trained", WARM_UPS, None)
        print(peak_bytes() / 2**20)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        works = [
            Work(place / name, settings.conversations, wide=True, long=name == "long") for name in ("wide", "long")
        ]
        for work in works:
            work.prepare()
        cases = [(work, lora) for work in works for lora in (None, LORA)]
        found = [throughput(work, lora, settings.rounds, settings.steps) for work, lora in cases]
        memory: dict[str, float] = {}
        for conversations in settings.sizes:
            here = place / f"of-{conversations}"
            Work(here, conversations, wide=False).prepare()
            memory[str(conversations)] = peak_mib(here, conversations)
    print(f"wrote {record.write(settings.output, 'vlm', {'throughput': found, 'peak_mib_by_conversations': memory})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
