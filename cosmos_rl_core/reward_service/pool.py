"""Processes that do one kind of work: started, watched, restarted; a task that kills one is tried again alone, once."""

import asyncio
import json
import logging
import os
import signal
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_rl_core.process_trees import kill_tree
from cosmos_rl_core.processes import PARENT
from cosmos_rl_core.rewards._base.answers import brief

LOAD_TIMEOUT_S = 1800.0
"""Seconds that a process may take to load its weights."""
BACK_OFF_S = (0.1, 60.0)
"""First and longest pause before a process that ended is started again."""
LOAD_ATTEMPTS = 3
"""Number of starts that must fail in a row before waiting tasks are given up."""
UNAVAILABLE_TRIES, UNAVAILABLE_S = 6, 1.0
"""Number of tries of a task whose scorer says that it cannot work now, and the first pause, which then doubles."""
MAX_ANSWER_BYTES = 2**26
_TAIL_BYTES = 4000
log = logging.getLogger(__name__)


class ScorerError(Exception):
    """Work that cannot be done. The message says why."""


class _EndedError(Exception):
    """A process ended, or answered nonsense."""


@dataclass(frozen=True)
class Start:
    """Command, surroundings and settings of a process of a pool."""

    command: Sequence[str]
    environment: Mapping[str, str]
    setup: Mapping[str, Any]
    log: Path
    """File for what the process prints."""


@dataclass(eq=False)
class Task:
    """A piece of work, and the answer to come."""

    message: Mapping[str, Any]
    kind: str
    """Tasks of one kind can be done in one call."""
    size: int
    answer: "asyncio.Future[dict[str, Any]]" = field(repr=False)
    deaths: int = 0
    """Number of processes that ended while they did this task."""
    tries: int = 0
    """Number of times that the task could not be done for a reason that may pass."""


class Process:
    """One process. It reads a line of JSON for each call and answers with one."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._child: asyncio.subprocess.Process | None = None

    async def load(self) -> dict[str, Any]:
        """Start the process, and return the ``version`` and ``batching`` that it reports once it is ready.

        Raises :class:`ScorerError` if it cannot work.
        """
        environment = dict(self._start.environment) | {PARENT: str(os.getpid())}
        pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        try:
            with self._start.log.open("wb") as printed:
                self._child = await asyncio.create_subprocess_exec(
                    *self._start.command,
                    env=environment,
                    stderr=printed,
                    limit=MAX_ANSWER_BYTES,
                    start_new_session=True,
                    **pipes,
                )
        except OSError as error:
            raise ScorerError(f"{self._start.command[0]} cannot be started: {error}") from error
        try:
            told = await asyncio.wait_for(self.ask(self._start.setup), LOAD_TIMEOUT_S)
        except TimeoutError as error:
            raise ScorerError(
                f"its process was not ready within {LOAD_TIMEOUT_S:g} s; see {self._start.log.name}"
            ) from error
        except _EndedError as error:
            raise ScorerError(f"its process {error} while it loaded") from error
        if not isinstance(told, dict) or "ready" not in told:
            raise ScorerError(told.get("failed", brief(told)) if isinstance(told, dict) else brief(told))
        return told["ready"]

    async def ask(self, message: Mapping[str, Any]) -> Any:
        """Send a message and return the answer. Raises if the process ends or answers nonsense."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(message).encode() + b"\n")
            await child.stdin.drain()
            line = await child.stdout.readline()
        except OSError:
            line = b""
        except ValueError as error:
            raise _EndedError(f"answered with more than {MAX_ANSWER_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            raise _EndedError(await self._end())
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _EndedError(f"answered no JSON: {brief(line[:200])}") from error

    async def wait(self) -> None:
        """Return when the process has ended."""
        assert self._child is not None
        await self._child.wait()

    async def kill(self) -> None:
        """End the process and everything that it started."""
        if self._child is not None and self._child.returncode is None:
            await asyncio.to_thread(kill_tree, self._child.pid)
        if self._child is not None:
            await self._child.wait()

    async def _end(self) -> str:
        """Wait for the end of the process; return how it ended, with the last line that it printed."""
        assert self._child is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), 10)
        code = self._child.returncode
        if code is None:
            how = "closed its output"
        else:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}{self._printed()}"

    def _printed(self) -> str:
        with suppress(OSError):
            text = self._start.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
            return f"; it printed: {brief(text.splitlines()[-1])} ({self._start.log})" if text else ""
        return ""


