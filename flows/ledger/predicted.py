"""Arithmetic and time of each stage, predicted for devices of a stated speed."""

import math
from dataclasses import dataclass

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.train import RewardedOptions, SupervisedOptions
from cosmos_rl_core.errors import counted
from cosmos_rl_core.footprint.counted import footprints
from cosmos_rl_core.footprint.passes import Pass
from cosmos_rl_core.pipelines.memory import Bytes
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.weights import counting
from flows.planning.plan import Plan
from flows.sizes import costs, memory
from flows.sizes.activations import tile
from flows.sizes.basis import typical
from stages.generating.plans import ENCODERS
from stages.registry import STAGES

DEVICE_FLOPS = 10**14
"""Operations a second that every rank is assumed to sustain in the transformer."""
FLOAT32_FLOPS, TF32_FLOPS = 2.5e13, 10**14
"""Operations a second that every rank is assumed to sustain in the VAE, in float32 and with TF32."""
COLD_S, COLD_ON_CPU_S, WARM_S = 20.0, 5.0, 0.3
"""Seconds that a stage with torch takes to start, with torchrun and CUDA's context; without a GPU; by a fork."""
LIGHT_S = 1.0
"""Seconds that a cold stage without torch takes to start."""
READ_BYTES_S = 8 * 10**9
"""Bytes a second of float32 weights that all ranks of a machine together read from files in the page cache."""
PNG_S, FFV1_S = 88e-3 / 512**2, 57e-3 / (720 * 1280)
"""Seconds of a thread for a pixel, as measured on one core."""
START, LOAD, TRANSFORMER, VAE, ENCODE, WAIT = (
    "start",
    "load weights",
    "transformer",
    "VAE",
    "encode media",
    "wait for the last rank",
)
CAUSES = (START, LOAD, TRANSFORMER, VAE, ENCODE, WAIT)
"""Causes of a stage's seconds."""


@dataclass(frozen=True)
class StageWork:
    """Arithmetic and time of one run of a stage: predictions from the constants above."""

    stage: str
    ranks: int
    flops: int
    """Operations of the transformer on all ranks together; a multiplication and an addition are two."""
    causes: dict[str, float]
    """Seconds by cause."""

    @property
    def seconds(self) -> float:
        """Return all of its seconds."""
        return sum(self.causes.values())

    def __str__(self) -> str:
        return f"{self.stage} {_time(self.seconds)} on {self.ranks} rank{'s' * (self.ranks != 1)}"


def forward_flops(plan: Plan) -> int:
    """Return the operations of one unguided forward pass of the transformer on one sample, with typical references."""
    media, length, path = plan.media, plan.recipe.policy.diffusers.max_prompt_length, costs.base_path(plan.recipe)
    captions = plan.data_snapshot if not plan.prompts else None
    pictures = captions.typical_pictures if captions else typical(path, plan.prompts)
    return counting.forward_flops(path, media.size, media.frames, length, pictures)


def stages(plan: Plan) -> list[StageWork]:
    """Return the time of an iteration's stages and of an evaluation, as far as they run the transformer."""
    forward, launch = forward_flops(plan), plan.recipe.launch
    held = {found.stage: found for found in memory.stages(plan.recipe, passes(plan), plan.basis)}
    found: list[StageWork] = []
    for stage, count in passes(plan).items():
        ranks = launch.processes_of(stage)
        causes = {START: start_s(launch, stage), LOAD: _load_s(launch, held[stage])}
        causes[TRANSFORMER] = count * forward / (ranks * DEVICE_FLOPS)
        found.append(StageWork(stage, ranks, count * forward, causes | _of_samples(plan, stage, causes[TRANSFORMER])))
    return found


def start_s(launch: LaunchConfig, stage: str) -> float:
    """Return the seconds that a stage takes to start."""
    if not STAGES[stage].torch:
        return WARM_S if launch.mode == "warm" else LIGHT_S
    on_gpus = memory.on_gpus(launch)
    if launch.ranks_on("cuda" if on_gpus else "cpu") != "cold":
        return WARM_S
    return COLD_S if on_gpus else COLD_ON_CPU_S


def _load_s(launch: LaunchConfig, stage: memory.StageMemory) -> float:
    """Return the seconds in which the ranks of a machine read the weights that each of them holds.

    Whole weights that processes keep are read once in a run.
    """
    kinds = (memory.TRANSFORMER, memory.OTHERS)
    read = sum((stage.rows.get(kind, Bytes()) for kind in kinds), Bytes())
    if launch.parallelism_of(stage.stage).dp_shard_size == 1 and read.device + read.cpu <= launch.kept_bytes:
        return 0.0
    return (read.device + read.cpu) * stage.ranks / launch.nodes_of(stage.stage) / READ_BYTES_S


