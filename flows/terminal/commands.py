"""Commands that people paste: they work in any folder of the machine that printed them."""

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cosmos_rl_core.errors import PROGRAM, advised
from cosmos_rl_core.shipped import PREFIX
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal

if TYPE_CHECKING:
    from flows.planning.base import AnyRun
    from flows.planning.plan import Settings

COMMAND = "command"
"""Name and kind of the file of a run with the command that began or last continued it."""
_ON_TRIP = "early_warning.on_trip"


def about(store_url: str, name: str, *words: str) -> str:
    """Return a command with the address of its store: ``cosmos-flows approve RUN --store /where/it/is``."""
    return advised(name, *words, store=store.absolute(store_url))


def to_run(settings: "Settings", run_id: str, iterations: int | None = None) -> str:
    """Return the command that begins or continues a run, with its files and its store by their absolute places.

    Other paths, in recipes and settings, begin where the command was given, so it changes into that folder.
    """
    options = ["--store", store.absolute(settings.store), "--run-id", run_id]
    options += ["--iterations", str(iterations)] if iterations else []
    options += [word for override in settings.overrides for word in ("--set", override)]
    options += ["--cluster", _absolute(settings.cluster)] if settings.cluster else []
    options += ["--allow-numerics-change"] * settings.allow_numerics_change
    options += ["--remake"] * settings.remake
    options += ["--accept-scorer"] * settings.accept_scorer
    if (fork := settings.fork) is not None:
        named = ["fork", fork.run, "--at", str(fork.at)]
        named += ["--rewards", _absolute(fork.rewards)] if fork.rewards else []
        command = shlex.join([PROGRAM, *named, *options])
    else:
        command = shlex.join([PROGRAM, "run", _absolute(settings.recipe), *options])
    if settings.recipe.startswith(PREFIX) and not any("/" in override for override in settings.overrides):
        return command
    return f"cd {shlex.quote(os.getcwd())} && {command}"


def keep(run: "AnyRun", settings: "Settings") -> None:
    """Write down the command that continues the run."""
    command = to_run(settings, run.plan.run_id, settings.iterations)
    store.write(_url(run), seal(COMMAND, {"command": command}))


def kept(run: "AnyRun") -> str:
    """Return the command that began or last continued the run; "" if it is not known."""
    data = store.read_if_exists(_url(run))
    return "" if data is None else str(unseal(data, COMMAND, _url(run))["command"])


def to_go_on(run: "AnyRun", decided: str = "") -> str:
    """Return the command that goes on with the run after the last decision on a warning; "" if none is known.

    A suspended run is approved first. For a stopped run, limits that trip are only marked: they would stop it again.
    """
    command = kept(run)
    if command and decided == "suspended":
        return f"{about(run.store_url, 'approve', run.plan.run_id)} && {command}"
    if command and decided == "stopped":
        return f"{re.sub(rf' --set .?{_ON_TRIP}=[^ ]*', '', command)} --set {_ON_TRIP}=mark"
    return command


def to_train_on(run: "AnyRun", iterations: int) -> str:
    """Return the command that takes a finished run to more iterations; "" if none is known."""
    command = re.sub(r" --iterations \d+", "", kept(run))
    return f"{command} --iterations {iterations}" if command else ""


def _absolute(path: str) -> str:
    return path if path.startswith(PREFIX) or "://" in path else str(Path(path).expanduser().resolve())


def _url(run: "AnyRun") -> str:
    return store.join(run.url, f"{COMMAND}.json")
