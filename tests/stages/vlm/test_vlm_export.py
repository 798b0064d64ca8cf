"""What a trained VLM is exported as, and how it is judged: compared with transformers and peft."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.vlms._model import Vlm
from cosmos_rl_core.vlms._prompts import Prompts
from cosmos_rl_core.weights.parts import CURRENT
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from stages.vlm.contracts import VlmEvaluate
from stages.vlm.evaluate import is_correct
from stages.vlm.evaluated import answers_of, excerpt_of
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.vlm_data import Talks, clip, talk

EVERY = ("vision", "projector", "language")
LORA = LoraConfig(r=2, lora_alpha=4.0, target_modules=("all-linear",), r_pattern={"q_proj": 3})


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    folder = tmp_path_factory.mktemp("vlm")
    (folder / "model").mkdir()
    talks = Talks(folder / "data", tiny.save_model(folder / "model", QWEN3)).standard()
    talks.index("index")
    talks.tokenize("tokens", "index")
    talks.policy("every", trains=EVERY)
    talks.finetune("every-1", "every", range(1), trains=EVERY)
    talks.policy("lora", LORA)
    talks.finetune("lora-1", "lora", range(2), lora=LORA)
    return talks


def exported(talks: Talks, slot: str, folder: Path) -> Path:
    Artifact(input_of(f"{talks.folder}/{slot}")).bring_to(folder)
    return folder


def question(prompts: Prompts, talks: Talks) -> dict[str, Tensor]:
    picture = {"type": "image", "image": talks.folder / "media" / "a.jpg"}
    return prompts.prepare([[{"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}]])


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


def test_a_whole_model_is_read_by_transformers(talks: Talks, tmp_path: Path):
    talks.export("exported", "every-1", trains=EVERY)
    folder = exported(talks, "exported", tmp_path) / "model"
    base = Path(talks.model)
    assert {file.name for file in folder.iterdir()} == {file.name for file in base.iterdir()}
    for file in base.iterdir():
        assert (file.read_bytes() == (folder / file.name).read_bytes()) == (file.suffix != ".safetensors")
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    trained, found = read_part(input_of(f"{talks.folder}/every-1"), CURRENT), dict(model.named_parameters())
    assert trained.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(place) for place in (folder, base))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template


def test_an_adapter_is_read_by_peft(talks: Talks, tmp_path: Path):
    talks.export("adapter", "lora-1", LORA)
    folder = exported(talks, "adapter", tmp_path) / "adapter"
    base: Any = transformers.AutoModelForImageTextToText.from_pretrained(talks.model)
    batch = question(Prompts(talks.model), talks)
    before = logits(base, batch)
    model = peft.PeftModel.from_pretrained(base, str(folder))
    found = logits(model, batch)
    trained = read_part(input_of(f"{talks.folder}/lora-1"), CURRENT)
    plain: Any = transformers.AutoModelForImageTextToText.from_pretrained(talks.model)
    with torch.no_grad():
        for name in {name.rpartition(".lora_")[0] for name in trained}:
            a, b = (trained[f"{name}.lora_{factor}.weight"] for factor in "AB")
            assert len(a) == (3 if name.endswith("q_proj") else 2)
            plain.get_submodule(name).weight += 4.0 / len(a) * b @ a
    torch.testing.assert_close(found, logits(plain, batch), atol=1e-6, rtol=1e-5)
    assert (found - before).abs().max() > 1e-4


def test_the_held_out_loss_equals_the_first_step_of_training(talks: Talks):
    summary = talks.evaluate("evaluated", "every", trains=EVERY, max_new_tokens=0).summary
    first = read_table(Artifact(input_of(f"{talks.folder}/every-1")), METRICS).iloc[0]
    assert summary["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert (summary["items"], summary["label_tokens"]) == (4, int(first["label_tokens"]))


def test_answers_equal_the_answers_of_the_exported_model(talks: Talks, tmp_path: Path):
    talks.export("answering", "every-1", trains=EVERY)
    folder = exported(talks, "answering", tmp_path) / "model"
    summary = talks.evaluate("answers", "every-1", trains=EVERY).summary
    table: Any = read_table(Artifact(input_of(f"{talks.folder}/answers")), VlmEvaluate.ANSWERS)
    assert table["expected"].tolist() == ["A wave.", "It is alive.", "Hi.", "Another wave, much longer."]
    vlm = Vlm(transformers.AutoModelForImageTextToText.from_pretrained(folder), Prompts(str(folder)))
    assert table["answer"].iloc[0] == vlm.generate(question(vlm.prompts, talks), 3)[0]
    assert (summary["correct_mine"], summary["correct_mine_error"]) == (0.0, 0.0)


def test_questions_are_shown_with_their_media(talks: Talks):
    talks.evaluate("shown", "every-1", trains=EVERY)
    found = answers_of(Artifact(input_of(f"{talks.folder}/shown")))
    assert [one.question.text for one in found] == ["What?", "Why?", "Hello", "And this?"]
    # Pictures of 20 x 30 and 16 x 24 pixels; of a clip three frames of 20 x 30.
    assert [(one.question.height, one.question.width) for one in found] == [(20, 30), (20, 90), (0, 0), (24, 16)]
    assert [(one.expected, one.correct, one.question.fixed) for one in found][2] == ("Hi.", False, True)


def test_an_answer_that_was_cut_off_is_not_asked_for(talks: Talks, tmp_path: Path):
    alone = Talks(tmp_path / "alone", talks.model)
    alone.rows = [talk("Which?", "One."), talk("Which?", "One " + "and more " * 40)]
    alone.index("index")
    alone.tokenize("tokens", "index", max_length=100)
    alone.policy("policy")
    summary = alone.evaluate("shown", "policy").summary
    assert (summary["items"], summary["cut"]) == (2, 1)
    (found,) = answers_of(Artifact(input_of(f"{alone.folder}/shown")))
    assert found.expected == "One."
    (score,) = excerpt_of(Artifact(input_of(f"{alone.folder}/shown"))).scores
    assert score.n == 1


def test_a_question_of_a_medium_alone_has_no_text(talks: Talks, tmp_path: Path):
    """Not the seconds among a clip's tokens, and not the name of the role."""
    alone = Talks(tmp_path / "alone", talks.model)
    clip(tmp_path / "alone/media/c.mp4", 6, 20, 30)
    alone.rows = [talk("<video>", "It moves.", video="c.mp4")]
    alone.index("index")
    alone.tokenize("tokens", "index")
    alone.policy("policy")
    alone.evaluate("shown", "policy")
    (found,) = answers_of(Artifact(input_of(f"{alone.folder}/shown")))
    assert (found.question.text, found.question.width) == ("", 90)


@pytest.mark.parametrize(
    ("answer", "parser", "expected"),
    [
        (" A. ", None, True),
        ("A", None, False),
        ("so <answer>A.</answer>", r"<answer>(.*?)</answer>", True),
        ("so <answer>B.</answer>", r"<answer>(.*?)</answer>", False),
        ("so A.", r"<answer>(.*?)</answer>", False),
        ("B.", r"<answer>(.*?)</answer>|B", False),
    ],
)
def test_an_answer_is_compared_whole_or_as_parsed(answer: str, parser: str | None, expected: bool):
    assert is_correct(answer, "A." if parser is None else "well <answer>A.</answer>", parser) is expected
