"""Processes that stay between the stages of a run, as its status shows them."""

from cosmos_rl_core.config.base import Section


class Staying(Section):
    """A process that stays between stages."""

    device: str
    """Name of its device; its own number if stages compute on the CPU."""
    pid: int
    since: str
    """When it started, in UTC."""
    served: int
    """Number of stages that it has served."""
    kept_bytes: int = 0
    """Bytes of frozen weights that it holds."""


class Processes(Section):
    """The processes that stay between the stages of a run."""

    stay: tuple[Staying, ...] = ()
    ended: tuple[str, ...] = ()
    """Why the last processes ended, the newest last."""
