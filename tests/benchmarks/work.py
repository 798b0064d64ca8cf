"""What is measured: sampling, and one optimizer step of NFT and of DDRL, by the code that stages run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms._base import Batch, Transitions
from cosmos_rl_core.config.policy import LoraConfig, SolverConfig
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.parallel.compiling import compile_blocks
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.sampling.rollout import Trajectory, sample, table_of
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.weights.half_weights import cast_frozen
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import initial_lora, prepare
from stages.training.trainer import MicroBatch, Trainer
from tests.benchmarks.models import Shape

_SOLVER_STEP = 0
"""The recorded step that DDRL trains on."""


class Bench:
    """A model of one shape, ready for each kind of work."""

    def __init__(self, shape: Shape, group: Group, dtype: ParamDtype, *, compiled: bool) -> None:
        self.shape, self.group, self.compiled = shape, group, compiled
        self.dtype: ParamDtype = dtype
        self.model = shape.model(group.device)
        lora = LoraConfig(r=shape.lora_rank, lora_alpha=2.0 * shape.lora_rank)
        self.weights = prepare(self.model.transformer, lora)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.weights.parameters.items()}
        self.weights.load(CURRENT, initial_lora(shapes, lora, seed=0))
        self.weights.create("behaviour")
        # As stages do it: the frozen matrices rest in the type that they are computed in.
        cast_frozen(self.model.transformer, dtype)
        if compiled:
            compile_blocks(self.model.transformer)
        self.conditioning = shape.condition(group.device)
        self._latent_shape = (shape.batch, *self.model.latent_shape(shape.size, shape.frames))
        self._generator = torch.Generator(group.device).manual_seed(2)
        solver: Any = shape.solver
        config = SolverConfig(solver=solver, num_steps=shape.num_steps)
        self.kernel = kernel_of(config, lambda: schedule_of(self.model.scheduler, shape.num_steps))

    @property
    def work(self) -> dict[str, Callable[[], object]]:
        """Each kind, to be called any number of times."""
        nft, ddrl = self._trainer("nft"), self._trainer("ddrl")
        step, latents = self._recorded(), self._noise()
        media = Batch(latents, self._noise(), self._times(), None)
        rewarded = Batch(latents, self._noise(), self._times(), self._advantages())

        def nft_step() -> bool:
            return nft.step(0, [self._micro_batch(rewarded)], self.shape.batch, 1)

        def ddrl_step() -> bool:
            micro_batches = [self._micro_batch(step), self._micro_batch(media)]
            return ddrl.step(0, micro_batches, self.shape.batch, 1)

        return {"sampling": self.sample, "nft step": nft_step, "ddrl step": ddrl_step}

    def sample(self, record: tuple[int, ...] = ()) -> Trajectory:
        """A batch, all steps of the solver, without guidance as in the recipes."""

        def velocity(x_t: Tensor, t: Tensor) -> Tensor:
            with computes_in(self.dtype, self.group.device):
                return guided_velocity(self.model, x_t, t, self.conditioning, None, 1.0)

        with self.weights.use(CURRENT):
            return sample(velocity, self._noise(), self.kernel, draw=lambda _: self._noise(), record=record)

    def _trainer(self, kind: str) -> Trainer:
        plugin = plugins.load("algorithms", kind)
        solver_step = {"train_on": (_SOLVER_STEP,), "clip_ratio": 1e-4} if kind == "ddrl" else {}
        options = plugin.Options(type=kind, dataset=DatasetOptions(name="none"), **solver_step)
        steps = OptimizerSteps(
            lrs=(1e-5,), ema_decays=(None,), betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.01, grad_norm_clip=1.0,
            first_step=0,
        )  # fmt: skip
        algorithm = plugin.Algorithm(options)
        config: Any = SimpleNamespace(steps=steps, param_dtype=self.dtype)
        context: Any = SimpleNamespace(ranks=self.group, progress=lambda *_: None)
        return Trainer(self.model, algorithm, self.weights, config, context)

    def _micro_batch(self, batch: Batch | Transitions) -> MicroBatch:
        return MicroBatch(batch, self.conditioning)

    def _recorded(self) -> Transitions:
        rollout, device = self.sample((_SOLVER_STEP,)), self.group.device
        x, x_next = rollout.states[_SOLVER_STEP], rollout.states[_SOLVER_STEP + 1]
        indices = torch.full((self.shape.batch,), _SOLVER_STEP, device=device)
        at = table_of(self.kernel, device).at(indices)
        log_prob = rollout.log_prob[_SOLVER_STEP]
        return Transitions(x, x_next, torch.zeros_like(x), at, log_prob, self._advantages())

    def _noise(self) -> Tensor:
        return torch.randn(self._latent_shape, generator=self._generator, device=self.group.device)

    def _times(self) -> Tensor:
        return torch.linspace(0.9, 0.2, self.shape.batch, device=self.group.device)

    def _advantages(self) -> Tensor:
        return torch.linspace(1.0, -1.0, self.shape.batch, device=self.group.device)
