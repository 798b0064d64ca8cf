"""Which solver rollouts take: the one that a recipe names, or the one of the pipeline's own scheduler."""

from cosmos_rl_core.config.policy import Solver
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.sampling.schedule import check_flow
from cosmos_rl_core.sampling.solvers import check_own, own_solver


def with_solver(recipe: Recipe) -> Recipe:
    """The recipe with its solver by name.

    Raises :class:`ConfigError` for a pipeline whose scheduler has no levels of a flow, no solver of ours where the
    recipe names none, or settings by which it samples otherwise than that solver.
    """
    sample = recipe.policy.diffusers.sample
    path = directories.resolve_path(recipe.policy.model_name_or_path)
    scheduler, settings = directories.scheduler(path)
    spec = directories.spec(path)
    told = {
        "by_size": spec.max_shift is not None,
        "always": spec.always_shifts,
        "given": spec.stock_sigmas(sample.num_steps, settings) is not None,
    }
    if not recipe.train.train_policy.rewarded:
        # There are no rollouts; one name for all keeps the identity of runs that train on data.
        check_flow(scheduler, settings, **told)
        return _named(recipe, sample.solver or "euler")
    solver = sample.solver or own_solver(scheduler, settings)
    if solver != "edm":  # which has levels of its own
        check_flow(scheduler, settings, **told)
    check_own(solver, scheduler, settings)
    return _named(recipe, solver)


def _named(recipe: Recipe, solver: Solver) -> Recipe:
    policy, diffusers = recipe.policy, recipe.policy.diffusers
    sample = diffusers.sample.model_copy(update={"solver": solver})
    diffusers = diffusers.model_copy(update={"sample": sample})
    return recipe.model_copy(update={"policy": policy.model_copy(update={"diffusers": diffusers})})
