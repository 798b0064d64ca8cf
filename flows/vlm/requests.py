"""The Request of each stage of a run that fine-tunes a VLM."""

from typing import Any

from cosmos_rl_core.training.schedules import optimizer_steps
from cosmos_rl_core.weights.parts import STATE
from flows.planning import facts
from flows.planning.ranking import ranked_by
from flows.planning.requests import exported_policy
from flows.vlm.run import VlmRun
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.reporting.contracts import Report
from stages.vlm.contracts import VlmEvaluate, VlmExport, VlmFinetune, VlmPolicy


def policy(run: VlmRun) -> Request:
    """Return the Request for policy version 0."""
    return run.plan.request(run.slots.policy(0), VlmPolicy(**_model(run)))


def finetune(run: VlmRun, k: int) -> Request:
    """Return the Request that takes the steps of iteration k from policy version k to version k + 1."""
    train, options = run.recipe.train, run.recipe.train.train_policy
    num_steps = options.steps_per_iteration
    config = VlmFinetune(
        **_model(run),
        param_dtype=train.param_dtype,
        gradient_checkpointing=run.recipe.policy.model_gradient_checkpointing,
        steps=optimizer_steps(run.recipe.train, run.plan.optimizer_step(k, num_steps), num_steps),
        keeps_ema=train.ema_enable,
        sources=dict(options.datasets),
        weights=dict(options.weights),
        batch_size=train.train_batch_per_replica,
        row_length=options.row_tokens,
        balance_dp_token=options.balance_dp_token,
    )
    inputs = {"policy": (input_of(run.slots.policy(k), *STATE),), "tokens": (run.tokens(),)}
    return run.plan.request(run.slots.iteration(k, "finetune"), config, k, inputs)


def validate(run: VlmRun, k: int) -> Request:
    """Return the Request for losses and answers of policy version k on held-out conversations.

    The Request does not hold the seed of the run: equal weights give equal answers.
    """
    validation = run.recipe.validation
    assert validation is not None
    config = VlmEvaluate(
        **_model(run),
        param_dtype=run.recipe.train.param_dtype,
        sources=dict(validation.datasets),
        max_new_tokens=validation.max_new_tokens,
        parsers=dict(validation.parsers),
    )
    inputs = {"policy": (exported_policy(run, k),), "tokens": (run.tokens(held_out=True),)}
    return run.plan.request(run.slots.version(k, "validate"), config, k, inputs, seed=0)


def export(run: VlmRun, k: int) -> Request:
    """Return the Request for policy version k in the format that transformers or peft loads."""
    inputs = {"policy": (exported_policy(run, k),)}
    return run.plan.request(run.slots.version(k, "export"), VlmExport(**_model(run)), k, inputs)


def report(run: VlmRun, iterations: int) -> Request:
    """Return the Request for the report on all iterations, and on the policy versions that are due by then."""
    judged = [k for k in range(run.plan.baseline, iterations + 1) if run.validates and run.is_due(k)]
    config = Report(
        title=run.plan.run_id,
        reward="",
        ranked_by=ranked_by(run),
        init="",
        about=facts.about(run.plan),
        settings=facts.settings(run.plan, identity=True),
        roles={},
    )
    inputs = {
        "fragments": (),
        "judged": tuple(input_of(run.slots.version(k, "validate")) for k in judged),
        "updates": tuple(input_of(run.slots.policy(k + 1)) for k in range(iterations)),
    }
    return run.plan.request(run.slots.report, config, None, inputs)


def _model(run: VlmRun) -> dict[str, Any]:
    """Return the settings that every stage with the model has."""
    policy = run.recipe.policy
    return {"vlm": run.plan.vlm, "lora": policy.lora, "trains": policy.trains}
