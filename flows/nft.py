"""DiffusionNFT as a Prefect flow."""

from prefect import flow

from flows.plan import DEFAULT_STORE, Settings
from flows.session import run_name, train


@flow(name="nft", flow_run_name=run_name)
def nft(
    recipe: str,
    store: str = DEFAULT_STORE,
    run_id: str | None = None,
    iterations: int | None = None,
    overrides: list[str] | None = None,
    cluster: str | None = None,
    allow_numerics_change: bool = False,
) -> None:
    """Rollout, reward, update, again and again: a diffusion model learns from its own samples, good and bad.

    Args:
        recipe: Path of the TOML recipe.
        store: Directory or URL (s3://bucket/prefix) of all runs.
        run_id: Name of the run; the same name goes on with the same run. Default: from the recipe and its contents.
        iterations: How far to go, instead of the recipe's number.
        overrides: Settings of the recipe to change, as section.key=value.
        cluster: Path of a TOML file that says how processes are launched, e.g. deployments/clusters/local.toml.
        allow_numerics_change: Go on under other versions, threads or devices than the run began with.
    """
    settings = Settings(recipe, store, run_id, iterations, tuple(overrides or ()), cluster, allow_numerics_change)
    train(settings, algorithm="nft")
