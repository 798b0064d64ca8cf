"""Parts of a policy: swapping them is loading them, and nothing else changes."""

import hashlib

import pytest
import torch
from safetensors.torch import load as load_tensors

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import tensors_of
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.parallel import compiling, sharding
from cosmos_rl_core.weights import parts, policy_weights
from cosmos_rl_core.weights.lora_layers import AdaptedLinear
from cosmos_rl_core.weights.policy_weights import initial_lora, prepare
from tests import other_device

CPU = torch.device("cpu")
LORA = LoraConfig(r=4, lora_alpha=8.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tiny_pipelines.save("sd3", tmp_path_factory.mktemp("weights") / "sd3"))


@pytest.fixture(scope="session")
def conditioning(folder, device):
    return stack(load_model(folder, ("text",), CPU).encode_prompts(["a cat"], 16), device)


@pytest.fixture
def model(folder, device):
    return load_model(folder, ("transformer",), device)


@pytest.fixture(params=["lora", "full"])
def lora(request):
    return LORA if request.param == "lora" else None


def output(model, conditioning):
    device = conditioning["prompt_embeds"].device
    x_t = torch.linspace(-2, 2, 256, device=CPU).reshape(1, 4, 8, 8).to(device)
    return model.velocity(x_t, torch.tensor([0.6], device=device), conditioning)


def shapes(weights):
    return {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}