class WorkerPool:
    """A queue of tasks, and the processes that do them."""

    def __init__(self, label: str, starts: Sequence[Start], timeout_s: float, together: int = 1) -> None:
        self.label, self._starts, self._timeout_s, self._together = label, starts, timeout_s, together
        self.ready = 0
        """Number of processes that are ready."""
        self.version = ""
        """Version of the scorer, which a process reports when it is ready; "" before."""
        self.batching = ""
        """How samples are batched, which a process reports when it is ready; "" before."""
        self.fault = ""
        """Why the last process ended or did not start; "" while there is no fault."""
        self.deaths = 0
        self.broken = False
        """True if no process is ready and starting them failed several times."""
        self._queue: deque[Task] = deque()
        self._running: set[Task] = set()
        self._arrived = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._not_loaded: Counter[int] = Counter()
        """Number of starts in a row that failed, of each process."""

    @property
    def waiting(self) -> int:
        """Return the number of tasks that wait."""
        return len(self._queue)

    def start(self) -> None:
        """Start the processes."""
        self._workers = [asyncio.create_task(self._serve(i, start)) for i, start in enumerate(self._starts)]

    async def stop(self, drain_s: float) -> None:
        """End the processes. Running tasks may finish within ``drain_s`` seconds; waiting tasks are dropped."""
        self._queue.clear()
        if running := [task.answer for task in self._running]:
            await asyncio.wait(running, timeout=drain_s)
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def do(self, message: Mapping[str, Any], kind: str, size: int) -> dict[str, Any]:
        """Wait for the answer to a message. Raises :class:`ScorerError` if there is none."""
        if self.broken:
            raise ScorerError(self.fault)
        task = Task(message, kind, size, asyncio.get_running_loop().create_future())
        self._put(task)
        return await task.answer

    def _put(self, task: Task) -> None:
        self._queue.append(task)
        self._arrived.set()

    async def _serve(self, i: int, start: Start) -> None:
        """Keep one process at work."""
        in_vain = 0
        while True:
            process = Process(start)
            try:
                loaded = await self._load(process)
                worked = loaded and await self._work(process)
            finally:
                await process.kill()
            self._not_loaded[i] = 0 if loaded else self._not_loaded[i] + 1
            # Processes that a request ended do not count: such requests are given up one by one while others wait.
            # Nothing is given up while another process may still load.
            if all(self._not_loaded[each] >= LOAD_ATTEMPTS for each in range(len(self._starts))):
                self._give_up()
            in_vain = 0 if worked else in_vain + 1
            first_s, longest_s = BACK_OFF_S
            await asyncio.sleep(min(first_s * 2**in_vain, longest_s))

    async def _load(self, process: Process) -> bool:
        try:
            told = await process.load()
            version, batching = told["version"], told["batching"]
        except ScorerError as error:
            self.fault = f"{self.label} does not load: {error}"
            log.error("%s", self.fault)
            return False
        if self.version and version != self.version:
            self.fault = f"{self.label} is now {version}, was {self.version}; start the service again"
            log.error("%s", self.fault)
            return False
        self.version, self.batching, self.fault, self.broken = version, batching, "", False
        log.info("%s is ready: %s", self.label, version)
        return True

    def _give_up(self) -> None:
        self.broken = True
        while self._queue:
            _fail(self._queue.popleft(), self.fault)

    async def _work(self, process: Process) -> bool:
        """Work until the process ends. Return whether it had any work."""
        worked = False
        self.ready += 1
        try:
            while tasks := await self._next(process):
                worked = True
                self._running.update(tasks)
                try:
                    if not await self._ask(process, tasks):
                        break
                finally:
                    self._running.difference_update(tasks)
        finally:
            self.ready -= 1
        return worked

    async def _next(self, process: Process) -> list[Task]:
        """Wait for tasks, and return the tasks for the next call; none if the process ends first."""
        ended = asyncio.create_task(process.wait())
        await asyncio.sleep(0)
        try:
            # A process that has ended gets no work, which would count against its requests.
            while ended.done() or not (found := self._batch()):
                if ended.done():
                    self.fault = f"{self.label} ended without work"
                    log.error("%s", self.fault)
                    return []
                self._arrived.clear()
                arrived = asyncio.create_task(self._arrived.wait())
                try:
                    await asyncio.wait((arrived, ended), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    arrived.cancel()
            return found
        finally:
            ended.cancel()

    def _batch(self) -> list[Task]:
        """Take the first task and, if tasks are done together, others of its kind during which no process ended."""
        if not self._queue:
            return []
        found = [self._queue.popleft()]
        first, size = found[0], found[0].size
        if first.deaths:
            return found
        for task in list(self._queue) if self._together > 1 else []:
            if task.kind == first.kind and not task.deaths and size + task.size <= self._together:
                self._queue.remove(task)
                found.append(task)
                size += task.size
        return found

    async def _ask(self, process: Process, tasks: list[Task]) -> bool:
        """Give tasks to the process, and return whether it answered. Each task then has an answer, or waits again."""
        message = {"requests": [task.message for task in tasks]}
        try:
            answers = await asyncio.wait_for(process.ask(message), self._timeout_s)
            if not isinstance(answers, list) or not [isinstance(a, dict) for a in answers] == [True] * len(tasks):
                raise _EndedError(f"answered {brief(answers)}")
        except TimeoutError:
            self._ended(tasks, f"did not answer within {self._timeout_s:g} s")
            return False
        except _EndedError as error:
            self._ended(tasks, str(error))
            return False
        for task, answer in zip(tasks, answers, strict=True):
            if "unavailable" in answer:
                self._later(task, str(answer["unavailable"]))
            elif not task.answer.done():
                task.answer.set_result(answer)
        return True

    def _ended(self, tasks: list[Task], how: str) -> None:
        """Put tasks that a process did not survive into the queue again, each alone, or give them up."""
        self.deaths += 1
        self.fault = f"{self.label} {how}"
        log.error("%s, at work on %d requests", self.fault, len(tasks))
        for task in tasks:
            task.deaths += 1
            if task.deaths > 1:
                why = "it was the second process that this request ended, and had no other request"
                _fail(task, f"{self.fault}; {why}")
            else:
                self._put(task)

    def _later(self, task: Task, why: str) -> None:
        task.tries += 1
        if task.tries >= UNAVAILABLE_TRIES:
            _fail(task, f"{self.label}: {why}, in {task.tries} tries")
            return
        pause_s = UNAVAILABLE_S * 2 ** (task.tries - 1)
        asyncio.get_running_loop().call_later(pause_s, self._put, task)


def _fail(task: Task, why: str) -> None:
    if not task.answer.done():
        task.answer.set_exception(ScorerError(why))
