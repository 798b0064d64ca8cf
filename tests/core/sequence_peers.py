"""What gloo ranks do that share sequences: say how far each case is from what one of them computes alone."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import CosmosTransformer3DModel, WanTransformer3DModel
from torch import Tensor, nn

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _wan as wan
from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, given_frames
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos
from cosmos_rl_core.parallel import compiling
from cosmos_rl_core.weights import policy_weights

CPU = torch.device("cpu")
TEXT_CHANNELS = 32
LORA = LoraConfig(r=2, target_modules=("to_q", "to_k", "to_v", "to_out.0", "proj_out", "linear_1"))

Build = Callable[[], tuple[nn.Module, Callable[[], list[Tensor]], list[Tensor]]]
"""A transformer with its policy's weights, calls of it, and their inputs that want gradients."""


def load(folder: Path) -> Model:
    return load_model(folder, ("transformer",), CPU)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def velocities(
    folder: Path,
    grids: list[tuple[int, int, int]],
    *,
    lora: LoraConfig | None = None,
    checkpointing: bool = False,
    num_given: int = 0,
) -> Build:
    """Guided velocities of two samples for each of ``grids``: latent frames, rows and columns of patches of 2 x 2."""

    def build() -> tuple[nn.Module, Callable[[], list[Tensor]], list[Tensor]]:
        model = load(folder)
        weights = policy_weights.prepare(model.transformer, lora, reference=False)
        for seed, parameter in enumerate(weights.parameters.values() if lora else ()):
            parameter.data = 0.1 * normal(*parameter.shape, seed=seed)
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
        prompt, negative = (normal(2, 7, TEXT_CHANNELS, seed=seed).requires_grad_() for seed in (10, 11))
        latents = [normal(2, 4, t, 2 * h, 2 * w, seed=12).requires_grad_() for t, h, w in grids]

        def call() -> list[Tensor]:
            found = []
            for x_t in latents:
                given = [given_frames(normal(4, num_given, *x_t.shape[3:], seed=13 + i), x_t.shape[2]) for i in (0, 1)]
                conditioning = Conditioning({"prompt_embeds": prompt}, _batched(given) if num_given else {})
                t = torch.tensor([0.3, 0.8])
                found.append(
                    guided_velocity(model, x_t, t, conditioning, Conditioning({"prompt_embeds": negative}), 3.0)
                )
            return found

        return model.transformer, call, [prompt, negative, *latents]

    return build


def transformer_alone(folder: Path, timesteps: Tensor, **settings: Any) -> Build:
    """The transformer itself, 3 frames of 3 x 5 patches, with noise levels as no plugin of ours gives them."""
    cls = {"wan": WanTransformer3DModel, "cosmos": CosmosTransformer3DModel}[folder.name]

    def build() -> tuple[nn.Module, Callable[[], list[Tensor]], list[Tensor]]:
        transformer: Any = load(folder).transformer
        if settings:
            torch.manual_seed(2)
            transformer = cls.from_config(dict(transformer.config) | settings)
            for parameter in transformer.learnable_pos_embed.parameters():
                nn.init.normal_(parameter)
        transformer.requires_grad_(True)
        x_t = normal(2, transformer.config.in_channels, 3, 6, 10).requires_grad_()
        text = normal(2, 7, TEXT_CHANNELS, seed=1)
        return transformer, lambda: [transformer(x_t, timesteps, text, return_dict=False)[0]], [x_t]

    return build


def transformer_of_a_picture(folder: Path) -> Build:
    """Wan's transformer itself, as in Wan 2.1 I2V, which reads texts and what CLIP sees of a picture."""

    def build() -> tuple[nn.Module, Callable[[], list[Tensor]], list[Tensor]]:
        torch.manual_seed(3)
        own: Any = load(folder).transformer
        config = dict(own.config)
        width = config["num_attention_heads"] * config["attention_head_dim"]
        cls: Any = WanTransformer3DModel
        transformer = cls.from_config(config | {"image_dim": 16, "added_kv_proj_dim": width})
        transformer.requires_grad_(True)
        x_t = normal(2, transformer.config.in_channels, 3, 6, 10).requires_grad_()
        told = normal(2, 512, TEXT_CHANNELS, seed=1), normal(2, 9, 16, seed=4)
        times = torch.tensor([300.0, 800.0])
        return transformer, lambda: [transformer(x_t, times, *told, return_dict=False)[0]], [x_t]

    return build


def cases(folder: Path, num_peers: int) -> Iterator[tuple[str, Build]]:
    """What is compared, by name; by four peers only what shares of other sizes could change."""
    wan_folder, cosmos_folder = folder / "wan", folder / "cosmos"
    yield "wan full", velocities(wan_folder, [(3, 3, 5)])
    yield "cosmos given", velocities(cosmos_folder, [(3, 3, 5)], num_given=2)
    for path in (wan_folder, cosmos_folder):
        yield f"{path.name} lora", velocities(path, [(3, 3, 5)], lora=LORA)
        # Both forwards come before the backward pass that computes their blocks again.
        yield f"{path.name} two sizes, checkpointed", velocities(path, [(3, 3, 3), (3, 2, 3)], checkpointing=True)
    if num_peers == 4:
        return
    for path in (wan_folder, cosmos_folder):
        yield f"{path.name} autocast", velocities(path, [(3, 3, 5)], lora=LORA)
    yield "cosmos one frame", velocities(cosmos_folder, [(1, 3, 3)])
    yield "wan by token", transformer_alone(wan_folder, torch.linspace(0, 999, 90).view(2, 45))
    yield "wan picture", transformer_of_a_picture(wan_folder)
    yield "cosmos by sample", transformer_alone(cosmos_folder, torch.tensor([0.3, 0.8]))
    by_frame, learnable = torch.linspace(0.1, 0.9, 6).view(2, 1, 3, 1, 1), {"extra_pos_embed_type": "learnable"}
    yield "cosmos positions", transformer_alone(cosmos_folder, by_frame, max_size=(8, 16, 16), **learnable)


