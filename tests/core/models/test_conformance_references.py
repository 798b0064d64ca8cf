"""The shipped suite's prompts with references, of every model plugin that takes them."""

from cosmos_rl_core.conformance.models.references.test_references import *  # noqa: F403
