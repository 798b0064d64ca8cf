"""Count memory and operations of passes on fake tensors. :mod:`cosmos_rl_core.footprint.counted` calls this module.

Modules are built on the meta device from their configs. Their tensors get a device, a type and a shape, but no memory.
So autocast, attention kernels and gradient checkpointing behave as on the CPU, and nothing is computed.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from cosmos_rl_core import plugins
from cosmos_rl_core.footprint.live import LiveBytes
from cosmos_rl_core.footprint.passes import Pass
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models._encoder import without_numbers
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.weights.policy_weights import prepare

CPU = torch.device("cpu")
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3])
}
"""Functions that count the operations of the CPU's attention kernel from shapes; torch itself does not count them."""
SCALE = 2.0
"""Guidance scale of guided passes. Any value but 1 would do; 1 turns guidance off."""


class Unread(TorchFunctionMode):
    """Answers in place of tensors without numbers: lengths of texts are ``num_tokens``, and every condition is true."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer ``tolist`` and ``bool``, and call everything else."""
        if args and isinstance(args[0], FakeTensor):
            if func is Tensor.tolist:
                return torch.full(args[0].shape, self._num_tokens, device="cpu").tolist()
            if func is Tensor.__bool__:
                return True
        return func(*args, **(kwargs or {}))


def footprints(path: str, passes: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Return the fields of :class:`cosmos_rl_core.footprint.passes.Footprint` for each pass."""
    return [footprint(path, Pass.model_validate(one)) for one in passes]


def footprint(path: str, one: Pass) -> dict[str, int]:
    """Return the footprint of one pass."""
    on_vae = one.kind in ("decoding", "encoding")
    part = _loading.EMPTY_VAE if on_vae else _loading.EMPTY_TRANSFORMER
    model = plugins.load_model(directories.adapter_name(path)).load(path, (part,), CPU)
    if not on_vae:
        prepare(model.transformer, one.lora, below=one.below, reference=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        run, module = (_vae_pass if on_vae else _transformer_pass)(path, model, one)
    own = [*module.parameters(), *module.buffers()]
    own += [p.grad for p in module.parameters() if p.grad is not None]
    with ExitStack() as modes:
        flops = FlopCounterMode(display=False, custom_mapping=ATTENTION)
        if one.kind != "training":
            # Only without gradients: in a backward pass the counter's hooks would keep tensors alive.
            modes.enter_context(flops)
        modes.enter_context(fake)
        modes.enter_context(Unread(sizes.text_tokens(path, one.max_prompt_length)))
        live = modes.enter_context(LiveBytes(own))
        run()
    return {"peak_bytes": live.peak, "flops": flops.get_total_flops()}


Run = Callable[[], None]


def _transformer_pass(path: str, model: Model, one: Pass) -> tuple[Run, nn.Module]:
    """Return a function that runs the pass, and the transformer, with gradients as of an earlier micro-batch."""
    transformer = model.transformer
    _become_numberless(transformer)
    trains = one.kind == "training"
    for parameter in transformer.parameters():
        if trains and parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    if trains and one.checkpointing:
        transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    x_t = torch.empty(one.batch, *model.latent_shape(one.size, one.frames), device=CPU)
    t = torch.empty(one.batch, device=CPU)
    prompts = conditioning(path, one)
    negative, scale = (prompts.guided_by(conditioning(path, one)), SCALE) if one.guided else (None, 1.0)

    def run() -> None:
        with torch.set_grad_enabled(trains):
            with computes_in("bfloat16" if one.half else "float32", CPU):
                velocity = guided_velocity(
                    model, x_t, t, prompts, negative, scale, trains_unconditional=one.trains_unconditional
                )
            if trains:
                velocity.square().mean().backward()

    return run, transformer


def _vae_pass(_: str, model: Model, one: Pass) -> tuple[Run, nn.Module]:
    """Return a function that decodes latents or encodes pixels, and the VAE."""
    vae: nn.Module = model.pipeline.vae
    _become_numberless(vae)
    latents = torch.empty(one.batch, *model.latent_shape(one.size, one.frames), device=CPU)
    pixels = torch.empty(one.batch, one.frames, *one.size, 3, dtype=torch.uint8, device=CPU)

    def run() -> None:
        if one.kind == "decoding":
            model.decode(latents)
        else:
            model.encode_media(pixels)

    return run, vae


def _become_numberless(module: nn.Module) -> None:
    """Replace all weights and buffers by fake CPU tensors, inside a fake mode. Shared tensors stay shared.

    ``to_empty`` does not work here: it may swap tensors that a fake mode holds.
    """
    made: dict[int, Tensor] = {}

    def numberless(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)
        return made[id(tensor)]

    replaced = {p: nn.Parameter(numberless(p), requires_grad=p.requires_grad) for p in module.parameters()}
    for part in module.modules():
        part._parameters |= {name: p if p is None else replaced[p] for name, p in part._parameters.items()}
        part._buffers |= {name: b if b is None else numberless(b) for name, b in part._buffers.items()}


def conditioning(path: str, one: Pass) -> Conditioning:
    """Return the conditioning of the pass, as fake tensors."""
    return without_numbers(path, one.batch, one.max_prompt_length, one.size, one.frames, one.pictures, CPU)
