"""Lines of JSON between a flow and its bridge to a Ray cluster."""

from typing import Any

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.clusters import RayNodes


class Settings(Section):
    """The first line, to the bridge."""

    run_url: str
    address: str
    head_timeout_s: float
    nodes_timeout_s: float
    launch: str
    """JSON of the profile under which each node starts processes."""


class Order(Section):
    """A job for the cluster."""

    id: str
    request: str
    """JSON of the Request."""
    execution: str
    """JSON of the execution."""
    fresh: bool
    ranks: int
    """Number of ranks that compute with torch; 0 for a stage without."""
    nodes: RayNodes
    """Nodes of a distributed stage; one for any other."""


class Told(Section):
    """News of a job, from the bridge. Files that did not change are left out."""

    id: str
    phase: str
    exit_code: int | None = None
    kind: str | None = None
    reason: str = ""
    node_lost: bool = False
    files: dict[str, str] = {}
    """Contents of status and error files."""
    log: dict[int, str] = {}
    """Text that was added to the log of each node. Bytes that are no UTF-8 are lone surrogates."""
    served_before: bool = False


class Line(Section):
    """A line in either direction. One of its fields is given."""

    order: Order | None = None
    cancel: str | None = None
    show_stacks: str | None = None
    give_back: bool = False
    told: Told | None = None
    failed: dict[str, Any] | None = None
    """Kind and message of the error that ends the bridge."""
    processes: dict[str, Any] | None = None
    """The processes that stay on the nodes."""


def line(**what: Any) -> bytes:
    """Return a :class:`Line` with these fields as JSON, with a line break."""
    return Line(**what).model_dump_json(exclude_defaults=True).encode() + b"\n"
