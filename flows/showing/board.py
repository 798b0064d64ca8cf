"""The artifacts of one flow run: each is created once and then replaced, by a thread of its own.

A server that does not answer costs the run nothing: contents that could not be sent wait, or newer ones replace them.
"""

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from cosmos_rl_core.errors import first_line

TIMEOUT_S = 10.0
"""Seconds to wait for an answer of the server."""
PAUSE_S = 10.0
"""Seconds to wait after a failure."""
CLOSING_S = 10.0
"""Seconds to wait at the end until the last contents are sent."""


@dataclass(frozen=True)
class Shown:
    """The contents of one artifact."""

    kind: Literal["table", "progress", "markdown"]
    data: str | float
    description: str


class Board:
    """The artifacts of a flow run, by their keys, from ``with`` to its end."""

    def __init__(self, flow_run_id: UUID, note: Callable[[str], None]) -> None:
        self._flow_run_id, self._note = flow_run_id, note
        self._waiting: dict[str, Shown] = {}
        self._known: dict[str, UUID] = {}
        self._turn = threading.Condition()
        self._ended = self._complained = False
        # In the flow's context, so that the thread talks to the same server.
        work = partial(contextvars.copy_context().run, self._work)
        self._thread = threading.Thread(target=work, name="prefect-artifacts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._turn:
            self._ended = True
            self._turn.notify()
        self._thread.join(CLOSING_S)

    def put(self, key: str, shown: Shown) -> None:
        """Show contents under a key, in place of earlier contents that still wait. Returns at once and never raises."""
        with self._turn:
            self._waiting[key] = shown
            self._turn.notify()

    def _work(self) -> None:
        """Send waiting contents until the end. Contents that cannot be sent then are given up."""
        ended = False
        while not ended:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._ended)
                taken, self._waiting, ended = self._waiting, {}, self._ended
            if not taken:
                return  # A client would start a server where none is named.
            try:
                self._send(taken)
                self._complained = False
            except Exception as error:  # whatever the server does, the run goes on
                self._complain(error)
                with self._turn:
                    self._waiting = taken | self._waiting
                    self._turn.wait_for(lambda: self._ended, PAUSE_S)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            why = f"{type(error).__name__}: {first_line(error)}"
            self._note(f"Prefect takes no artifacts now ({why}); the run goes on without")
        self._complained = True

    def _send(self, taken: dict[str, Shown]) -> None:
        """Create or replace artifacts, and remove from ``taken`` the artifacts that arrived."""
        # A client of its own each time: one that a fork or a lost connection broke would stay broken.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": TIMEOUT_S}, sync_client=True) as api,
        ):
            for key, shown in list(taken.items()):
                try:
                    self._replace(api, key, shown)
                except Exception:
                    # It may have arrived, or the server may have lost its data: ask again the next time.
                    self._known.pop(key, None)
                    raise
                del taken[key]

    def _replace(self, api: SyncPrefectClient, key: str, shown: Shown) -> None:
        if key not in self._known:
            mine = ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]), key=ArtifactFilterKey(any_=[key])
            )
            # An earlier try of the flow run has made it.
            self._known |= {found.key or key: found.id for found in api.read_artifacts(artifact_filter=mine)}
        if (known := self._known.get(key)) is not None:
            api.update_artifact(known, ArtifactUpdate(data=shown.data, description=shown.description))
            return
        made = ArtifactCreate(
            type=shown.kind,
            key=key,
            flow_run_id=self._flow_run_id,
            data=shown.data,
            description=shown.description,
        )
        self._known[key] = api.create_artifact(made).id
