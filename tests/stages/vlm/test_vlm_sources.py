"""Where the conversations of a step come from: bytes inside Arrow files, and several datasets by their weights."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cosmos_rl_core import seeds
from cosmos_rl_core.chat_datasets import hf_chat
from cosmos_rl_core.config.vlm.recipe import checked
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage.file_digests import files_digest
from flows.planning.plan import freeze
from flows.session import loop
from flows.vlm.plan import make_plan
from flows.vlm.run import VlmRun
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.tables import read_table
from stages.vlm.contracts import VlmIndex, VlmTokenize
from stages.vlm.loading import prompts_of
from stages.vlm.tokens import Conversations, Tokens
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.conftest import make
from tests.stages.vlm_data import Talks, talk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp("model"), QWEN3)


def as_arrow(talks: Talks, folder: Path) -> Path:
    """The standard conversations as a Hugging Face dataset, with the bytes of the media in columns."""
    rows, columns = [], {"images": list[Any](), "videos": list[Any]()}
    for row in talks.rows:
        messages = []
        for turn in row["conversations"]:
            marked = (
                turn["value"]
                .replace("<image>\n", "<image>")
                .replace("<video>", "|video|")
                .replace("<image>", "|image|")
            )
            parts = [part for part in marked.split("|") if part]
            content = [
                {"type": part} if part in ("image", "video") else {"type": "text", "text": part} for part in parts
            ]
            messages.append({"role": "user" if turn["from"] == "human" else "assistant", "content": content})
        rows.append(json.dumps(messages))
        for kind in ("image", "video"):
            names = [row[kind]] if kind in row else []
            columns[f"{kind}s"].append([{"bytes": (talks.folder / "media" / name).read_bytes()} for name in names])
    media = {name: pa.array(values, pa.list_(hf_folder.MEDIUM)) for name, values in columns.items()}
    return hf_folder.save(folder, {"conversations": pa.array(rows), **media}, {}, files=2)


def prepared(folder: Path, talks: Talks, options: Any, files: dict[str, Path]) -> Tokens:
    """The tokens of a dataset."""
    sources = {"mine": options}
    config = VlmIndex(sources=sources, files_digest=files_digest(files), max_left_out=0.0)
    make(Request(stage="vlm_index", slot=f"{folder}/index", seed=0, config=config), folder)
    tokenize = VlmTokenize(vlm=talks.vlm, sources=sources, max_length=1000)
    inputs = {"index": (input_of(f"{folder}/index"),)}
    make(Request(stage="vlm_tokenize", slot=f"{folder}/tokens", seed=0, config=tokenize, inputs=inputs), folder)
    return Tokens(Artifact(input_of(f"{folder}/tokens")))


def test_bytes_in_arrow_files_give_the_conversations_of_equal_files(tmp_path: Path, model: str):
    talks = Talks(tmp_path / "data", model).standard()
    (talks.folder / "rows.json").write_text(json.dumps(talks.rows), encoding="utf-8")
    folder = as_arrow(talks, tmp_path / "arrow")
    arrow = hf_chat.Options(path=str(folder))
    plain = prepared(tmp_path / "a", talks, talks.options, {"rows.json": talks.folder / "rows.json"})
    found = prepared(tmp_path / "b", talks, arrow, {path.name: path for path in folder.glob("*.arrow")})
    # The id of a conversation is the digest of its texts and its media.
    assert found.index["id"].tolist() == plain.index["id"].tolist()
    assert found.index["images"].tolist() == [1, 1, 0, 1]
    prompts = prompts_of(talks.vlm)
    read = Conversations(found, prompts, {"mine": arrow})
    expected = Conversations(plain, prompts, {"mine": talks.options})
    for number in range(4):
        for ours, theirs in zip(read[number].visuals, expected[number].visuals, strict=True):
            assert all(np.array_equal(ours.inputs[key], theirs.inputs[key]) for key in theirs.inputs)
    for file in folder.glob("*.arrow"):
        file.write_bytes(file.read_bytes().replace(b"\xff\xd8\xff\xe0", b"\xff\xd8\xff\xe1"))
    with pytest.raises(DatasetError, match=r"arrow#\d+-\d+ has changed since it was indexed"):
        read[0]


def test_a_mixture_is_drawn_by_its_weights(tmp_path: Path, model: str):
    answers = {"long": "A much longer answer.", "short": "A."}
    datasets: dict[str, Any] = {}
    for name, answer in answers.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps([talk(f"{name} {number}?", answer) for number in range(5)]), encoding="utf-8")
        datasets[name] = {"name": "llava", "annotation_path": str(file)}
    weights, steps, batch, seed = {"long": 1.0, "short": 3.0}, 6, 8, 3
    policy = {"type": "vlm_sft", "steps_per_iteration": steps, "datasets": datasets, "weights": weights}
    train = {"seed": seed, "num_iterations": 1, "train_batch_per_replica": batch, "train_policy": policy}
    recipe, _ = checked({"policy": {"model_name_or_path": model}, "train": train}, "test")
    run = VlmRun(freeze(make_plan(recipe, "mixed", "test"), str(tmp_path)), str(tmp_path))  # pyright: ignore[reportArgumentType]

    def launch(_: str, *asked: Request) -> list[Manifest]:
        return [make(request, tmp_path) for request in asked]

    loop.make(run, launch)
    index = read_table(Artifact(run.tokens()), VlmTokenize.INDEX)
    labels: dict[str, int] = dict(zip(index["source"].tolist(), index["labels"].tolist(), strict=True))
    # A number below a quarter is the dataset with the weight 1 of 4.
    draws = seeds.generator(seed, "data sources").random(steps * batch).reshape(steps, batch)
    expected = [Counter("long" if draw < 0.25 else "short" for draw in step) for step in draws]
    found = read_table(Artifact(input_of(run.slots.policy(1))), METRICS)["label_tokens"].tolist()
    assert found == [step["long"] * labels["long"] + step["short"] * labels["short"] for step in expected]
    assert len({*found}) > 1
    total = sum(expected, Counter())
    assert abs(total["long"] - steps * batch / 4) < 4 * (steps * batch * 0.25 * 0.75) ** 0.5
