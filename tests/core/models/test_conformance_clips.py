"""The shipped suite's videos that continue clips, of every model plugin that takes clips as references."""

from cosmos_rl_core.conformance.models.references.test_clips import *  # noqa: F403
