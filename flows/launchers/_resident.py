"""Processes that stay between Requests, one for each device, and the Requests that they serve as ranks.

A process serves another Request only under the same settings, and only if all before it ended well on every rank.
It ends when it is idle for long, when its flow is about to wait, and when another run waits for its device.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.process_trees import KILLED, kill, show_stacks, tree
from flows.devices import locks
from flows.devices.devices import ASK_S, VISIBLE, Share
from flows.devices.staying import Processes, Staying
from flows.devices.waiting import Waiting
from flows.launchers._base import Job, Part
from flows.launchers._processes import PROCESSES, environment_here, module
from stages.execution.warm import LEFT

IDLE_S = 600.0
"""Seconds without a Request after which a process ends."""
LOOK_S = 0.5
"""Interval in seconds at which idle processes are looked at."""
POLITE_S = 2 * ASK_S
"""Time in seconds that another run has to take a device that it waits for."""
MEETING_FILE = "meeting"
"""File next to a request at which its ranks join their process group."""
REASONS = 3
"""Number of kept reasons why processes ended, the newest."""
BITS = {"device", "threads", "deterministic"}
"""Settings of an execution that a process cannot change from one Request to the next."""


class Resident:
    """One process, which waits for orders. ``lock`` holds the lock of its device, if there is one."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path, lock: IO[bytes] | None) -> None:
        self.name, self.settings, self.lock = name, settings, lock
        self.since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        self.served = 0
        """Number of Requests that ended well."""
        self.left = False
        """Whether a Request left state in the process, which has to end then."""
        self.kept_bytes = 0
        """Bytes of frozen weights that the process holds after its last Request."""
        self.idle_since_s: float | None = time.monotonic()
        """When it became idle by the monotonic clock; None while it serves."""
        orders, self._orders = os.pipe()
        self.replies, replies = os.pipe()
        serve = [*module(sys.executable, "stages.execution.warm.resident"), str(orders), str(replies)]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*module(sys.executable, PROCESSES), *serve],
                stdin=subprocess.DEVNULL if lock is None else lock,
                stdout=file,
                stderr=file,
                env=settings["environment"] | {VISIBLE: name if lock is not None else ""},
                pass_fds=(orders, replies),
                # Ctrl-C reaches the whole process group, but the launcher ends this process.
                start_new_session=True,
            )
        os.close(orders)
        os.close(replies)
        os.set_blocking(self.replies, False)

    @property
    def runs(self) -> bool:
        """Return whether the process runs."""
        return self.process.poll() is None

    def fits(self, settings: dict[str, Any], fresh: bool) -> bool:
        """Return whether the process may serve a Request with these settings. If ``fresh``, it must be its first."""
        return self.settings == settings and not self.left and not (fresh and self.served)

    def order(self, order: dict[str, Any]) -> bool:
        """Begin a Request. Return False if the process has ended."""
        # It is at work from now on, also if it turns out that it has ended.
        self.idle_since_s = None
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            return False
        return self.runs

    def poll(self) -> int | None:
        """Return None while it serves a Request, 0 if the Request ended well, else the exit code of the process."""
        if self.idle_since_s is None:
            # Before the reply is looked for, so that the last one of an ended process is not missed.
            code, reply = self.process.poll(), b""
            with suppress(BlockingIOError):
                if reply := os.read(self.replies, 64):
                    code, self.left = 0, reply == LEFT
                    self.kept_bytes = 0 if self.left else int(reply)
            if code == 0 and not reply:
                # It ended without a word.
                code = KILLED
            if code != 0:
                return code
            self.served, self.idle_since_s = self.served + 1, time.monotonic()
        return 0

    def close(self) -> None:
        """Release the pipes and the lock of the process, which has been killed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ASK_S)
        for pipe in (self._orders, self.replies):
            os.close(pipe)
        if self.lock is not None:
            self.lock.close()


class Residents:
    """The processes of one flow, by device. They start when a Request needs them."""

    def __init__(self, launch: LaunchConfig) -> None:
        self._launch = launch
        self._at: dict[str, Resident] = {}
        self._reasons: deque[str] = deque(maxlen=REASONS)
        """Why the last processes ended."""
        self._given_up: set[str] = set()
        """Devices of processes that ended because another run waits."""
        self._guard = threading.RLock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def idle(self) -> list[str]:
        """Return the devices of idle processes. End idle processes that cannot serve another Request."""
        with self._guard:
            idle = [one for one in self._at.values() if one.idle_since_s is not None]
            lost = [one for one in idle if one.left or not one.runs]
            self._end([one for one in lost if one.left], "a stage left something in it; its log says what")
            self._end([one for one in lost if not one.left], "it ended while it was idle")
            return [name for name, one in self._at.items() if one.idle_since_s is not None]

    def replies(self) -> list[IO[bytes] | int]:
        """Return the pipes of the processes that serve a Request."""
        with self._guard:
            return [one.replies for one in self._at.values() if one.idle_since_s is None]

    def start(self, job: Job, request: Path, log: Path, share: Share | None) -> "Gang":
        """Let processes on the devices of a share serve a Request as its ranks, in the order of the devices.

        Raises :class:`UnavailableError` if another run has taken a device meanwhile.
        """
        part = job.part or Part(0, job.ranks_here, "")
        shared = {"request": str(request), "log": str(log), "ranks": job.execution.parallelism.world_size}
        shared |= {"here": part.count, "host": part.host}
        shared |= {"meeting": str(request.with_name(MEETING_FILE)), "kept_bytes": self._launch.kept_bytes}
        settings = {
            "environment": environment_here(self._launch, alone=job.part is None),
            "plugins": job.request.plugins,
            "compile": job.execution.parallelism.compile,
            **job.execution.model_dump(include=BITS),
        }
        members: list[Resident] = []
        with self._guard:
            self._watch()
            served_before = False
            try:
                for rank, name in enumerate(self._names(part.count, share), start=part.first):
                    member = self._at.get(name)
                    if (
                        member is None
                        or not member.fits(settings, job.fresh)
                        or not member.order(shared | {"rank": rank})
                    ):
                        member = self._begin(name, settings, log, share)
                        if not member.order(shared | {"rank": rank}):
                            raise UnavailableError(f"a process for {name} ended before its first stage; see {log}")
                    members.append(member)
                    served_before = served_before or member.served > 0
            except BaseException:
                self._end(members, f"{job.request.stage} could not start")
                raise
        return Gang(self, members, served_before, job.request.stage)

    def _names(self, count: int, share: Share | None) -> list[str]:
        """Return the names of the processes for a Request: devices or, without a share, numbers of free processes."""
        if share is not None:
            return list(share.devices[:count])
        busy = {name for name, one in self._at.items() if one.idle_since_s is None}
        free = (name for name in map(str, range(len(busy) + count)) if name not in busy)
        return [name for name, _ in zip(free, range(count), strict=False)]

    def _begin(self, name: str, settings: dict[str, Any], log: Path, share: Share | None) -> Resident:
        """Start a process on a device. Kill the process that it replaces, if there is one."""
        lock: IO[bytes] | None = None
        if (before := self._at.pop(name, None)) is not None:
            # The lock goes from the one to the other.
            lock, before.lock = before.lock, None
            self._note([before], "a new process was needed")
            _kill([before])
        if share is not None and lock is None:
            # A process that was idle may have ended since the share was taken, and its lock with it.
            if name not in share.apart and not share.lock(name, set()):
                raise UnavailableError(f"another run has taken {name}; the next attempt waits for it")
            lock = share.apart.pop(name)
        self._at[name] = Resident(name, settings, log, lock)
        return self._at[name]

    def processes(self) -> Processes:
        """Return the processes that run, and why the last ones ended."""
        with self._guard:
            stay = tuple(
                Staying(device=name, pid=one.process.pid, since=one.since, served=one.served, kept_bytes=one.kept_bytes)
                for name, one in self._at.items()
                if one.runs
            )
            return Processes(stay=stay, ended=tuple(self._reasons))

    def end(self, members: Sequence[Resident], why: str) -> None:
        """Kill processes, whatever they do."""
        with self._guard:
            self._end(members, why)

    def _end(self, members: Iterable[Resident], why: str) -> None:
        ended = [one for one in members if self._at.get(one.name) is one]
        self._note(ended, why)
        _kill(ended)
        for one in ended:
            del self._at[one.name]

    def _note(self, ended: Sequence[Resident], why: str) -> None:
        if ended:
            self._reasons.append(f"{', '.join(one.name for one in ended)}: {why}")

    def give_back(self) -> None:
        """End the processes that are idle, and free their devices."""
        with self._guard:
            idle = [one for one in self._at.values() if one.idle_since_s is not None]
            self._end(idle, "the run waited for devices, slots or people")

    def let_others_go_first(self, waiting: Waiting) -> None:
        """Give another run that waits for a device of this one time to take it."""
        self._look()
        with self._guard:
            given, self._given_up = self._given_up, set()
        for _ in range(round(POLITE_S / ASK_S)):
            if not (wanted := locks.wanted(given)):
                return
            waiting.turn(f"another run waits for {', '.join(wanted)}, and goes first", ASK_S)

    def close(self) -> None:
        """End all processes."""
        self._closed.set()
        with self._guard:
            self._end(list(self._at.values()), "the run ended")

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._keep_looking, name="residents", daemon=True)
            self._watcher.start()

    def _keep_looking(self) -> None:
        while not self._closed.wait(LOOK_S):
            # The file of locks may be away for a moment.
            with suppress(UnavailableError, OSError, psutil.Error):
                self._look()

    def _look(self) -> None:
        """End processes that were idle for long, and idle processes whose device another run waits for."""
        with self._guard:
            now_s, idle = time.monotonic(), [self._at[name] for name in self.idle()]
            long = [one for one in idle if now_s - (one.idle_since_s or now_s) > IDLE_S]
            # One at a time, until nobody waits any more.
            wanted = locks.wanted([one.name for one in idle if one.lock is not None])[:1]
            self._given_up |= set(wanted)
            self._end([one for one in idle if one.name in wanted], "another run waited for the device")
            self._end([one for one in long if one.name not in wanted], f"idle for {IDLE_S:.0f} s")


class Gang:
    """The processes that serve one Request. They stay if all of them end it well, and are killed otherwise."""

    def __init__(self, residents: Residents, members: Sequence[Resident], served_before: bool, stage: str) -> None:
        self._residents, self._members, self._stage = residents, members, stage
        self.served_before = served_before
        """Whether one of them has served another Request before."""
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return None while the Request is served, then 0, or the exit code of the first process that failed."""
        if self._code is None:
            codes = [one.poll() for one in self._members]
            if failed := [code for code in codes if code]:
                self._code = failed[0]
                # The others would wait for it.
                self._residents.end(self._members, f"a rank of {self._stage} ended with exit code {self._code}")
            elif None not in codes:
                self._code = 0
        return self._code

    def show_stacks(self) -> None:
        """Let the processes write their stacks to the log, if they still serve."""
        if self.poll() is None:
            show_stacks([process for one in self._members for process in tree(one.process.pid)])

    def end(self) -> None:
        """Kill the processes if they still serve."""
        if self.poll() is None:
            self._residents.end(self._members, f"{self._stage} was ended")
            self._code = KILLED


def _kill(residents: Sequence[Resident]) -> None:
    kill([process for one in residents for process in tree(one.process.pid)])
    for one in residents:
        # Processes that it started are in its group, even after its end, and may hold the lock of its device. Once it
        # has been waited for, another process may have its id.
        pid, waited_for = one.process.pid, one.process.returncode is not None
        if not (waited_for and psutil.pid_exists(pid)):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    for one in residents:
        one.close()
