"""The Request of each stage, made from the plan of a run and from the current artifacts."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from cosmos_rl_core import plugins
from cosmos_rl_core.config.shared import Decoding
from cosmos_rl_core.config.train import RewardConfig, RewardedOptions, SupervisedOptions
from cosmos_rl_core.storage import store
from cosmos_rl_core.training.schedules import optimizer_steps
from cosmos_rl_core.weights.parts import CURRENT, EMA, INIT, REFERENCE, STATE
from flows.planning import facts, ranking, stored
from flows.planning.base import AnyRun
from flows.planning.datasets import data_of, split_of, weights_of
from flows.planning.run import Run, inputs_of
from flows.sizes import costs
from stages import contracts
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of, once
from stages.contracts import INDEX, MEDIA, TENSORS
from stages.reporting.contracts import Fragment, Report


def policy(run: Run) -> Request:
    """Return the Request for policy version 0."""
    model, trained = run.plan.base, run.recipe.policy
    config = contracts.Policy(
        model=model,
        from_scratch=trained.from_scratch,
        lora=trained.lora,
        init=run.plan.init,
        stacked=run.plan.below is not None,
        keeps_base=run.plan.init is not None and costs.keeps_base(run.recipe),
    )
    return run.plan.request(run.slots.policy(0), config, inputs={INIT: run.plan.init_inputs})


def sampling(run: Run, k: int) -> contracts.Rollout:
    """Return the settings of the stage that makes the samples of iteration k."""
    settings, given_frames = run.recipe.rollout, run.recipe.train.train_policy.given_frames
    return contracts.Rollout(
        model=run.plan.sampled,
        lora=run.recipe.policy.lora,
        below=None if _samples_the_base(run) else run.plan.below,
        param_dtype=run.recipe.train.param_dtype,
        prompts=run.plan.prompts_of(k),
        n_generation=settings.n_generation,
        media=run.plan.media,
        sample=run.recipe.policy.diffusers.sample.rollout,
        train_on=run.needs.steps_at(k),
        use_same_seed=run.needs.use_same_seed,
        given_frames=given_frames,
        decoding=_decoding(run),
        data_split=split_of(data_of(run.recipe)) if given_frames[1] > 0 else None,
        batch_size=settings.n_generation_mini_batch,
        samples_per_shard=settings.samples_per_shard,
    )


def rollout(run: Run, k: int) -> Request:
    """Return the Request for the samples of iteration k."""
    inputs = {
        "policy": (_behaviour(run, k),),
        INIT: () if _samples_the_base(run) else _init(run),
        "embeddings": inputs_of([run.prepared.embed_at(k)]),
        **(run.prepared.data.inputs() if run.recipe.train.train_policy.given_frames[1] > 0 else {}),
    }
    return run.plan.request(run.slots.iteration(k, "rollout"), sampling(run, k), k, inputs)


def decode(run: Run, k: int) -> Request:
    """Return the Request for the media of the samples that rollout k left undecoded."""
    batch_size = run.recipe.rollout.n_generation_mini_batch
    config = contracts.Decode(model=run.plan.base, media=run.plan.media, decoding=_decoding(run), batch_size=batch_size)
    inputs = {"samples": (input_of(run.slots.iteration(k, "rollout"), INDEX, TENSORS),)}
    return run.plan.request(run.slots.iteration(k, "decode"), config, k, inputs)


def _decoding(run: Run) -> Decoding:
    """Return which samples rollouts decode, and how."""
    settings = run.recipe.rollout
    return Decoding(share=settings.decode_share, dtype=settings.decode_dtype, tf32=settings.decode_tf32)


def reward(run: Run, scoring: RewardConfig, samples: str, k: int | None) -> Request:
    """Return the Request for the scores of the samples in the slot ``samples`` by one reward."""
    return _scores(run, scoring, samples, k, partial(input_of, samples))


def stage_for(scoring: RewardConfig) -> type[contracts.Reward]:
    """Return the stage that makes the scores of a reward: ``judge`` if it needs torch, else ``reward``."""
    return contracts.Judge if scoring.fn.facts.torch else contracts.Reward


def rewards_ahead(run: AnyRun, making: Request) -> list[Request]:
    """Return the Requests for the scores of a rollout that is being made, by the rewards that overlap with it.

    Empty for other stages.
    """
    if making.stage != contracts.Rollout.name:
        return []
    assert isinstance(run, Run)
    overlapping = (reward for reward in run.scored if reward.overlap)
    return [_scores(run, reward, making.slot, making.iteration, making.expected) for reward in overlapping]


def _scores(run: Run, scoring: RewardConfig, samples: str, k: int | None, source: Callable[..., Input]) -> Request:
    """Return the Request for scores of the samples in a slot. ``source`` makes an input of the names of its parts."""
    folder, _, name = samples.rpartition("/")
    # Evaluations have no latents.
    reads = scoring.fn.reads(run.plan.media.frames) if name == "rollout" else "media"
    # Once in a look, because the version of a scorer takes longest. The key has the reward's id: keep the reward, too.
    config, _ = once(("scores", id(scoring), reads), lambda: (_scoring(scoring, reads), scoring))
    slot = store.join(folder, f"{'reward' if name == 'rollout' else name}-{scoring.fn.label}")
    inputs = {"samples": (source(INDEX, TENSORS if reads == "latents" else MEDIA),)}
    return run.plan.request(slot, config, k, inputs)


def _scoring(scoring: RewardConfig, reads: Literal["media", "latents"]) -> contracts.Reward:
    return scored_by(scoring, plugins.load("rewards", scoring.fn.name).Reward(scoring.fn).version, reads)


def scored_by(scoring: RewardConfig, scorer: str, reads: Literal["media", "latents"]) -> contracts.Reward:
    """Return the settings of a stage that makes the scores of a reward by a version of its scorer."""
    return stage_for(scoring)(
        reward=scoring.fn,
        reads=reads,
        scorer=scorer,
        max_attempts=scoring.max_attempts,
        max_failed_fraction=scoring.max_failed_fraction,
    )


def warn(run: Run, k: int) -> Request:
    """Return the Request that compares the scores of iteration k with limits before its update."""
    labels = tuple(reward.fn.label for reward in run.scored)

    def scores(k: int) -> tuple[Input, ...]:
        return tuple(_all_numbers(run.slots.iteration(k, f"reward-{label}")) for label in labels)

    assert run.plan.early_warning is not None
    config = contracts.Warn(rewards=labels, limits=run.plan.early_warning.limits)
    samples = input_of(run.slots.iteration(k, "rollout"), INDEX, MEDIA)
    inputs = {"samples": (samples,), "scores": scores(k), "first": scores(run.plan.baseline)}
    return run.plan.request(run.slots.iteration(k, "warn"), config, k, inputs)


def update(run: Run, k: int) -> Request:
    """Return the Request that trains policy version k on the rollout of iteration k."""
    recipe = run.recipe
    options = recipe.train.train_policy
    assert isinstance(options, RewardedOptions)
    num_steps = options.mu_iterations * costs.optimizer_steps(recipe, options)
    trained = [reward for reward in recipe.rewards if reward.role == "train"]
    gates = [reward for reward in recipe.rewards if reward.role == "gate"]
    config = contracts.Update(
        model=run.plan.model if run.needs.data_term is not None else run.plan.sampled,
        lora=recipe.policy.lora,
        below=run.plan.below,
        param_dtype=recipe.train.param_dtype,
        gradient_checkpointing=run.plan.settled.policy.model_gradient_checkpointing is True,
        algorithm=options,
        reward_weights={r.fn.label: r.weight for r in trained},
        gates={r.fn.label: r.gate for r in gates},
        sample=recipe.policy.diffusers.sample.rollout,
        steps=optimizer_steps(recipe.train, run.plan.optimizer_step(k, num_steps), num_steps),
        keeps_ema=recipe.train.ema_enable,
        old_decay=None if run.needs.old_decay is None else run.needs.old_decay(k),
        reference=costs.reference_after(recipe, k),
        data_split=split_of(data_of(recipe)) if run.needs.data_term is not None else None,
        density=recipe.policy.diffusers.density,
        posterior=recipe.policy.diffusers.posterior if run.needs.data_term is not None else "mode",
        foreign=stored.foreign(run, k, _behaviour(run, k)),
    )
    inputs = {
        "policy": (_state(run, k),),
        INIT: _init(run),
        "rollouts": (input_of(run.slots.iteration(k, "rollout"), INDEX, TENSORS),),
        "behaviours": (_behaviour(run, k) if run.plan.generates else stored.made_by(run, k),),
        "scores": tuple(input_of(run.slots.iteration(k, f"reward-{r.fn.label}")) for r in (*trained, *gates)),
        "embeddings": inputs_of(run.prepared.embeddings_at(k)),
        **(run.prepared.data.inputs() if run.needs.data_term is not None else {}),
    }
    return run.plan.request(run.slots.iteration(k, "update"), config, k, inputs)


def finetune(run: Run, k: int) -> Request:
    """Return the Request that takes the supervised steps from policy version k to version k + 1."""
    recipe, options = run.recipe, run.recipe.train.train_policy
    assert isinstance(options, SupervisedOptions)
    num_steps = options.steps_per_iteration
    config = contracts.Finetune(
        model=run.plan.supervised,
        lora=recipe.policy.lora,
        below=run.plan.below,
        param_dtype=recipe.train.param_dtype,
        gradient_checkpointing=run.plan.settled.policy.model_gradient_checkpointing is True,
        algorithm=options,
        data_split=split_of(data_of(recipe)),
        weights=weights_of(data_of(recipe)),
        media=run.plan.media,
        density=recipe.policy.diffusers.density,
        posterior=recipe.policy.diffusers.posterior,
        batch_size=recipe.train.train_batch_per_replica,
        steps=optimizer_steps(recipe.train, run.plan.optimizer_step(k, num_steps), num_steps),
        keeps_ema=recipe.train.ema_enable,
    )
    inputs = {
        "policy": (_state(run, k),),
        INIT: _init(run),
        "embeddings": inputs_of(run.prepared.embeddings_at(k)),
        **run.prepared.data.inputs(),
    }
    return run.plan.request(run.slots.iteration(k, "finetune"), config, k, inputs)


def export(run: Run, k: int) -> Request:
    """Return the Request for policy version k in the format that users load."""
    config = contracts.Export(model=run.plan.base, lora=run.recipe.policy.lora, below=run.plan.below)
    inputs = {"policy": (exported_policy(run, k),), INIT: _init(run)}
    return run.plan.request(run.slots.version(k, "export"), config, k, inputs)


def validate(run: Run, k: int) -> Request:
    """Return the Request for the diffusion loss of policy version k on held-out media.

    Its seed is ``validation.seed``, so runs with different seeds draw the same noise.
    """
    validation = run.recipe.validation
    assert validation is not None
    config = contracts.Validate(
        model=run.plan.supervised,
        lora=run.recipe.policy.lora,
        below=run.plan.below,
        param_dtype=run.recipe.train.param_dtype,
        batch_size=validation.batch_size,
        data_split=split_of(validation.data),
    )
    inputs = {
        "policy": (exported_policy(run, k),),
        INIT: _init(run),
        "embeddings": inputs_of(run.prepared.held_out.embeds),
        **run.prepared.held_out.inputs(),
    }
    return run.plan.request(run.slots.version(k, "validate"), config, k, inputs, validation.seed)


def evaluate(run: Run, k: int) -> Request:
    """Return the Request for samples of policy version k from the held-out prompts.

    The Request holds neither k nor the seed of the run, so all versions and runs draw the same noise.
    """
    validation, diffusers = run.recipe.validation, run.recipe.policy.diffusers
    assert validation is not None
    config = contracts.Evaluate(
        model=run.plan.sampled,
        param_dtype=run.recipe.train.param_dtype,
        prompts=run.plan.validation_prompts,
        n_generation=validation.n_generation,
        media=run.plan.media,
        num_steps=diffusers.sample.eval_num_steps,
        guidance_scale=diffusers.sample.guidance_scale,
        negative_prompt=diffusers.sample.negative_prompt,
        max_prompt_length=diffusers.max_prompt_length,
        batch_size=validation.batch_size,
        samples_per_shard=run.recipe.rollout.samples_per_shard,
    )
    inputs = {"export": (input_of(run.slots.version(k, "export")),)}
    slot = run.slots.version(k, "evaluate")
    return run.plan.request(slot, config, inputs=inputs, seed=validation.seed)


def fragment(run: Run, k: int) -> Request:
    """Return the Request for the fragment of the report on the rollout of iteration k."""
    labels = tuple(reward.fn.label for reward in run.scored)
    config = Fragment(
        held_out=False,
        rewards=labels,
        headline=run.headline_reward,
        gates={r.fn.label: r.gate for r in run.recipe.rewards if r.role == "gate"},
    )
    inputs = {
        "samples": (input_of(run.slots.iteration(k, "rollout"), INDEX, MEDIA),),
        "scores": tuple(_all_numbers(run.slots.iteration(k, f"reward-{label}")) for label in labels),
        "warnings": (input_of(run.slots.iteration(k, "warn")),) if run.warns else (),
    }
    return run.plan.request(run.slots.iteration(k, "fragment"), config, k, inputs)


def judged(run: Run, k: int) -> Request:
    """Return the Request for the fragment of the report on policy version k: its held-out prompts and media."""
    labels = tuple(reward.fn.label for reward in run.recipe.rewards) if run.evaluates else ()
    config = Fragment(
        held_out=True,
        rewards=labels,
        headline=run.headline_reward if labels else "",
        # Also if another number ranks policies now, so that a new choice makes no fragment again.
        weights=(weights := ranking.weights_of(run)),
        gates=ranking.gates_of(run) if weights else {},
    )

    def inputs(k: int, samples: str, scores: str, losses: str) -> dict[str, tuple[Input, ...]]:
        slot = run.slots.version(k, "evaluate")
        return {
            samples: (input_of(slot, INDEX, MEDIA),) if run.evaluates else (),
            scores: tuple(_all_numbers(f"{slot}-{label}") for label in labels),
            losses: (input_of(run.slots.version(k, "validate")),) if run.validates else (),
        }

    found = inputs(k, "samples", "scores", "validations")
    found |= inputs(run.plan.baseline, "first", "first_scores", "first_validations") if k != run.plan.baseline else {}
    return run.plan.request(run.slots.version(k, "fragment"), config, k, found)


def report(run: Run, iterations: int, judged: list[int]) -> Request:
    """Return the Request for the report on all iterations and on the policy versions ``judged``."""
    ks, measured = range(iterations), run.evaluates or run.validates
    shown = [k for k in ks if run.trains_on_rewards and k >= run.plan.baseline]
    inputs = {
        "fragments": tuple(input_of(run.slots.iteration(k, "fragment")) for k in shown),
        "judged": tuple(input_of(run.slots.version(k, "fragment")) for k in judged if measured),
        "updates": tuple(input_of(run.slots.policy(k + 1)) for k in ks),
    }
    config = Report(
        title=run.plan.run_id,
        reward=run.headline_reward,
        ranked_by=ranking.ranked_by(run),
        init=run.plan.lineage,
        about=facts.about(run.plan),
        settings=facts.settings(run.plan, identity=True),
        roles=facts.roles(run.plan),
        staleness=run.recipe.train.staleness,
    )
    return run.plan.request(run.slots.report, config, None, inputs)


def _all_numbers(slot: str) -> Input:
    """Return the input of scores with every number that the reward gave, even those without use, and its errors."""
    return input_of(slot, contracts.Reward.SCORES, contracts.Reward.ANSWERS)


def exported_policy(run: AnyRun, k: int) -> Input:
    """Return the weights of policy version k that are exported: the moving average, if there is one."""
    return input_of(run.slots.policy(k), EMA if run.recipe.train.ema_enable else CURRENT)


def _state(run: Run, k: int) -> Input:
    """Return the parts of policy version k that training continues from."""
    return input_of(run.slots.policy(k), *STATE)


def _init(run: Run) -> tuple[Input, ...]:
    """Return the frozen adapter below the trained one, if there is one."""
    return () if run.plan.below is None else (input_of(run.slots.policy(0), INIT),)


def _samples_the_base(run: Run) -> bool:
    """Return whether rollouts are the base model's, with all adapters off."""
    return run.needs.behaviour == REFERENCE and run.recipe.policy.reference == "base"


def _behaviour(run: Run, k: int) -> Input:
    """Return the weights that generate rollout k: from ``staleness`` versions ago."""
    version, part = max(0, k - run.recipe.train.staleness), run.needs.behaviour
    if part == REFERENCE and run.needs.reference_after(0) == "base":
        # This reference never changes: it is the base, or the weights that version 0 begins with.
        version = 0
    return input_of(run.slots.policy(version), part)
