"""The shipped suite's steps of training, of every model plugin."""

from cosmos_rl_core.conformance.models.test_training import *  # noqa: F403
