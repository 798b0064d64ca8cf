"""Four gloo processes that share sequences, all together and in two pairs: ``python -m tests.core.sequence_peers DIR``.

Prints, as JSON, how far each case is from what the same process computes alone. All are forked from one that has
imported everything, which is most of the time.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import CosmosTransformer3DModel, WanTransformer3DModel
from torch import Tensor, multiprocessing, nn

from cosmos_rl_core import context_parallel, policy_weights
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Conditioning, Model, given_frames, guided_velocity, stack
from tests import tiny_pipelines

WORLD, PAIRS, ALL = 4, [[0, 1], [2, 3]], [[0, 1, 2, 3]]
CPU = torch.device("cpu")
HEADS, TEXT_CHANNELS = 5, 32
LORA = LoraConfig(r=2, target_modules=("to_q", "to_k", "to_v", "to_out.0", "proj_out", "linear_1"))

Build = Callable[[], tuple[nn.Module, Callable[[], list[Tensor]], list[Tensor]]]
"""A transformer with its policy's weights, calls of it, and their inputs that want gradients."""


def save(folder: Path) -> None:
    """Tiny pipelines whose transformers have five heads, which neither two nor four peers can share evenly."""
    kinds: Any = (
        (WanTransformer3DModel, tiny_pipelines.save_wan(folder / "wan")),
        (CosmosTransformer3DModel, tiny_pipelines.save_cosmos_predict2_5(folder / "cosmos")),
    )
    for cls, path in kinds:
        torch.manual_seed(1)
        settings = json.loads((path / "transformer" / "config.json").read_text(encoding="utf-8"))
        cls.from_config(settings | {"num_attention_heads": HEADS}).save_pretrained(path / "transformer")


def load(folder: Path) -> Model:
    return _loading.adapter_of(str(folder)).load(str(folder), ("transformer",), CPU)


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
                conditioning: Conditioning = {"prompt_embeds": prompt} | (stack(given, CPU) if num_given else {})
                t = torch.tensor([0.3, 0.8])
                found.append(guided_velocity(model, x_t, t, conditioning, {"prompt_embeds": negative}, 3.0))
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


def cases(folder: Path, num_peers: int) -> Iterator[tuple[str, Build]]:
    """What is compared, by name; by four peers only what shares of other sizes could change."""
    wan, cosmos = folder / "wan", folder / "cosmos"
    yield "wan full", velocities(wan, [(3, 3, 5)])
    yield "cosmos given", velocities(cosmos, [(3, 3, 5)], num_given=2)
    for path in (wan, cosmos):
        yield f"{path.name} lora", velocities(path, [(3, 3, 5)], lora=LORA)
        # Both forwards come before the backward pass that computes their blocks again.
        yield f"{path.name} two sizes, checkpointed", velocities(path, [(3, 3, 3), (3, 2, 3)], checkpointing=True)
    if num_peers == WORLD:
        return
    for path in (wan, cosmos):
        yield f"{path.name} autocast", velocities(path, [(3, 3, 5)], lora=LORA)
    yield "cosmos one frame", velocities(cosmos, [(1, 3, 3)])
    yield "wan by token", transformer_alone(wan, torch.linspace(0, 999, 90).view(2, 45))
    yield "cosmos by sample", transformer_alone(cosmos, torch.tensor([0.3, 0.8]))
    by_frame, learnable = torch.linspace(0.1, 0.9, 6).view(2, 1, 3, 1, 1), {"extra_pos_embed_type": "learnable"}
    yield "cosmos positions", transformer_alone(cosmos, by_frame, max_size=(8, 16, 16), **learnable)


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


def compare(build: Build, group: dist.ProcessGroup, half: bool) -> dict[str, Any]:
    """Alone and shared, on the same weights and inputs: largest differences, as parts of the largest value."""
    transformer, call, inputs = build()
    outputs, gradients = run(transformer, call, inputs, half)
    context_parallel.split_sequence(transformer, group)
    shared, partial = run(transformer, call, inputs, half)
    worst = {}
    for name, own in partial.items():
        total = own.clone()
        dist.all_reduce(total, group=group)
        worst[name] = float((total - gradients[name]).abs().max() / gradients[name].abs().max())
    everyone = [[torch.empty_like(output) for _ in range(dist.get_world_size(group))] for output in shared]
    for output, found in zip(shared, everyone, strict=True):
        dist.all_gather(found, output, group=group)
    return {
        "output": max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(outputs, shared, strict=True)),
        "gradients": worst,
        "missing": sorted(gradients.keys() ^ partial.keys()),
        "agree": all(torch.equal(a, b) for a, found in zip(shared, everyone, strict=True) for b in found),
    }


def refusals(folder: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """What is said of mistakes, by name."""
    found = {}
    two_heads: Any = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, num_layers=1, ffn_dim=8)
    small, late = load(folder / "wan"), load(folder / "wan")
    for model in (small, late):
        context_parallel.split_sequence(model.transformer, group)
    policy_weights.add_lora(late.transformer, LORA)
    conditioning = {"prompt_embeds": normal(1, 7, TEXT_CHANNELS)}
    t = torch.tensor([0.5])
    mistakes: dict[str, Callable[[], Any]] = {
        "heads": lambda: context_parallel.split_sequence(two_heads, group),
        "tokens": lambda: small.velocity(normal(1, 4, 3, 2, 2), t, conditioning),
        "late lora": lambda: late.velocity(normal(1, 4, 3, 6, 6), t, conditioning),
    }
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (ConfigError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def peer(rank: int, folder: Path) -> None:
    """One of four."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    for groups in (PAIRS, ALL):
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert isinstance(group, dist.ProcessGroup)
        for name, build in cases(folder, len(groups[0])):
            found[f"{name}, {len(groups[0])} peers"] = compare(build, group, half="autocast" in name)
    found["refusals"] = refusals(folder, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Fork the peers, and print what all of them found; if one fails, the others end and its words are raised."""
    torch.set_num_threads(1)
    save(folder)
    multiprocessing.start_processes(peer, args=(folder,), nprocs=WORLD, start_method="fork")
    print(json.dumps([json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