def _of_samples(plan: Plan, stage: str, sampling_s: float) -> dict[str, float]:
    """Return the seconds of a stage that makes samples, apart from sampling: for its work, and for waiting.

    Ranks with fewer samples wait for the others. Threads encode media while the next samples are made: only the time
    by which encoding takes longer than sampling and decoding is counted.
    """
    recipe, launch = plan.recipe, plan.recipe.launch
    ranks, groups = launch.processes_of(stage), launch.parallelism_of(stage).data_world_size
    samples, at_once = _samples(plan, stage)
    tiles = math.ceil(samples / at_once)
    uneven = math.ceil(tiles / groups) * groups / tiles - 1
    if stage not in ("rollout", "evaluate"):
        return {WAIT: uneven * sampling_s}
    diffusers = recipe.policy.diffusers
    decoded_s = samples * _decoding_flops(plan) / ((TF32_FLOPS if launch.tf32 else FLOAT32_FLOPS) * ranks)
    pixels = samples * diffusers.train_frames * math.prod(diffusers.inference_size)
    encoded_s = pixels * (PNG_S if diffusers.train_frames == 1 else FFV1_S) / (ranks * ENCODERS)
    return {
        VAE: decoded_s,
        ENCODE: max(0.0, encoded_s - sampling_s - decoded_s),
        WAIT: uneven * (sampling_s + decoded_s),
    }


def _samples(plan: Plan, stage: str) -> tuple[int, int]:
    """Return how many samples a stage divides among its ranks, and how many are taken at once."""
    recipe, options = plan.recipe, plan.recipe.train.train_policy
    if stage == "evaluate":
        assert recipe.validation is not None
        return len(plan.validation_prompts) * recipe.validation.n_generation, recipe.validation.batch_size
    batch = recipe.train.train_batch_per_replica
    if stage == "rollout":
        return batch, tile(recipe)
    # Micro-batches of an optimizer step have nearly equal sizes.
    if isinstance(options, RewardedOptions):
        return costs.step_samples(recipe, options), costs.needs_of(recipe).members
    return batch, 1


def _decoding_flops(plan: Plan) -> int:
    """Return the operations of the VAE for a sample; 0 for small models."""
    if not costs.is_large(plan.recipe):
        return 0
    one = Pass(kind="decoding", size=plan.media.size, frames=plan.media.frames, batch=1)
    return footprints(costs.base_path(plan.recipe), [one])[0].flops


def passes(plan: Plan) -> dict[str, int]:
    """Return the number of forward passes of one sample in each stage.

    A backward pass costs one forward pass with LoRA and two with all weights; checkpointing adds one. Held-out losses
    and a loss on media next to rewards are not counted.
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
        samples = costs.most_units(recipe) * needs.members
        found["update"] = samples * predictions * trained * (training + len(needs.roles) - 1)
    if recipe.validation is not None and recipe.evaluates:
        samples = len(plan.validation_prompts) * recipe.validation.n_generation
        found["evaluate"] = samples * predictions * sample.eval_num_steps
    return found


def time_lines(plan: Plan) -> list[str]:
    """Return the time of an iteration by stage, of all iterations and of an evaluation, a line each.

    Empty for small models.
    """
    if not costs.is_large(plan.recipe):
        return []
    work, count = stages(plan), plan.recipe.train.num_iterations
    each = [stage for stage in work if stage.stage != "evaluate"]
    lines = [
        f"predicted: an iteration: {', '.join(map(str, each))}, if a rank sustains {DEVICE_FLOPS / 10**12:g} TFLOP/s",
        f"{counted(count, 'iteration')}: {_time(count * sum(stage.seconds for stage in each))}",
        *(f"an evaluation: {stage}" for stage in work if stage.stage == "evaluate"),
    ]
    forward = f"{forward_flops(plan) / 10**12:.3g} TFLOP for one forward pass of a sample"
    return [*lines, f"rewards, and what follows an update, are not counted; {forward}"]


def _time(seconds: float) -> str:
    units = ((3600, "h"), (60, "min"))
    size, unit = next((pair for pair in units if seconds >= pair[0]), (1, "s"))
    return f"{seconds / size:.2g} {unit}"
