"""The shipped suite on every plugin that is not a model."""

from cosmos_rl_core.conformance.test_plugins import *  # noqa: F403