def noisy(weights, seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    return {
        name: parameter.data.cpu() + 0.1 * torch.randn(parameter.shape, generator=generator, device=CPU)
        for name, parameter in weights.parameters.items()
    }


def flags(model):
    return {name: parameter.requires_grad for name, parameter in model.transformer.named_parameters()}


def test_reference_is_the_base_model_exactly(model, conditioning, lora):
    with torch.no_grad():
        base = output(model, conditioning)
    weights = prepare(model.transformer, lora)
    weights.load("current", noisy(weights, 1))
    with weights.use("reference"):
        assert torch.equal(output(model, conditioning), base)
    assert not torch.equal(output(model, conditioning), base)


def adapters_run(model, conditioning):
    """The number of modules whose adapters compute in a forward pass."""
    layers = [module for module in model.transformer.modules() if isinstance(module, AdaptedLinear)]
    ran: list[str] = []
    hooks = [one.lora_dropout["default"].register_forward_hook(lambda *_: ran.append("adapter")) for one in layers]
    output(model, conditioning)
    for hook in hooks:
        hook.remove()
    assert len(ran) in (0, len(layers))
    return len(ran)


def test_the_base_as_a_reference_computes_no_adapter(model, conditioning):
    weights = prepare(model.transformer, LORA)
    with weights.use("reference"):
        assert adapters_run(model, conditioning) == 0
    assert adapters_run(model, conditioning) > 0


def test_a_reference_below_which_an_adapter_is_frozen_is_the_base(model, conditioning):
    with torch.no_grad():
        base = output(model, conditioning)
    weights = prepare(model.transformer, LORA, below=LORA)
    weights.load_below(noisy(weights, 1))
    with weights.use("reference"):
        assert torch.equal(output(model, conditioning), base)
        assert adapters_run(model, conditioning) == 0
    assert not torch.equal(output(model, conditioning), base)


@pytest.mark.parametrize("change", ["load", "lerp", "create", "alias", "remove"])
def test_a_reference_that_changes_is_the_base_no_longer(model, conditioning, change):
    weights = prepare(model.transformer, LORA)
    weights.load("current", noisy(weights, 1))
    part = "reference"
    if change == "load":
        weights.load("reference", weights.here("current"))
    elif change == "lerp":
        weights.lerp_("reference", 0.0)
    elif change == "create":
        weights.create("reference")
    elif change == "alias":
        part = "behaviour"
        weights.share(part, "reference")
        weights.lerp_("reference", 0.0)
    else:
        weights.remove("reference")
        weights.create("reference")
        weights.lerp_("reference", 0.5)
    with weights.use(part):
        found = output(model, conditioning)
    assert torch.equal(found, output(model, conditioning))


def test_merged_adapters_give_the_velocity_of_the_adapters(model, conditioning):
    weights = prepare(model.transformer, LORA, below=LORA, reference=False)
    weights.load("current", noisy(weights, 1))
    weights.load_below(noisy(weights, 2))
    base = {name: weight.data for name, weight in model.transformer.named_parameters() if "lora_" not in name}
    bytes_before = {name: weight.clone() for name, weight in base.items()}
    with torch.no_grad():
        expected = output(model, conditioning)
        weights.merge()
        found = output(model, conditioning)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert adapters_run(model, conditioning) == 0
    # Whoever shares the memory of the base still has the base.
    assert all(torch.equal(base[name], weight) for name, weight in bytes_before.items())
    with pytest.raises(RuntimeError, match="merged"), weights.use("current"):
        pass


def test_merged_adapters_of_zeros_change_no_bit(model, conditioning):
    with torch.no_grad():
        base = output(model, conditioning)
        prepare(model.transformer, LORA).merge()
        assert torch.equal(output(model, conditioning), base)


def test_a_fresh_policy_is_the_base_model_exactly(model, conditioning):
    with torch.no_grad():
        base = output(model, conditioning)
    weights = prepare(model.transformer, LORA)
    weights.load("current", initial_lora(shapes(weights), LORA, 3))
    assert torch.equal(output(model, conditioning), base)


def test_using_a_part_gives_the_same_as_loading_it(model, conditioning, lora):
    weights = prepare(model.transformer, lora)
    old, current = noisy(weights, 1), noisy(weights, 2)
    weights.load("current", old)
    expected = output(model, conditioning)
    weights.load("current", current)
    weights.create("old", old)
    now = output(model, conditioning)
    with weights.use("old"):
        assert torch.equal(output(model, conditioning), expected)
        assert not torch.is_grad_enabled()
    assert torch.equal(output(model, conditioning), now)
    assert weights.parts == ("current", "reference", "old")


def test_a_part_by_a_second_name_takes_no_memory_of_its_own(model, conditioning):
    weights = prepare(model.transformer, LORA)
    weights.create("old", noisy(weights, 1))
    weights.share("behaviour", "old")
    with weights.use("old"):
        expected = output(model, conditioning)
    with weights.use("behaviour"):
        assert torch.equal(output(model, conditioning), expected)
    assert all(tensor is weights.here("old")[name] for name, tensor in weights.here("behaviour").items())


def test_only_current_has_gradients_and_flags_never_change(model, conditioning, lora):
    weights = prepare(model.transformer, lora)
    weights.load("current", noisy(weights, 1))
    before, data = flags(model), {n: p.data_ptr() for n, p in weights.parameters.items()}
    with weights.use("reference"):
        assert not output(model, conditioning).requires_grad
        assert flags(model) == before
    with weights.use("current"):
        output(model, conditioning).square().mean().backward()
    assert flags(model) == before
    assert all(before[name] for name, p in model.transformer.named_parameters() if p.grad is not None)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in weights.parameters.values())
    assert {n: p.data_ptr() for n, p in weights.parameters.items()} == data


