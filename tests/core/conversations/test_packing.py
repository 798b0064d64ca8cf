"""Conversations in one row, compared with each of them alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.conversations import segments
from cosmos_rl_core.conversations.encoding import IGNORED, Encoded, Encoder
from cosmos_rl_core.conversations.packing import LABELS, LENGTHS, bins, fillers, packed, token_losses
from cosmos_rl_core.vlms._prompts import Prompts
from tests.core.vlms import tiny
from tests.core.vlms.cases import ARCHITECTURES, conversation

MEDIA = ([(20, 30), (6, 20, 30, 4)], [], [(5, 9, 40, 10), (33, 12)])
"""Media of the conversations: a picture and a clip, none, a clip and a picture."""


def answered(shapes: list[tuple[int, ...]], index: int) -> list[dict[str, Any]]:
    return [*conversation(shapes, index), {"role": "assistant", "content": f"It is {index}."}]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def encoded(folder: str) -> list[Encoded]:
    encoder = Encoder(Prompts(folder, {"video": {"fps": 2.0}}))
    return [encoder.encode(answered(shapes, index), 1000)[0] for index, shapes in enumerate(MEDIA)]


@pytest.fixture(scope="module")
def stock(folder: str) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    segments.use(model)
    return model


def arguments(model: Any, conversations: Sequence[Encoded]) -> dict[str, Any]:
    """Arguments of the model's forward."""
    inputs = packed(model, conversations)
    del inputs[LABELS]
    return inputs | segments.borders(inputs.pop(LENGTHS), torch.device("cpu"))


def masked(conversations: Sequence[Encoded], inputs: dict[str, Any]) -> dict[str, Any]:
    """The same for a stock model, which masks the others where positions in the text begin at 0 again."""
    in_text = torch.cat([torch.arange(len(one.input_ids)) for one in conversations])
    return inputs | {"position_ids": torch.cat([in_text[None, None], inputs["position_ids"]])}


def logits_of(model: Any, conversations: Sequence[Encoded]) -> Tensor:
    with torch.no_grad():
        return model(**arguments(model, conversations), use_cache=False).logits[0]


def gradients(model: Any, losses: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    losses.sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_logits_of_a_conversation_equal_its_logits_alone(model: Any, stock: Any, encoded: list[Encoded]):
    together = logits_of(model, encoded).split([len(one.input_ids) for one in encoded])
    for one, found in zip(encoded, together, strict=True):
        inputs = {"input_ids": one.input_ids[None], "mm_token_type_ids": one.kinds[None]}
        media = {name: tensor for name, tensor in packed(model, [one]).items() if "grid" in name or "pixel" in name}
        with torch.no_grad():
            expected = stock(**inputs, **media).logits[0]
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)


def test_gradients_of_a_row_are_the_sum_of_its_conversations_gradients(model: Any, encoded: list[Encoded]):
    together = gradients(model, token_losses(model, packed(model, encoded)))
    alone = [gradients(model, token_losses(model, packed(model, [one]))) for one in encoded]
    for name, found in together.items():
        expected = sum(each[name] for each in alone if name in each)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-3, msg=name)


def test_another_conversation_does_not_change_the_logits_of_the_others(model: Any, encoded: list[Encoded], folder: str):
    encoder = Encoder(Prompts(folder, {"video": {"fps": 2.0}}))
    other, _ = encoder.encode(answered([(16, 8), (6, 12, 12, 4)], 7), 1000)
    before, after = (logits_of(model, [first, *encoded[1:]]) for first in (encoded[0], other))
    count = sum(len(one.input_ids) for one in encoded[1:])
    torch.testing.assert_close(after[-count:], before[-count:], atol=2e-6, rtol=2e-5)
    turned = logits_of(model, [*encoded[1:], other])
    torch.testing.assert_close(turned[:count], before[-count:], atol=2e-6, rtol=2e-5)


def test_losses_equal_the_stock_models(model: Any, stock: Any, encoded: list[Encoded]):
    for one in encoded:
        inputs = packed(model, [one])
        given = {name: tensor for name, tensor in inputs.items() if name not in ("position_ids", LABELS, LENGTHS)}
        with torch.no_grad():
            found = token_losses(model, inputs)
            expected = stock(**given, labels=inputs[LABELS]).loss
        assert len(found) == int((one.labels != IGNORED).sum())
        torch.testing.assert_close(found.mean(), expected, atol=0, rtol=1e-6)


