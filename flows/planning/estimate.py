"""Arithmetic of the transformer in each stage, and its time on devices of a stated speed."""

from dataclasses import dataclass

from cosmos_rl_core.config.train import RewardedOptions, SupervisedOptions
from cosmos_rl_core.pipelines import counting, directories
from cosmos_rl_core.sampling.solvers import planned_kernel
from flows.planning import costs
from flows.planning.plan import Plan

DEVICE_FLOPS = 10**14
"""Operations a second that every rank is assumed to sustain."""
MIN_PARAMETERS = 10**8
"""Parameters of a transformer below which :func:`describe` is empty: arithmetic does not decide the time then."""


@dataclass(frozen=True)
class StageWork:
    """Arithmetic of one run of a stage."""

    stage: str
    ranks: int
    flops: int
    """Operations of the transformer on all ranks together; a multiplication and an addition are two."""

    @property
    def seconds(self) -> float:
        """Return the time at :data:`DEVICE_FLOPS` a rank."""
        return self.flops / (self.ranks * DEVICE_FLOPS)


def forward_flops(plan: Plan) -> int:
    """Return the operations of one unguided forward pass of the transformer on one sample."""
    diffusers = plan.recipe.policy.diffusers
    path = directories.resolve_path(plan.model.path)
    return counting.forward_flops(path, diffusers.inference_size, diffusers.train_frames, diffusers.max_prompt_length)


def stages(plan: Plan) -> list[StageWork]:
    """Return the arithmetic of an iteration's stages and of an evaluation, as far as they run the transformer.

    A backward pass costs one forward pass with LoRA and two with all weights; checkpointing adds one. Held-out losses
    and a loss on media beside rewards are not counted.
    """
    recipe, forward = plan.recipe, forward_flops(plan)
    passes = _rewarded(plan) if recipe.train.train_policy.rewarded else _supervised(plan)
    if recipe.validation is not None and recipe.rewards:
        samples = len(plan.validation_prompts) * recipe.validation.n_generation
        passes["evaluate"] = samples * recipe.policy.diffusers.sample.eval_num_steps * _predictions(plan)
    return [StageWork(stage, recipe.launch.processes_of(stage), count * forward) for stage, count in passes.items()]


def describe(plan: Plan) -> list[str]:
    """Return the time of an iteration by stage, of all iterations and of an evaluation, a line each.

    Empty for small models.
    """
    if costs.parameters(plan.recipe)[0] < MIN_PARAMETERS:
        return []
    work = {stage.stage: stage for stage in stages(plan)}
    evaluation = work.pop("evaluate", None)
    iterations = plan.recipe.train.num_iterations
    each = ", ".join(f"{stage.stage} {_time(stage.seconds)} on {_ranks(stage)}" for stage in work.values())
    lines = [
        f"an iteration: {each}, if a rank sustains {DEVICE_FLOPS / 10**12:g} TFLOP/s",
        f"{iterations} iterations: {_time(iterations * sum(stage.seconds for stage in work.values()))}",
    ]
    if evaluation is not None:
        lines.append(f"an evaluation: {_time(evaluation.seconds)} on {_ranks(evaluation)}")
    forward = forward_flops(plan) / 10**12
    return [*lines, f"only the transformer counts: {forward:.3g} TFLOP for one forward pass of a sample"]


def _ranks(stage: StageWork) -> str:
    return f"{stage.ranks} rank" + "s" * (stage.ranks != 1)


def _time(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in ((3600, "h"), (60, "min")) if seconds >= size), (1, "s"))
    return f"{seconds / size:.2g} {unit}"


def _rewarded(plan: Plan) -> dict[str, int]:
    """Return the forward passes of a rollout and of an update."""
    recipe, sample = plan.recipe, plan.recipe.policy.diffusers.sample
    options, needs = recipe.train.train_policy, costs.needs_of(recipe)
    assert isinstance(options, RewardedOptions)
    predictions = recipe.train.train_batch_per_replica * _predictions(plan)
    trained = predictions * options.mu_iterations * needs.num_times(sample.num_steps)
    return {
        "rollout": predictions * len(planned_kernel(sample.rollout).steps),
        "update": trained * (_training(plan) + len(needs.roles) - 1),
    }


def _supervised(plan: Plan) -> dict[str, int]:
    """Return the forward passes of the supervised steps of an iteration."""
    train = plan.recipe.train
    assert isinstance(train.train_policy, SupervisedOptions)
    return {"finetune": train.train_batch_per_replica * train.train_policy.steps_per_iteration * _training(plan)}


def _predictions(plan: Plan) -> int:
    """Return how many predictions a velocity takes: two under guidance."""
    return 1 if plan.recipe.policy.diffusers.sample.guidance_scale == 1 else 2


def _training(plan: Plan) -> int:
    """Return the forward passes that cost as much as a forward and a backward pass."""
    policy = plan.recipe.policy
    return 1 + (2 if policy.lora is None else 1) + policy.model_gradient_checkpointing
