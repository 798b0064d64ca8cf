"""Options of adapters: what they make of a transformer, what dropout leaves out, and what a stock pipeline loads."""

import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.families import (
    CPU,
    SCHEDULERS,
    Family,
    family_of,
    moved,
    run_stock,
    stock_pipeline,
    tensors_of,
    write_files,
)
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.sampling.flow import euler
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.lora import differences
from cosmos_rl_core.weights.lora_layers import KeyedDropout, dropouts_of, dropping
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import add_lora, initial_lora, prepare
from cosmos_rl_core.weights.shapes import trainable_elements, weight_shapes


def config(**fields: Any) -> LoraConfig:
    return LoraConfig.model_validate({"r": 4, "lora_alpha": 8.0, **fields})


PATTERNS = config(
    use_rslora=True,
    r_pattern={"to_q": 9, r"transformer_blocks\.1\..*to_k": 2},
    alpha_pattern={"attn.to_out.0": 3.0, "^transformer_blocks.0.attn.to_v": 24.0},
)


class Blocks(nn.Module):
    """Linear modules by the names that transformers have."""

    def __init__(self) -> None:
        super().__init__()
        names = ("to_q", "to_k", "to_v")
        self.blocks = nn.ModuleList([nn.ModuleDict({n: nn.Linear(6, 5, device=CPU) for n in names}) for _ in range(2)])

    def add_adapter(self, adapter_config: Any, adapter_name: str) -> None:
        """As diffusers' models add one."""
        import peft  # noqa: PLC0415

        peft.inject_adapter_in_model(adapter_config, self, adapter_name)


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_of("sd3", tmp_path_factory.mktemp("lora-options"))


# ---- ranks and strengths


def test_a_pattern_gives_its_modules_a_rank_and_a_strength(sd3: Family):
    model = sd3.load("transformer")
    weights = prepare(model.transformer, PATTERNS, reference=False)
    layers: dict[str, Any] = dict(model.transformer.named_modules())
    block = "transformer_blocks.{}.attn.{}"
    expected = {
        block.format(0, "to_q"): (9, 8 / math.sqrt(9)),
        block.format(1, "to_k"): (2, 8 / math.sqrt(2)),
        block.format(0, "to_k"): (4, 8 / math.sqrt(4)),
        block.format(0, "to_v"): (4, 24 / math.sqrt(4)),
        block.format(1, "to_v"): (4, 8 / math.sqrt(4)),
        block.format(1, "to_out.0"): (4, 3 / math.sqrt(4)),
    }
    found = {name: (layers[name].r["default"], layers[name].scaling["default"]) for name in expected}
    assert found == expected
    trained = sum(parameter.numel() for parameter in weights.parameters.values())
    assert trainable_elements(weight_shapes(sd3.folder), PATTERNS) == trained


def test_all_linear_adapts_exactly_the_modules_that_a_plan_counts(family: Family):
    everything = config(target_modules="all-linear")
    model = family.load("transformer")
    linear = {name for name, module in model.transformer.named_modules() if isinstance(module, nn.Linear)}
    weights = prepare(model.transformer, everything, reference=False)
    assert {name.rpartition(".lora_")[0] for name in weights.parameters} == linear
    trained = sum(parameter.numel() for parameter in weights.parameters.values())
    assert trainable_elements(weight_shapes(family.folder), everything) == trained


def test_differences_of_adapters_are_counted_in_words():
    linear = {f"blocks.0.{name}": (8, 8) for name in ("to_q", "to_k")}
    one, both = (config(target_modules=names) for names in (["to_q"], ["to_q", "to_k"]))
    assert [*differences(both, one, linear)] == ["it alone adapts 1 module, e.g. blocks.0.to_k"]
    (said,) = differences(one, config(target_modules=["to_q"], r=8), linear)
    assert said.endswith("(1 module, e.g. blocks.0.to_q)")


@pytest.mark.parametrize(
    ("field", "patterns", "expected"),
    [
        ("r_pattern", {"to_q": 3, "to_z": 2}, r"r_pattern: 'to_z' names none of the \d+ adapted modules, e.g. .*to_k"),
        ("r_pattern", {"o_q": 2}, "'o_q' names none"),
        (
            "alpha_pattern",
            {"to_q": 3.0, r"attn\..*": 2.0},
            r"alpha_pattern: .*attn.* and 'to_q' both name transformer_",
        ),
    ],
)
def test_a_pattern_with_no_effect_or_two_meanings_is_refused_by_plan_and_policy(
    sd3: Family, field: str, patterns: dict[str, float], expected: str
):
    lora = config(**{field: patterns})
    with pytest.raises(ConfigError, match=expected):
        trainable_elements(weight_shapes(sd3.folder), lora)
    with pytest.raises(ConfigError, match=expected):
        prepare(sd3.load("transformer").transformer, lora)


def test_a_gaussian_start_has_the_deviation_of_its_modules_own_rank():
    shapes = {"a.to_q.lora_A.weight": (16, 4096), "a.to_k.lora_A.weight": (4, 4096)}
    drawn = initial_lora(shapes, config(r_pattern={"to_q": 16}), 1)
    assert [float(tensor.std()) for _, tensor in sorted(drawn.items())] == pytest.approx([1 / 4, 1 / 16], rel=0.03)


# ---- dropout


def dropped_blocks(p: float) -> tuple[Any, dict[str, nn.Parameter]]:
    """Adapted linear modules, and the tensors of their adapters."""
    blocks = Blocks()
    add_lora(blocks, config(lora_dropout=p, target_modules=["to_q", "to_k", "to_v"]))
    tensors = {name: p for name, p in blocks.named_parameters() if p.requires_grad}
    for name, tensor in moved({name: p.data for name, p in tensors.items()}, 1.0).items():
        tensors[name].data = tensor
    return blocks, tensors


