"""Checks of the nodes of a cluster before their GPUs are reserved: versions, the store, files that a stage reads."""

import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import store
from flows.launchers._processes import PROCESSES, environment_here, module
from flows.launchers.ray._findings import EQUAL, WRITTEN, Findings, Question, installed

LIMIT_S = 120.0
"""Longest wait for a node, in seconds: its store may be tried again for a minute."""
OF_THE_FLOW = ("Python", "cosmos-rl-flows", "ray")
"""Versions that must equal the flow's. Others need only be equal on all nodes of a kind."""


class Checks:
    """Answers of nodes. Each is asked once for the files of a stage."""

    def __init__(self, run_url: str, launch: str) -> None:
        self._run_url, self._launch = run_url, launch
        self._written = ""
        self._asked: dict[tuple[str, tuple[str, ...]], tuple[Any, float]] = {}
        self._found: dict[tuple[str, tuple[str, ...]], Findings] = {}

    def passed(self, nodes: Sequence[dict[str, Any]], stage: str, paths: tuple[str, ...]) -> bool:
        """Return True if a stage can run on all of these nodes of a kind, False while some have not answered.

        Raises :class:`ConfigError` with everything that is wrong, :class:`UnavailableError` if all of it may pass.
        """
        hosts = {(node["NodeID"], paths): node["NodeManagerAddress"] for node in nodes}
        mute = {host: error for key, host in hosts.items() if key not in self._found and (error := self._look(key))}
        found = {host: self._found[key] for key, host in hosts.items() if key in self._found}
        if len(mute) + len(found) < len(hosts):
            return False
        wrong = [*mute.items(), *_differing(found), *_each(found, "wrong")]
        unavailable = [*_each(found, "unavailable")]
        if wrong or unavailable:
            self._found.clear()
            error = ConfigError if wrong else UnavailableError
            raise error(
                f"nodes of the Ray cluster cannot run {stage}: {_by_host(wrong + unavailable)}. Mend them, or choose "
                "others by launch.ray.labels"
            )
        return True

    def _look(self, key: tuple[str, tuple[str, ...]]) -> str:
        """Ask a node, or take its answer if it has come; return why it cannot answer, else ``""``."""
        if key not in self._asked:
            self._asked[key] = self._ask(*key), time.monotonic()
        answer, since_s = self._asked[key]
        if ray.wait([answer], timeout=0)[0]:
            del self._asked[key]
            try:
                self._found[key] = Findings.model_validate_json(ray.get(answer))
            except RayTaskError as error:
                return f"this project does not run there: {str(error).strip().splitlines()[-1]}"
            except RayError:
                # The node is lost, which Ray will notice; else it is asked again.
                return ""
        elif time.monotonic() - since_s > LIMIT_S:
            del self._asked[key]
            return f"no answer for {LIMIT_S:g} s; see the logs of Ray there"
        return ""

    def _ask(self, node: str, paths: tuple[str, ...]) -> Any:
        if not self._written:
            self._written = secrets.token_hex(8)
            store.write(store.join(self._run_url, WRITTEN), self._written.encode())
        question = Question(run_url=self._run_url, written=self._written, paths=paths).model_dump_json()
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(_answer).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        return task.remote(question, self._launch)


def _by_host(found: Sequence[tuple[str, str]]) -> str:
    """Return all messages as one text, in which hosts with equal messages are together."""
    hosts: dict[str, list[str]] = {}
    for host in dict(found):
        every = "; ".join(message for here, message in found if here == host)
        hosts.setdefault(every, []).append(host)
    return "; ".join(f"{', '.join(some)}: {every}" for every, some in hosts.items())


def _each(found: dict[str, Findings], kind: str) -> Iterator[tuple[str, str]]:
    return ((host, message) for host, one in found.items() for message in getattr(one, kind))


def _differing(found: dict[str, Findings]) -> Iterator[tuple[str, str]]:
    """Yield hosts and versions that differ from the flow's or, if the flow's do not matter, from most nodes'."""
    flow = installed()
    for name in ("Python", *EQUAL):
        ours = flow.get(name, "none")
        versions = {host: one.versions.get(name, "none") for host, one in found.items()}
        counts = Counter(versions.values())
        most = max(counts, key=lambda version: (counts[version], version == ours), default=ours)
        expected = ours if name in OF_THE_FLOW else most
        yield from (
            (host, f"{name} {version}, expected {expected}")
            for host, version in versions.items()
            if version != expected
        )


def paths_in(settings: Any) -> tuple[str, ...]:
    """Return the files and folders that settings name: absolute paths that exist where the flow runs."""
    return tuple(sorted({text for text in _texts(settings) if text.startswith("/") and Path(text).exists()}))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _answer(question: str, launch: str) -> str:
    """Return the answer of a node, as a process in the environment of a stage finds it. Ray calls it there."""
    command = [*module(sys.executable, PROCESSES), *module(sys.executable, "flows.launchers.ray._findings")]
    environment = environment_here(LaunchConfig.model_validate_json(launch))
    ended = subprocess.run(command, input=question, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        raise RuntimeError((ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1])
    return ended.stdout
