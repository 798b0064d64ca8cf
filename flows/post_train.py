"""The loop. Everything a run does, in order; each line asks for an artifact and takes the one that stands, if any."""

from dataclasses import dataclass

from flows.planning.requests import Run
from flows.running.launch import Launcher
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import standing


@dataclass(frozen=True)
class Result:
    """What a finished run has to say."""

    before: Manifest | None
    """Scores of the base policy on the held-out prompts."""
    after: Manifest | None
    """Scores of the final policy on the same prompts and seeds."""
    report: Manifest


def post_train(run: Run, launcher: Launcher) -> Result:
    """Take the base policy through every iteration of the plan."""
    launch = launcher.launch
    launch("policy", run.policy())
    launch("embed", run.embed())
    if run.needs_data:
        launch("encode", run.encode())
    if run.validates:
        launch("embed-held-out", run.embed_held_out())
        launch("encode-held-out", run.encode_held_out())
    evaluated = {0: evaluate(run, launcher, 0)}
    num_iterations = run.recipe.train.num_iterations
    for k in range(num_iterations):
        if run.trains_on_rewards:
            launch(f"iteration-{k:04d}/rollout", run.rollout(k))
            rewards = run.rewards(run.iteration(k, "rollout"), k)
            launch(f"iteration-{k:04d}/{_names(rewards)}", *rewards)
            # A stale rollout needs nothing of this update, so it is made beside it.
            beside = [run.rollout(k + 1)] if run.recipe.train.staleness and k + 1 < num_iterations else []
            launch(f"iteration-{k:04d}/update{'+rollout' if beside else ''}", run.update(k), *beside)
        else:
            launch(f"iteration-{k:04d}/finetune", run.finetune(k))
        run.drop_old_state(k + 1)
        if run.is_due(k + 1):
            evaluated[k + 1] = evaluate(run, launcher, k + 1)
    scored = [k for k, scores in evaluated.items() if scores is not None]
    (report,) = launch("report", run.report(num_iterations, scored))
    return Result(evaluated[0], evaluated[max(evaluated)], report)


def evaluate(run: Run, launcher: Launcher, k: int) -> Manifest | None:
    """Export policy version k, sample the held-out prompts from the export, and score them.

    None without a validation set.
    """
    launcher.launch(f"policy-{k:04d}/export", run.export(k))
    if run.validates:
        launcher.launch(f"policy-{k:04d}/validate", run.validate(k))
    if not run.evaluates:
        return None
    samples = run.evaluate(k)
    launcher.launch(f"policy-{k:04d}/evaluate", samples)
    rewards = run.rewards(samples.slot, k)
    launcher.launch(f"policy-{k:04d}/{_names(rewards)}", *rewards)
    return standing(f"{samples.slot}-{run.headline_reward}")[1]


def _names(rewards: list[Request]) -> str:
    return "+".join(request.slot.rpartition("/")[2] for request in rewards)