def test_an_adapter_sees_its_input_with_a_share_left_out_and_the_rest_scaled_up():
    blocks, tensors = dropped_blocks(0.25)
    layer, name = blocks.blocks[1]["to_k"], "blocks.1.to_k"
    x = torch.linspace(-1, 1, 2 * 40 * 6, device=CPU).view(2, 40, 6)
    plain, strength = layer(x), 8 / 4
    a, b = (tensors[f"{name}.lora_{part}.default.weight"] for part in "AB")
    with dropping(dropouts_of(blocks), [(1, "s0"), (1, "s1")]):
        mask = layer.lora_dropout["default"](torch.ones_like(x))
        assert torch.allclose(layer(x), layer.base_layer(x) + strength * (x * mask) @ a.T @ b.T, atol=1e-5)
        other = blocks.blocks[0]["to_k"].lora_dropout["default"](torch.ones_like(x))
    assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float((mask == 0).float().mean()) == pytest.approx(0.25, abs=0.06)
    assert not torch.equal(mask[0], mask[1])
    assert not torch.equal(mask, other)
    assert torch.equal(layer(x), plain)


def test_the_draws_of_a_sample_are_its_own():
    blocks, _ = dropped_blocks(0.5)
    ones, drop = torch.ones(2, 30, 6, device=CPU), blocks.blocks[0]["to_q"].lora_dropout["default"]
    keys = [(1, 0, "s0"), (1, 0, "s1")]
    before = torch.get_rng_state()
    with dropping(dropouts_of(blocks), keys):
        both = drop(ones)
        assert torch.equal(drop(ones), both)
        # Rows of a sample one after the other, as where frames are flattened into the batch.
        assert torch.equal(drop(ones.view(60, 6)).view(2, 30, 6), both)
        with pytest.raises(ValueError, match=r"blocks\.0\.to_q got 3 rows, expected a multiple of 2 samples"):
            drop(torch.ones(3, 6, device=CPU))
        with dropping(dropouts_of(blocks), ()):
            assert torch.equal(drop(ones), ones)
        assert torch.equal(drop(ones), both)
    for i in range(2):
        with dropping(dropouts_of(blocks), keys[i : i + 1]):
            assert torch.equal(drop(ones[i : i + 1])[0], both[i])
    with dropping(dropouts_of(blocks), [(1, 1, "s0")]):
        assert not torch.equal(drop(ones[:1])[0], both[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_without_dropout_no_dropout_module_is_added():
    blocks = Blocks()
    add_lora(blocks, config(target_modules=["to_q"]))
    assert not any(isinstance(module, KeyedDropout) for module in blocks.modules())


@torch.no_grad()
def test_a_velocity_with_dropout_does_not_depend_on_its_batch(family: Family):
    """In every linear module that may have it, so that each kind of input of this model is met."""
    model, t = family.load("transformer"), torch.tensor([0.3, 0.9], device=family.device)
    joined = directories.spec(family.folder).joined_inputs
    linear = [name for name, module in model.transformer.named_modules() if isinstance(module, nn.Linear)]
    targets = "all-linear" if not joined else [name for name in linear if name not in joined]
    weights = prepare(model.transformer, config(target_modules=targets, lora_dropout=0.5), reference=False)
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), 0.05))
    keys = [(0, "a"), (0, "b")]
    plain = model.velocity(family.noise, t, family.conditioning)
    with dropping(dropouts_of(model.transformer), keys):
        together = model.velocity(family.noise, t, family.conditioning)
    for i in range(2):
        own = family.conditioning.each(itemgetter(slice(i, i + 1)))
        with dropping(dropouts_of(model.transformer), keys[i : i + 1]):
            alone = model.velocity(family.noise[i : i + 1], t[i : i + 1], own)
        assert torch.allclose(alone[0], together[i], rtol=0, atol=1e-5)
    assert (together - plain).flatten(1).abs().amax(1).min() > 1e-2


# ---- exports


@pytest.mark.parametrize(("targets", "by"), [("all-linear", 0.08), (None, 0.2)])
def test_an_exported_adapter_with_all_options_makes_the_policys_pictures_in_stock(
    sd3: Family, targets: str | None, by: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chosen = {"target_modules": targets} if targets else {}
    lora = LoraConfig.model_validate(PATTERNS.model_dump() | chosen | {"lora_dropout": 0.3})
    model = sd3.load("transformer")
    weights = prepare(model.transformer, lora, reference=False)
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), by))
    write_files(export.lora_files(tensors_of(weights, CURRENT), lora), tmp_path)
    stock = stock_pipeline(sd3.folder)
    stock.load_lora_weights(tmp_path / "lora", weight_name="model.safetensors", adapter_name="default")
    layers: dict[str, Any] = dict(stock.transformer.named_modules())
    assert layers["transformer_blocks.0.attn.to_q"].scaling["default"] == 8 / 3
    monkeypatch.setattr(stock, "scheduler", SCHEDULERS["euler"]())
    steps = euler(schedule_of(stock.scheduler, 5))
    ours = sample(lambda x, t: model.velocity(x, t, sd3.conditioning), sd3.noise, steps).latents
    assert (ours - run_stock(stock, sd3.noise)).abs().max() < 1e-4
    base = sample(sd3.velocity(), sd3.noise, steps).latents
    assert (ours - base).abs().max() > 0.05