def compiled_cases(folder: Path) -> Iterator[tuple[str, Build]]:
    """Each is captured and compiled once for each length of sequence."""
    for name in ("wan", "cosmos"):
        yield f"{name} compiled", velocities(folder / name, [(3, 3, 5)], lora=LORA, checkpointing=True)


def run(transformer: nn.Module, call: Callable[[], list[Tensor]], inputs: list[Tensor], half: bool) -> Any:
    """Outputs, and gradients by name: of trainable parameters and of inputs."""
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        outputs = call()
        losses = [(output * normal(*output.shape, seed=20)).sum() for output in outputs]
    torch.stack(losses).sum().backward()
    wanted = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    wanted |= {f"input {i}": tensor for i, tensor in enumerate(inputs)}
    gradients = {name: p.grad for name, p in wanted.items() if p.grad is not None}
    for tensor in wanted.values():
        tensor.grad = None
    return [output.detach() for output in outputs], gradients


def compare(name: str, build: Build, group: dist.ProcessGroup) -> dict[str, Any] | None:
    """Shared, and by the first peer alone, on the same weights and inputs: how far off, as parts of the largest value.

    None for the other peers.
    """
    half, alone = "autocast" in name, dist.get_rank(group) == 0
    transformer, call, inputs = build()
    expected = run(transformer, call, inputs, half) if alone else None
    if "compiled" in name:
        # Captured as for any compiler, and run without one: that would take a minute.
        compiling.compile_blocks(transformer, "aot_eager")
    splits_of(transformer)(transformer, group)
    outputs, gradients = run(transformer, call, inputs, half)
    for own in gradients.values():
        dist.all_reduce(own, group=group)
    everyone = [[torch.empty_like(output) for _ in range(dist.get_world_size(group))] for output in outputs]
    for output, found in zip(outputs, everyone, strict=True):
        dist.all_gather(found, output, group=group)
    if expected is None:
        return None
    return {
        "output": max(map(far, outputs, expected[0])),
        "gradients": {key: far(total, expected[1][key]) for key, total in gradients.items() if key in expected[1]},
        "missing": sorted(expected[1].keys() ^ gradients.keys()),
        "agree": all(torch.equal(a, b) for a, found in zip(outputs, everyone, strict=True) for b in found),
    }


def splits_of(transformer: nn.Module) -> Callable[[Any, dist.ProcessGroup], None]:
    return wan.split if isinstance(transformer, WanTransformer3DModel) else cosmos.split


def _batched(given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in given]) for name in given[0]}


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def refusals(folder: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """What is said of mistakes, by name."""
    found = {}
    two_heads: Any = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, num_layers=1, ffn_dim=8)
    small, late = load(folder / "wan"), load(folder / "wan")
    for model in (small, late):
        model.split_sequence(group)
    policy_weights.add_lora(late.transformer, LORA)
    conditioning = Conditioning({"prompt_embeds": normal(1, 7, TEXT_CHANNELS)})
    t = torch.tensor([0.5])
    mistakes: dict[str, Callable[[], Any]] = {
        "heads": lambda: wan.split(two_heads, group),
        "tokens": lambda: small.velocity(normal(1, 4, 3, 2, 2), t, conditioning),
        "late lora": lambda: late.velocity(normal(1, 4, 3, 6, 6), t, conditioning),
    }
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (ConfigError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def share(folder: Path) -> None:
    """One of four ranks: two pairs, who have every other case, then all together.

    Each writes its results by the names of its cases, and the messages about mistakes, to ``<rank>.json``.
    """
    with ranks() as rank:
        pair = group_of([[0, 1], [2, 3]])
        together = group_of([[0, 1, 2, 3]])
        work = [(f"{name}, 2 peers", build, pair) for name, build in list(cases(folder, 2))[rank // 2 :: 2]]
        work += [(f"{name}, 4 peers", build, together) for name, build in cases(folder, 4)]
        leave(folder, rank, work, {"refusals": refusals(folder, together)})


def share_compiled(folder: Path) -> None:
    """One of two ranks."""
    with ranks() as rank:
        pair = group_of([[0, 1]])
        leave(folder, rank, [(name, build, pair) for name, build in compiled_cases(folder)], {})


@contextmanager
def ranks() -> Iterator[int]:
    """This process among the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


def group_of(members: list[list[int]]) -> dist.ProcessGroup:
    """The one of these groups that this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration(members)
    assert isinstance(group, dist.ProcessGroup)
    return group


def leave(folder: Path, rank: int, work: list[tuple[str, Build, dist.ProcessGroup]], found: dict[str, Any]) -> None:
    results = {name: compare(name, build, group) for name, build, group in work}
    found |= {name: result for name, result in results.items() if result is not None}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
