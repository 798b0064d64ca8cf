"""Folders of adapters: the formats that are read, and what is wrong with all others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.weights import adapter_files, lora

SHAPES = {
    "blocks.0.attn.to_q.weight": (8, 4),
    "blocks.0.attn.to_q.bias": (8,),
    "blocks.0.attn.to_k.weight": (8, 4),
    "blocks.1.attn.to_q.weight": (8, 4),
    "blocks.1.attn.to_k.weight": (8, 4),
    "blocks.0.net.2.weight": (4, 8),
    "blocks.1.net.2.weight": (4, 8),
    "blocks.2.norm.weight": (4,),
    "proj.weight": (4, 4, 1, 1),
    "blocks.0.proj.weight": (4, 4),
}


def factors(module: str, r: int = 2, out: int = 8, width: int = 4) -> dict[str, tuple[int, int]]:
    return {f"{module}.lora_A.weight": (r, width), f"{module}.lora_B.weight": (out, r)}


TO_Q = factors("blocks.0.attn.to_q") | factors("blocks.1.attn.to_q")


def write(
    folder: Path,
    tensors: dict[str, tuple[int, ...]],
    name: str = "pytorch_lora_weights.safetensors",
    metadata: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    stated = None if metadata is None else {"lora_adapter_metadata": json.dumps(metadata)}
    save_file({key: np.ones(shape, np.float32) for key, shape in tensors.items()}, folder / name, stated)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def settings(folder: Path, alpha: float | None = None):
    return adapter_files.settings(adapter_files.read(folder), SHAPES, alpha)


def refused(folder: Path, alpha: float | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(folder, alpha)
    return str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "infix", "name"),
    [
        ("transformer.", "", "pytorch_lora_weights.safetensors"),
        ("", "", "model.safetensors"),
        ("base_model.model.", ".default", "adapter_model.safetensors"),
        ("", "", "mine.safetensors"),
    ],
)
def test_names_of_diffusers_cosmos_rl_and_peft_are_one(prefix: str, infix: str, name: str, tmp_path: Path):
    write(tmp_path, {f"{prefix}{key[:-7]}{infix}.weight": shape for key, shape in TO_Q.items()}, name)
    file = adapter_files.read(tmp_path)
    assert file.entries.keys() == TO_Q.keys()
    assert file.ranks == {"blocks.0.attn.to_q": 2, "blocks.1.attn.to_q": 2}
    found = settings(tmp_path, 6.0)
    assert (found.r, found.lora_alpha, found.target_modules) == (2, 6.0, ("to_q",))


def test_each_module_has_its_own_rank_and_alpha(tmp_path: Path):
    tensors = TO_Q | factors("blocks.0.attn.to_k", 3) | factors("blocks.0.net.2", 2, 4, 8)
    stated = {"transformer.r": 2, "transformer.lora_alpha": 4, "transformer.alpha_pattern": {"to_k": 9}}
    write(tmp_path, {f"transformer.{key}": shape for key, shape in tensors.items()}, metadata=stated)
    found = settings(tmp_path)
    # to_k and net.2 of block 1 have no adapter.
    assert found.target_modules == ("blocks.0.attn.to_k", "blocks.0.net.2", "to_q")
    linear = {key[:-7]: shape for key, shape in SHAPES.items() if len(shape) == 2}
    assert set(lora.adapted(found, linear)) == {name.rpartition(".lora_")[0] for name in tensors}
    assert [lora.rank(found, m) for m in ("blocks.0.attn.to_k", "blocks.1.attn.to_q")] == [3, 2]
    assert [lora.scale(found, m) for m in ("blocks.0.attn.to_k", "blocks.1.attn.to_q")] == [3, 2]


def test_a_suffix_of_modules_is_more_than_a_number(tmp_path: Path):
    """``2`` would name a whole block too."""
    write(tmp_path, factors("blocks.0.net.2", 2, 4, 8) | factors("blocks.1.net.2", 2, 4, 8))
    assert settings(tmp_path, 1).target_modules == ("net.2",)


def test_alpha_is_stated_in_the_file_or_next_to_it_or_by_the_recipe(tmp_path: Path):
    folder = write(tmp_path, TO_Q)
    message = refused(folder)
    assert "does not state its alpha" in message
    assert "set policy.init_alpha" in message
    assert lora.scale(settings(folder, 8), "blocks.0.attn.to_q") == 4
    write(tmp_path, TO_Q, config={"r": 2, "lora_alpha": 3, "peft_type": "LORA"})
    assert settings(folder).lora_alpha == 3
    assert settings(folder, 3).lora_alpha == 3
    assert "policy.init_alpha = 8, but" in refused(folder, 8)
    write(tmp_path, TO_Q, metadata={"transformer.lora_alpha": 5, "transformer.use_rslora": True})
    assert (settings(folder).lora_alpha, settings(folder).use_rslora) == (5, True)


def test_the_digest_covers_tensors_and_settings(tmp_path: Path):
    folder = write(tmp_path, TO_Q)
    before = adapter_files.folder_digest(folder)
    (folder / "README.md").write_text("x", encoding="utf-8")
    assert adapter_files.folder_digest(folder) == before
    write(tmp_path, TO_Q, config={"lora_alpha": 3})
    assert adapter_files.folder_digest(folder) != before


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, "found no tensors"),
        ({"blocks.0.attn.to_q.weight": (8, 4)}, "found blocks.0.attn.to_q.weight (F32, [8, 4])"),
        ({"text_encoder.x.lora_A.weight": (2, 4), "text_encoder.x.lora_B.weight": (8, 2)}, "text_encoder.x"),
        ({"blocks.0.attn.to_q.lora_A.weight": (2, 4)}, "without the other factor"),
        (TO_Q | {"blocks.0.attn.to_q.lora_magnitude_vector": (8,)}, "lora_magnitude_vector"),
        (TO_Q | {f"transformer.{name}": shape for name, shape in TO_Q.items()}, "in addition to"),
        (factors("blocks.0.attn.to_q", 0), "lora_A.weight (F32, [0, 4])"),
        (factors("blocks.9.attn.to_q"), "it has no linear module blocks.9.attn.to_q"),
        (factors("blocks.0.attn.to_q", out=7), "blocks.0.attn.to_q is [8, 4], its factors are [7, 2] and [2, 4]"),
        (factors("blocks.0.norm"), "no linear module"),
    ],
)
def test_tensors_that_are_no_adapter_of_this_transformer_are_named(tensors, expected: str, tmp_path: Path):
    write(tmp_path, tensors, config={"lora_alpha": 1})
    assert expected in refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"lora_alpha": 1, "use_dora": True}, "sets use_dora"),
        ({"lora_alpha": 0}, "does not state its alpha"),
        ({"lora_alpha": "8"}, "does not state its alpha"),
        ({"lora_alpha": 8, "alpha_pattern": {"(": 1}}, "its alpha_pattern is not numbers by patterns"),
        ([1], "is not a table of settings"),
    ],
)
def test_settings_that_are_not_understood_are_refused(config, expected: str, tmp_path: Path):
    write(tmp_path, TO_Q, config=config)
    assert expected in refused(tmp_path)


def test_damaged_and_absent_files_are_refused(tmp_path: Path):
    assert "it has no safetensors" in refused(tmp_path)
    folder = write(tmp_path, TO_Q, config={"lora_alpha": 1})
    path = folder / "pytorch_lora_weights.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    assert "bytes, its header says" in refused(folder)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "not a safetensors file" in refused(folder)
    path.write_bytes(data)
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    assert "is not JSON" in refused(folder)
    write(tmp_path, TO_Q, "model.safetensors")
    assert "expected one of the files" in refused(folder)
