"""DiffusionNFT as a Prefect flow."""

from flows.running.session import training_flow


@training_flow
def nft() -> None:
    """DiffusionNFT: rollout, reward, update, again and again; a model learns from its own samples, good and bad."""
