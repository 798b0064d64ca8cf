"""Supervised steps of a VLM: the loss compared with the stock model's, and what may not change it."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conversations.packing import LABELS, LENGTHS, packed
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.weights.parts import CURRENT, EMA
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.execution.context import Context
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome, read_status
from stages.execution.runner import execute
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from stages.vlm.contracts import VlmEvaluate, VlmFinetune
from stages.vlm.finetune import VlmTrainer
from stages.vlm.loading import load, prompts_of
from stages.vlm.tokens import Conversations, Tokens
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.conftest import make
from tests.stages.ranks import RanksFailed, run_on_ranks, start_ranks
from tests.stages.vlm_data import Talks

EVERY = ("vision", "projector", "language")
LORA = LoraConfig(r=2, lora_alpha=4.0, target_modules=("all-linear",))


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    folder = tmp_path_factory.mktemp("vlm")
    (folder / "model").mkdir()
    talks = Talks(folder / "data", tiny.save_model(folder / "model", QWEN3)).standard()
    talks.index("index")
    talks.tokenize("tokens", "index")
    talks.policy("language")
    talks.policy("every", trains=EVERY)
    talks.policy("lora", LORA)
    return talks


def part(talks: Talks, slot: str, name: str = CURRENT) -> dict[str, Tensor]:
    return read_part(input_of(f"{talks.folder}/{slot}"), name)


def metrics(talks: Talks, slot: str) -> Any:
    return read_table(Artifact(input_of(f"{talks.folder}/{slot}")), METRICS)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_the_loss_is_the_stock_models_mean_over_the_labels_of_the_step(talks: Talks):
    talks.finetune("one", "every", range(1), trains=EVERY)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(talks.model)
    conversations = Conversations(
        Tokens(Artifact(input_of(f"{talks.folder}/tokens"))), prompts_of(talks.vlm), {"mine": talks.options}
    )
    losses: list[tuple[float, int]] = []
    for number in range(4):
        inputs = packed(model, [conversations[number]])
        labels = inputs.pop(LABELS)
        del inputs["position_ids"], inputs[LENGTHS]
        with torch.no_grad():
            losses.append((float(model(**inputs, labels=labels).loss), int((labels != -100).sum())))
    expected = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    row = metrics(talks, "one").iloc[0]
    assert row["loss"] == pytest.approx(expected, rel=1e-6)
    assert row["label_tokens"] == sum(count for _, count in losses)
    assert row["grad_norm"] > 0


def test_texts_alone_have_no_gradient_where_only_the_projector_trains(talks: Talks):
    talks.policy("projector", trains=("projector",))
    # One of its rows is the conversation without a medium.
    made = {"row_length": 30, "trains": ("projector",)}
    make(talks.finetune_request("projected", "projector", range(1), **made), talks.folder)
    before, after = part(talks, "projector"), part(talks, "projected")
    assert {name.split(".")[2] for name in before} == {"merger", "deepstack_merger_list"}
    assert distance(before, after) > 1e-4
    (labels,) = metrics(talks, "projected")["label_tokens"]
    assert labels == Tokens(Artifact(input_of(f"{talks.folder}/tokens"))).index["labels"].sum()


def test_packing_changes_neither_losses_nor_steps(talks: Talks):
    for slot, length in (("narrow", 1), ("wide", 1000)):
        talks.finetune(slot, "every", range(3), trains=EVERY, row_length=length)
    narrow, wide = metrics(talks, "narrow"), metrics(talks, "wide")
    assert narrow["loss"].tolist() == pytest.approx(wide["loss"].tolist(), rel=1e-6)
    assert narrow["grad_norm"].tolist() == pytest.approx(wide["grad_norm"].tolist(), rel=1e-4)
    assert wide["loss"].iloc[2] < wide["loss"].iloc[0]


def test_without_balance_each_row_counts_the_same(talks: Talks):
    talks.finetune("rows", "language", range(1), row_length=1, balance_dp_token=False)
    talks.finetune("tokens-mean", "language", range(1), row_length=1)
    one, other = (float(metrics(talks, slot)["loss"].iloc[0]) for slot in ("rows", "tokens-mean"))
    assert one != pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("balanced", [True, False])
def test_shorter_rows_after_a_lack_of_memory_train_the_same_objective(talks: Talks, balanced: bool):
    lengths = Tokens(Artifact(input_of(f"{talks.folder}/tokens"))).index["tokens"].tolist()
    settings: dict[str, Any] = {"row_length": sum(lengths[:3]), "balance_dp_token": balanced}
    requests = [talks.finetune_request(f"{name}-{balanced}", "language", range(2), **settings) for name in "ab"]
    make(requests[0], talks.folder)
    # Rows of a quarter hold one conversation each: they are divided, and their number is another.
    for halving in range(2):
        outcome, execution = Outcome(talks.folder / f"halved-{balanced}-{halving}", 0), Execution(halve=True)
        with pytest.MonkeyPatch.context() as patched:
            if halving == 0:
                patched.setattr(VlmTrainer, "step", _lacks_memory)
                with pytest.raises(MemoryError):
                    execute(requests[1], execution, outcome)
            else:
                execute(requests[1], execution, outcome)
    layout = json.loads(next(Path(requests[1].slot).rglob("layout.2.json")).read_bytes())["body"]
    assert (layout["halvings"], layout["layout"]["row_length"]) == (2, settings["row_length"] // 4)
    one, other = (metrics(talks, f"{name}-{balanced}") for name in "ab")
    assert one["loss"].tolist() == pytest.approx(other["loss"].tolist(), rel=1e-5)
    assert one["grad_norm"].tolist() == pytest.approx(other["grad_norm"].tolist(), rel=1e-4)
    assert distance(*(part(talks, f"{name}-{balanced}") for name in "ab")) < 1e-4


def _lacks_memory(self: VlmTrainer, index: int, rows: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("language", {}), ("every", {"trains": EVERY, "keeps_ema": True}), ("lora", {"lora": LORA})],
    ids=["language", "every", "lora"],
)
def test_ranges_of_steps_give_the_bits_of_one_range(talks: Talks, policy: str, settings: dict[str, Any]):
    """Also after an attempt that ended in its second step."""
    talks.finetune(f"{policy}-whole", policy, range(3), **settings)
    talks.finetune(f"{policy}-first", policy, range(1), **settings)
    step = VlmTrainer.step

    def dies(self: VlmTrainer, index: int, rows: Any) -> None:
        if index:
            raise KeyboardInterrupt
        step(self, index, rows)

    second = partial(talks.finetune, f"{policy}-second", f"{policy}-first", range(1, 3), k=1, **settings)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(VlmTrainer, "step", dies)
        with pytest.raises(KeyboardInterrupt):
            second()
    second()
    for name in [CURRENT, *([EMA] if "keeps_ema" in settings else []), "optimizer"]:
        assert distance(part(talks, f"{policy}-whole", name), part(talks, f"{policy}-second", name)) == 0
    with pytest.raises(ArtifactError, match="has clocks"):
        talks.finetune("skipped", f"{policy}-first", range(3, 4), k=1, **settings)


def test_an_answer_that_was_cut_off_is_not_correct(talks: Talks):
    # The parser finds the same in every answer.
    summary = talks.evaluate("cut", "language", max_new_tokens=1, parsers={"mine": "()"}).summary
    table = read_table(Artifact(input_of(f"{talks.folder}/cut")), VlmEvaluate.ANSWERS)
    assert table["correct"].tolist() == (table["whole"] & table["asked"]).tolist()
    assert summary["unfinished"] == (table["asked"] & ~table["whole"]).sum() > 0


def test_frozen_parts_are_no_part_of_a_policy(talks: Talks):
    assert all(name.startswith("model.language_model.") or name == "lm_head.weight" for name in part(talks, "language"))
    visual = {name for name in part(talks, "every") if name.startswith("model.visual.")}
    talks.policy("projector", trains=("projector",))
    projector = part(talks, "projector").keys()
    assert projector < visual
    assert all("merger" in name for name in projector)
    assert len(part(talks, "every")) == len(part(talks, "language")) + len(visual)
    adapted = {name.partition(".lora_")[0] for name in part(talks, "lora")}
    assert all(name.startswith("model.language_model.layers.") for name in adapted)
    with pytest.raises(ConfigError, match="no linear module of language ends in qkv; known: down_proj, gate_proj, k_p"):
        talks.policy("none", LoraConfig(r=2, target_modules=("qkv",)))


def test_checkpointing_changes_no_step_and_half_precision_only_rounding(talks: Talks):
    talks.finetune("plain", "every", range(2), trains=EVERY, keeps_ema=True)
    talks.finetune("checkpointed", "every", range(2), trains=EVERY, keeps_ema=True, gradient_checkpointing=True)
    assert distance(part(talks, "plain"), part(talks, "checkpointed")) < 1e-6
    before, first, average = part(talks, "every"), part(talks, "plain"), part(talks, "plain", EMA)
    assert 0 < distance(average, first) < distance(before, first)
    talks.finetune("half", "every", range(2), trains=EVERY, param_dtype="bfloat16")
    half, plain = (metrics(talks, slot)["loss"].tolist() for slot in ("half", "plain"))
    assert half == pytest.approx(plain, rel=2e-3)
    assert half != plain


@pytest.mark.processes
@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_have_the_loss_of_one(talks: Talks, shards: int, tmp_path: Path):
    """Rows of text alone are among them, and a rank has fewer rows than the other."""
    settings: dict[str, Any] = {"trains": EVERY, "row_length": 60, "batch_size": 3}
    talks.finetune("alone", "every", range(3), **settings)
    request = talks.finetune_request(f"two-{shards}", "every", range(3), **settings)
    (tmp_path / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
    execution = f'{{"parallelism": {{"world_size": 2, "dp_shard_size": {shards}}}}}'
    (tmp_path / "execution.json").write_text(execution, encoding="utf-8")
    run_on_ranks([str(tmp_path / "request.json")], tmp_path, 2, 120)
    one, two = metrics(talks, "alone"), metrics(talks, f"two-{shards}")
    assert one["loss"].tolist() == pytest.approx(two["loss"].tolist(), rel=1e-6)
    assert one["label_tokens"].tolist() == two["label_tokens"].tolist()
    assert distance(part(talks, "alone"), part(talks, f"two-{shards}")) < 1e-4


def load_for_another_device(talks: Talks, folder: Path, lora: LoraConfig | None) -> None:
    """On each of two ranks that share the weights. Tensors that were not moved would meet others in the first pass."""
    execution = Execution(parallelism=Parallelism(world_size=2, dp_shard_size=2))
    group = Group(60.0, execution.parallelism)
    group.device = torch.device("meta")
    request = talks.finetune_request("elsewhere", "lora" if lora else "every", range(1), lora=lora, trains=EVERY)
    context = Context(Attempt(request, {}, 1, "a"), group, Outcome(folder, group.rank), execution=execution)
    model, weights = load(request.settings(VlmFinetune), prompts_of(talks.vlm), context, "float32")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sharded = {name for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    assert sharded
    assert {name for name in tensors.keys() - sharded if tensors[name].device != group.device} == set()
    trained = [parameter for name, parameter in weights.parameters.items() if not weights.shards.cuts(name)]
    assert {parameter.device for parameter in trained} == {group.device}
    group.close()


@pytest.mark.processes
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_tensors_that_ranks_do_not_share_are_moved_to_their_device(
    talks: Talks, lora: LoraConfig | None, tmp_path: Path
):
    """Their mesh is of CPUs, their device is another one: embeddings, norms, biases, adapters and buffers go there."""
    start_ranks(partial(load_for_another_device, talks, tmp_path, lora), tmp_path, 2, 120)


@pytest.mark.processes
def test_a_killed_stage_gives_the_bits_of_an_undisturbed_one(talks: Talks, tmp_path: Path):
    settings: dict[str, Any] = {"trains": EVERY, "keeps_ema": True}
    whole = talks.finetune("not-killed", "every", range(4), **settings)
    request = talks.finetune_request("killed", "every", range(4), **settings)
    (tmp_path / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
    (tmp_path / "execution.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RanksFailed, match="rank 0, exit code -9"):
        run_on_ranks([str(tmp_path / "request.json")], tmp_path, 1, 60, before=_killed_in_the_third_step)
    status = read_status(tmp_path)
    assert status is not None
    assert status.phase == "training"
    again = make(request, tmp_path)
    assert again.attempt != whole.attempt
    assert again.content == whole.content


def _killed_in_the_third_step() -> None:
    """Let this process end as ``kill -9`` ends it."""
    step = VlmTrainer.step

    def dies(self: VlmTrainer, index: int, rows: Any) -> None:
        if index == 2:
            self.sign_of_life(index)
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, index, rows)

    VlmTrainer.step = dies
