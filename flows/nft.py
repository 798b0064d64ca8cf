"""DiffusionNFT as a Prefect flow."""

from flows.session.session import training_flow


@training_flow
def nft() -> None:
    """Train by DiffusionNFT: a model learns from its own good and bad samples."""
