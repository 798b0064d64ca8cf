"""An adapter on a frozen one: what runs, what trains, and the one adapter that equals both."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import tensors_of, write_files
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.joined import Joined
from cosmos_rl_core.weights.policy_weights import prepare

CPU = torch.device("cpu")
BELOW = LoraConfig(r=4, lora_alpha=12.0, target_modules=("to_q", "net.2"), use_rslora=True)
ABOVE = LoraConfig(r=2, lora_alpha=3.0, target_modules=("to_q", "to_v"), r_pattern={"to_v": 3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save("sd3", tmp_path_factory.mktemp("stacked") / "sd3"))


@pytest.fixture(scope="module")
def conditioning(folder: str):
    return stack(load_model(folder, ("text",), CPU).encode_prompts(["a cat"], 16), CPU)


@pytest.fixture
def model(folder: str):
    return load_model(folder, ("transformer",), CPU)


def output(model, conditioning) -> Tensor:
    x_t = torch.linspace(-2, 2, 256, device=CPU).reshape(1, 4, 8, 8)
    return model.velocity(x_t, torch.tensor([0.6], device=CPU), conditioning)


def noise(tensors, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return {name: 0.1 * torch.randn(t.shape, generator=generator, device=CPU) for name, t in sorted(tensors.items())}


def with_below(model):
    weights = prepare(model.transformer, ABOVE, below=BELOW)
    weights.load_below(noise(weights.below, 1))
    return weights


def test_a_new_adapter_begins_as_the_frozen_one_to_the_bit(folder, model, conditioning):
    other = load_model(folder, ("transformer",), CPU)
    alone = prepare(other.transformer, BELOW, reference=False)
    alone.load("current", noise(alone.parameters, 1))
    with_below(model)
    assert torch.equal(output(model, conditioning), output(other, conditioning))


def test_the_base_is_under_the_reference_and_the_frozen_adapter_under_all_else(folder, model, conditioning):
    base = output(load_model(folder, ("transformer",), CPU), conditioning)
    weights = with_below(model)
    began = output(model, conditioning)
    weights.create("old")
    weights.load("current", noise(weights.parameters, 2))
    now = output(model, conditioning)
    weights.share("behaviour 0", "reference")
    for part, expected in (("reference", base), ("behaviour 0", base), ("old", began), ("current", now)):
        with weights.use(part):
            assert torch.equal(output(model, conditioning), expected), part
    assert torch.equal(output(model, conditioning), now)
    # A renewed reference is a policy, with all that is below it.
    weights.create("reference")
    with weights.use("reference"):
        assert torch.equal(output(model, conditioning), now)
    with weights.use("behaviour 0"):
        assert torch.equal(output(model, conditioning), base)


def test_only_the_new_adapter_trains(model, conditioning):
    weights = with_below(model)
    weights.load("current", noise(weights.parameters, 2))
    frozen = {name: p.detach().clone() for name, p in weights.below.items()}
    output(model, conditioning).square().mean().backward()
    assert all(p.grad is None and not p.requires_grad for p in weights.below.values())
    assert all(p.grad is not None for p in weights.parameters.values())
    with weights.use("reference"):
        output(model, conditioning)
    assert all(torch.equal(p, frozen[name]) for name, p in weights.below.items())


def test_tensors_of_another_adapter_are_refused(model):
    weights = with_below(model)
    with pytest.raises(ArtifactError, match="not a frozen adapter of this model"):
        weights.load_below(noise(weights.parameters, 1))


def test_one_adapter_equals_both_in_the_stock_pipeline(folder, model, conditioning, tmp_path: Path):
    weights = with_below(model)
    weights.load("current", noise(weights.parameters, 2))
    expected = output(model, conditioning).detach()
    below = {name: p.detach() for name, p in weights.below.items()}
    both = Joined((BELOW, below), (ABOVE, tensors_of(weights, "current")))
    assert len(both) == len(set(both)) == len(weights.below.keys() | weights.parameters.keys())
    with pytest.raises(KeyError):
        both["proj_out.lora_A.weight"]
    write_files(export.lora_files(both, both.config), tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.load_lora_weights(tmp_path / "lora", weight_name="model.safetensors", adapter_name="default")
    ours = load_model(folder, ("transformer",), CPU)
    ours.pipeline.transformer = pipeline.transformer
    found = output(ours, conditioning).detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    # A reader that knows nothing of alpha takes it to be the rank, and is right.
    config = both.config
    assert config.r == config.lora_alpha
    assert {key: float(rank) for key, rank in config.r_pattern.items()} == config.alpha_pattern


OTHER = LoraConfig(r=3, lora_alpha=5.0, target_modules=("to_k", "net.2"))


def of_another_shape(model, below: LoraConfig | None = None):
    weights = prepare(model.transformer, ABOVE, below=below, other=OTHER, reference=False)
    weights.load("current", noise(weights.parameters, 2))
    return weights


def test_a_part_of_another_shape_replaces_the_trained_adapter(folder, model, conditioning):
    other = load_model(folder, ("transformer",), CPU)
    alone = prepare(other.transformer, OTHER, reference=False)
    alone.load("current", noise(alone.parameters, 3))
    weights = of_another_shape(model)
    now = output(model, conditioning)
    weights.create_other("behaviour 0", noise(weights.other, 3))
    weights.share("behaviour 1", "behaviour 0")
    assert torch.equal(output(model, conditioning), now)
    for part in ("behaviour 0", "behaviour 1"):
        with weights.use(part):
            # The sum of both adapters is rounded otherwise than one.
            assert torch.allclose(output(model, conditioning), output(other, conditioning), atol=1e-6)
    assert torch.equal(output(model, conditioning), now)
    assert not any(parameter.any() for parameter in weights.other.values())
    weights.remove("behaviour 0")
    with weights.use("behaviour 1"):
        assert not torch.equal(output(model, conditioning), now)
    weights.remove("behaviour 1")
    assert weights.parts == ("current",)


def test_the_trained_adapter_has_the_bits_and_gradients_that_it_has_alone(folder, model, conditioning):
    alone = load_model(folder, ("transformer",), CPU)
    plain = prepare(alone.transformer, ABOVE, reference=False)
    plain.load("current", noise(plain.parameters, 2))
    weights = of_another_shape(model)
    weights.create_other("behaviour 0", noise(weights.other, 3))
    with weights.use("behaviour 0"):
        behaviour = output(model, conditioning)
    assert not behaviour.requires_grad
    for used, found in ((alone, plain), (model, weights)):
        output(used, conditioning).square().mean().backward()
        assert all(parameter.grad is not None for parameter in found.parameters.values())
    assert plain.parameters.keys() == weights.parameters.keys()
    for name, parameter in plain.parameters.items():
        assert torch.equal(parameter, weights.parameters[name])
        alone_grad, here_grad = parameter.grad, weights.parameters[name].grad
        assert alone_grad is not None
        assert here_grad is not None
        assert torch.equal(alone_grad, here_grad), name
    assert all(parameter.grad is None for parameter in weights.other.values())


def test_a_frozen_adapter_stays_below_a_part_of_another_shape(folder, model, conditioning):
    weights = of_another_shape(model, BELOW)
    weights.load_below(noise(weights.below, 1))
    for name, bare in (("behaviour 0", False), ("behaviour 1", True)):
        weights.create_other(name, noise(weights.other, 3), bare=bare)
    with weights.use("behaviour 0"):
        stacked = output(model, conditioning)
    with weights.use("behaviour 1"):
        bare = output(model, conditioning)
    weights.load_below({name: torch.zeros_like(tensor) for name, tensor in weights.below.items()})
    with weights.use("behaviour 0"):
        assert torch.equal(output(model, conditioning), bare)
    assert not torch.equal(stacked, bare)


def test_tensors_of_the_trained_shape_are_refused_as_the_other_adapter(model):
    weights = of_another_shape(model)
    with pytest.raises(ArtifactError, match="an adapter of another shape"):
        weights.create_other("behaviour 0", noise(weights.parameters, 3))
