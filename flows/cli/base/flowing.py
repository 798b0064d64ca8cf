"""Commands that run a Prefect flow in their own process."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module

from cosmos_rl_core.errors import StageError
from flows.cli.base.printing import notes_on_stderr, say
from flows.running.server import prefect_server


@contextmanager
def flowing(tags: Iterable[str], again: str, *, as_json: bool) -> Iterator[None]:
    """Give a server to the flow that the block runs, and tags to its flow run. ``again`` says how to continue it.

    Raises :class:`StageError` of the kind ``busy`` if the flow run is suspended in Prefect.
    """
    with notes_on_stderr(as_json), prefect_server():
        # Prefect reads its settings when it is imported.
        prefect = import_module("prefect")
        try:
            with prefect.tags(*tags):
                yield
        except prefect.exceptions.Pause as suspended:
            raise StageError.of("busy", f"suspended in Prefect; {again}") from suspended
        except KeyboardInterrupt:
            say(f"stopped; {again}", err=True)
            raise
