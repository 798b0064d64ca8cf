"""A training flow for every algorithm. Deployments of algorithms from outside plugins use it."""

from flows.session.session import any_training_flow


@any_training_flow
def train() -> None:
    """Train by the recipe's algorithm."""
