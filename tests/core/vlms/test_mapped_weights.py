"""Weights of a VLM that are mapped from its files, compared with those that transformers reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cosmos_rl_core.parallel.sharding import WHOLE, materialise
from cosmos_rl_core.vlms._weights import MappedWeights
from tests.core.vlms import tiny
from tests.core.vlms.cases import ARCHITECTURES

CPU = torch.device("cpu")


def change_types(folder: Path, types: list[torch.dtype]) -> None:
    """Write the files again, in these types in turn."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = {name: tensors[name].to(types[number % len(types)]) for number, name in enumerate(sorted(tensors))}
    save_file(changed, file, {"format": "pt"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "types",
    [[torch.float32], [torch.bfloat16], [torch.float16], [torch.float32, torch.bfloat16]],
    ids=["float32", "bfloat16", "float16", "mixed"],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_buffers_equal_a_load_by_transformers(
    architecture: str, types: list[torch.dtype], tied: bool, tmp_path: Path
):
    folder = tiny.save_model(tmp_path, architecture, tie_word_embeddings=tied)
    change_types(tmp_path, types)
    cls = getattr(transformers, architecture)
    expected: Any = cls.from_pretrained(folder, dtype=torch.float32)
    weights = MappedWeights(cls, folder)
    model = weights.empty_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    materialise(model, CPU)
    model.tie_weights()
    weights.move_into(model, WHOLE)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    for ours, theirs in (
        (model.named_parameters(), expected.named_parameters()),
        (model.named_buffers(), expected.named_buffers()),
    ):
        found, wanted = dict(ours), dict(theirs)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
            assert found[name].data_ptr() % 64 == 0
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