def test_gradients_survive_a_swap_between_forward_and_backward(model, conditioning, lora):
    weights = prepare(model.transformer, lora)
    weights.load("current", noisy(weights, 1))
    output(model, conditioning).square().mean().backward()
    expected = {n: p.grad.clone() for n, p in weights.parameters.items() if p.grad is not None}
    model.transformer.zero_grad()
    loss = output(model, conditioning).square().mean()
    with weights.use("reference"):
        output(model, conditioning)
    loss.backward()
    found = {n: p.grad for n, p in weights.parameters.items() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_lora_trains_the_adapter_alone_and_full_everything(model, folder):
    full = prepare(model.transformer, None, reference=False)
    assert set(full.parameters) == {name for name, _ in model.transformer.named_parameters()}
    other = load_model(folder, ("transformer",), CPU)
    weights = prepare(other.transformer, LORA)
    assert set(weights.parameters) == {name.replace(".default", "") for name, flag in flags(other).items() if flag}
    assert all(".lora_A." in name or ".lora_B." in name for name in weights.parameters)
    assert "transformer_blocks.0.attn.to_q.lora_A.weight" in weights.parameters


def test_an_exception_restores_current(model, conditioning, lora):
    weights = prepare(model.transformer, lora)
    weights.load("current", noisy(weights, 1))
    now = output(model, conditioning)
    with pytest.raises(KeyError), weights.use("reference"):
        raise KeyError
    assert torch.equal(output(model, conditioning), now)
    assert torch.is_grad_enabled()
    with weights.use("reference"):
        pass


def test_parts_do_not_nest_and_do_not_change_while_in_use(model):
    weights = prepare(model.transformer, LORA)
    weights.create("old")
    with weights.use("old"):
        with pytest.raises(RuntimeError, match="'old' is in use"), weights.use("reference"):
            pass
        with pytest.raises(RuntimeError, match="'old' is in use"):
            weights.lerp_("old", 0.5)
        with pytest.raises(RuntimeError, match="'old' is in use"):
            weights.here("current")
        with pytest.raises(RuntimeError, match="'old' is in use"):
            weights.load("current", {})
    with pytest.raises(ValueError, match="no part 'ema'; it has: current, reference, old"), weights.use("ema"):
        pass


def test_lerp_is_the_convex_combination(model):
    weights = prepare(model.transformer, LORA)
    old, current = noisy(weights, 1), noisy(weights, 2)
    weights.load("current", current)
    weights.create("old", old)
    weights.lerp_("old", 1.0)
    assert all(torch.equal(tensor, old[name]) for name, tensor in tensors_of(weights, "old").items())
    weights.lerp_("old", 0.25)
    for name, tensor in tensors_of(weights, "old").items():
        assert torch.allclose(tensor, 0.25 * old[name] + 0.75 * current[name], rtol=0, atol=1e-7)
    weights.lerp_("old", 0.0)
    assert all(torch.equal(tensor, current[name]) for name, tensor in tensors_of(weights, "old").items())
    assert all(torch.equal(tensor, current[name]) for name, tensor in tensors_of(weights, "current").items())


def test_tensors_that_are_read_from_a_policy_share_no_memory_with_it(model):
    weights = prepare(model.transformer, LORA)
    weights.load("current", noisy(weights, 1))
    weights.create("ema")
    taken, average = tensors_of(weights, "current"), tensors_of(weights, "ema")
    with torch.no_grad():
        for parameter in weights.parameters.values():
            parameter.add_(1.0)
    assert all(torch.equal(taken[name], average[name]) for name in taken)
    assert all(torch.equal(tensor, average[name]) for name, tensor in tensors_of(weights, "ema").items())
    assert not any(torch.equal(tensor, taken[name]) for name, tensor in tensors_of(weights, "current").items())
    assert list(taken) == sorted(taken)


def test_foreign_tensors_are_refused_with_their_names(model):
    weights = prepare(model.transformer, LORA)
    tensors = tensors_of(weights, "current")
    name = "transformer_blocks.0.attn.to_q.lora_A.weight"
    with pytest.raises(ArtifactError, match=rf"2 differ, e.g. other is \(.*, expected None; {name} is None"):
        weights.load("current", {**{n: t for n, t in tensors.items() if n != name}, "other": tensors[name]})
    with pytest.raises(ArtifactError, match="1 differ"):
        weights.create("old", {**tensors, name: tensors[name].half()})


def test_initial_lora_is_a_function_of_seed_and_name():
    a, b = "blocks.0.to_q.lora_A.weight", "blocks.0.to_q.lora_B.weight"
    config = LoraConfig(r=8, lora_alpha=8.0)
    before = torch.get_rng_state()
    first = initial_lora({a: (8, 4096), b: (64, 8)}, config, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[a], initial_lora({a: (8, 4096)}, config, 5)[a])
    assert not torch.equal(first[a], initial_lora({a: (8, 4096)}, config, 6)[a])
    assert not torch.equal(first[a], initial_lora({"blocks.1.to_q.lora_A.weight": (8, 4096)}, config, 5).popitem()[1])
    assert first[b].count_nonzero() == 0
    assert first[a].std().item() == pytest.approx(1 / 8, rel=0.02)
    uniform = initial_lora({a: (8, 4096)}, config.model_copy(update={"init_lora_weights": "kaiming"}), 5)[a]
    assert 0.99 / 64 < uniform.abs().max().item() <= 1 / 64
    assert uniform.std().item() == pytest.approx(1 / 64 / 3**0.5, rel=0.02)


def test_adding_an_adapter_leaves_the_global_generator_alone(model):
    before = torch.get_rng_state()
    prepare(model.transformer, LORA)
    assert torch.equal(torch.get_rng_state(), before)


def test_alpha_over_r_scales_the_adapter(folder, conditioning, device):
    deltas = []
    for alpha in (4.0, 8.0):
        model = load_model(folder, ("transformer",), device)
        weights = prepare(model.transformer, LoraConfig(r=4, lora_alpha=alpha, target_modules=("proj_out",)))
        with torch.no_grad():
            base = output(model, conditioning)
            weights.load("current", noisy(weights, 1))
            deltas.append(output(model, conditioning) - base)
    assert torch.allclose(deltas[1], 2 * deltas[0], atol=1e-5)
    assert deltas[0].abs().max() > 1e-3


def test_unknown_target_modules_list_the_known(model):
    with pytest.raises(ConfigError, match=r"ends in to_z, q_proj; it has .*to_out\.0.*to_q"):
        prepare(model.transformer, LoraConfig(target_modules=("to_q", "to_z", "q_proj")))
    with pytest.raises(ConfigError, match=r"not linear: pos_embed\.proj"):
        prepare(model.transformer, LoraConfig(target_modules=("proj",)))


def test_files_are_cut_by_name_and_size_alone():
    sizes = {"d": 4, "a": 8, "c": 36, "b": 8, "e": 4}
    expected = [["a", "b"], ["c"], ["d", "e"]]
    assert parts.cut(sizes, max_bytes=16) == expected
    assert parts.cut(dict(sorted(sizes.items())), max_bytes=16) == expected
    assert parts.cut(sizes) == [["a", "b", "c", "d", "e"]]
    assert parts.cut({}) == []


def test_equal_tensors_are_equal_bytes_and_come_back():
    tensors = {"b": torch.arange(6.0, device=CPU).reshape(2, 3).T, "a": torch.tensor([1.5], dtype=torch.bfloat16)}
    content = policy_weights.to_bytes(tensors)
    assert content == policy_weights.to_bytes({"a": tensors["a"], "b": tensors["b"].contiguous()})
    assert b"__metadata__" not in content
    back = load_tensors(content)
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)
    assert hashlib.sha256(policy_weights.to_bytes(back)).digest() == hashlib.sha256(content).digest()


@pytest.mark.parametrize("lora", [LORA, pytest.param(None, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_compiled_blocks_run_with_the_part_in_use(model, folder, conditioning, lora, device):
    if device == other_device.DEVICE:
        pytest.skip("this device is made of what compilers cannot capture")
    compiled = load_model(folder, ("transformer",), device)
    weights = prepare(model.transformer, lora)
    # Captured as for any compiler, and run without one: that would take a minute.
    compiled_weights = prepare(
        compiled.transformer,
        lora,
        shard=lambda transformer: compiling.compile_blocks(transformer, "aot_eager") or sharding.WHOLE,
    )
    old, current = noisy(weights, 1), noisy(weights, 2)
    for each in (weights, compiled_weights):
        each.create("old", old)
        each.load("current", current)
    graphs: list[int] = []
    for part in ("old", "reference", "current", "old", "reference", "current"):
        with weights.use(part), compiled_weights.use(part):
            assert torch.equal(output(compiled, conditioning), output(model, conditioning)), part
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # No part makes code anew that was made for it before.
    assert graphs[2] == graphs[-1]
    torch._dynamo.reset()
