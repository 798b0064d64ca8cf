"""Arithmetic of the transformer in each stage, and its time on devices of a stated speed."""

from dataclasses import dataclass

from cosmos_rl_core.config.train import RewardedOptions, SupervisedOptions
from cosmos_rl_core.errors import counted
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.weights import counting
from flows.planning.plan import Plan
from flows.sizes import costs

DEVICE_FLOPS = 10**14
"""Operations a second that every rank is assumed to sustain."""


@dataclass(frozen=True)
class StageWork:
    """Arithmetic of one run of a stage."""

    stage: str
    ranks: int
    flops: int
    """Operations of the transformer on all ranks together; a multiplication and an addition are two."""
    seconds: float
    """Time at :data:`DEVICE_FLOPS` a rank."""

    def __str__(self) -> str:
        return f"{self.stage} {_time(self.seconds)} on {self.ranks} rank{'s' * (self.ranks != 1)}"


def forward_flops(plan: Plan) -> int:
    """Return the operations of one unguided forward pass of the transformer on one sample."""
    media, length = plan.media, plan.recipe.policy.diffusers.max_prompt_length
    return counting.forward_flops(costs.base_path(plan.recipe), media.size, media.frames, length)


def stages(plan: Plan) -> list[StageWork]:
    """Return the arithmetic of an iteration's stages and of an evaluation, as far as they run the transformer."""
    forward, launch = forward_flops(plan), plan.recipe.launch
    return [
        StageWork(stage, ranks, count * forward, count * forward / (ranks * DEVICE_FLOPS))
        for stage, count in passes(plan).items()
        for ranks in [launch.processes_of(stage)]
    ]


def passes(plan: Plan) -> dict[str, int]:
    """Return the number of forward passes of one sample in each stage.

    A backward pass costs one forward pass with LoRA and two with all weights; checkpointing adds one. Held-out losses
    and a loss on media beside rewards are not counted.
    """
    recipe, policy, options = plan.settled, plan.settled.policy, plan.recipe.train.train_policy
    sample, batch = policy.diffusers.sample, recipe.train.train_batch_per_replica
    # Guidance takes two predictions for a velocity.
    predictions = 1 if sample.guidance_scale == 1 else 2
    training = 1 + (2 if policy.lora is None else 1) + (policy.model_gradient_checkpointing is True)
    found: dict[str, int] = {}
    if isinstance(options, SupervisedOptions):
        found["finetune"] = batch * options.steps_per_iteration * training
    if isinstance(options, RewardedOptions):
        needs = costs.needs_of(recipe)
        trained = options.mu_iterations * needs.num_times(sample.num_steps)
        found["rollout"] = batch * predictions * len(planned_kernel(sample.rollout).steps)
        found["update"] = batch * predictions * trained * (training + len(needs.roles) - 1)
    if recipe.validation is not None and recipe.evaluates:
        samples = len(plan.validation_prompts) * recipe.validation.n_generation
        found["evaluate"] = samples * predictions * sample.eval_num_steps
    return found


def describe(plan: Plan) -> list[str]:
    """Return the time of an iteration by stage, of all iterations and of an evaluation, a line each.

    Empty for small models.
    """
    if not costs.is_large(plan.recipe):
        return []
    work, count = stages(plan), plan.recipe.train.num_iterations
    each = [stage for stage in work if stage.stage != "evaluate"]
    lines = [
        f"an iteration: {', '.join(map(str, each))}, if a rank sustains {DEVICE_FLOPS / 10**12:g} TFLOP/s",
        f"{counted(count, 'iteration')}: {_time(count * sum(stage.seconds for stage in each))}",
        *(f"an evaluation: {stage}" for stage in work if stage.stage == "evaluate"),
    ]
    forward = f"{forward_flops(plan) / 10**12:.3g} TFLOP for one forward pass of a sample"
    return [*lines, f"only the transformer counts: {forward}"]


def _time(seconds: float) -> str:
    units = ((3600, "h"), (60, "min"))
    size, unit = next((pair for pair in units if seconds >= pair[0]), (1, "s"))
    return f"{seconds / size:.2g} {unit}"
