"""The reward service that checks of a service are tried on."""

from tests.core.reward_service.conftest import service, spool

__all__ = ["service", "spool"]