def test_a_row_without_labels_has_gradients_of_zero(model: Any, folder: str):
    row = packed(model, fillers(Prompts(folder), ["image", "video"]))
    found = gradients(model, token_losses(model, row))
    assert any(name.startswith("model.visual.") for name in found)
    assert all(not gradient.any() for gradient in found.values())


def test_fillers_do_not_change_the_logits_of_conversations(model: Any, encoded: list[Encoded], folder: str):
    filled = logits_of(model, [*encoded[:2], *fillers(Prompts(folder), ["image", "video"])])[:-2]
    torch.testing.assert_close(filled, logits_of(model, encoded[:2]), atol=2e-6, rtol=2e-5)


def test_rows_are_filled_from_the_longest_on():
    assert bins([5, 9, 1, 4, 5, 10], 10) == [[5], [1, 2], [0, 4], [3]]
    assert bins([], 4) == []
    with pytest.raises(ValueError, match="conversation 1 has 5 tokens, and a row has room for 4"):
        bins([1, 5], 4)


def test_a_packed_row_computes_like_a_row_with_a_mask(model: Any, stock: Any, encoded: list[Encoded]):
    """Logits and gradients, in float32, where transformers computes the whole row and masks the others."""
    inputs = arguments(model, encoded)
    weights = torch.randn(stock.config.text_config.vocab_size, generator=torch.Generator().manual_seed(0))
    found, expected = (
        one(**given, use_cache=False).logits[0] for one, given in ((model, inputs), (stock, masked(encoded, inputs)))
    )
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)
    ours, theirs = (gradients(one, logits @ weights) for one, logits in ((model, found), (stock, expected)))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-4, rtol=1e-3, msg=name)


class Numbers(TorchDispatchMode):
    """Counts how often Python asks a tensor for numbers."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def numbers_asked(model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """In a forward and backward pass."""
    tolist = Tensor.tolist
    with monkeypatch.context() as patched, Numbers() as counting:

        def counted(self: Tensor) -> Any:
            counting.found += 1
            return tolist(self)

        patched.setattr(Tensor, "tolist", counted)
        token_losses(model, inputs).sum().backward()
    return counting.found


def test_layers_read_no_numbers_back_from_the_device(
    folder: str, encoded: list[Encoded], monkeypatch: pytest.MonkeyPatch
):
    """A GPU waits for each: lengths are found once a forward, where the stock model asks in every layer of vision."""
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures
    cls = getattr(transformers, config.architectures[0])
    found: dict[str, list[int]] = {}
    for name in ("sdpa", segments.NAME):
        for depth in (2, 4):
            config.text_config.num_hidden_layers = config.vision_config.depth = depth
            config.text_config.layer_types = ["full_attention"] * depth
            model = cls._from_config(config, attn_implementation="sdpa")
            if name == segments.NAME:
                segments.use(model)
            found.setdefault(name, []).append(numbers_asked(model, packed(model, encoded[:1]), monkeypatch))
    assert found[segments.NAME][0] == found[segments.NAME][1]
    media = 2
    assert found["sdpa"][1] - found["sdpa"][0] == 2 * 3 * media


def test_gradient_checkpointing_leaves_the_bits(folder: str, model: Any, encoded: list[Encoded]):
    again: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    segments.use(again)
    again.train().gradient_checkpointing_enable({"use_reentrant": False})
    inputs = packed(model, encoded)
    (losses, expected), (recomputed, found) = (
        (losses := token_losses(one, inputs), gradients(one, losses)) for one in (model, again)
    )
    assert torch.equal(losses, recomputed)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_model_that_would_mix_conversations_is_refused(stock: Any, encoded: list[Encoded]):
    with pytest.raises(ValueError, match=r"2 conversations in a row, but Qwen\w+ takes no attention from outside"):
        token_losses(stock, packed(stock, encoded[:2]))


def test_without_lengths_conversations_would_mix(model: Any, encoded: list[Encoded]):
    """The reason for the rules of packing: the same row without borders gives other logits."""
    inputs = packed(model, encoded)
    del inputs[LABELS], inputs[LENGTHS]
    with torch.no_grad():
        mixed = model(**inputs, use_cache=False).logits[0]
    first = len(encoded[0].input_ids)
    difference = (mixed - logits_of(model, encoded)).abs()
    assert difference[:first].max() < 1e-5
    assert difference[first:].max() > 1e-3
