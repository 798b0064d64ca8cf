"""One process of one device that serves Requests: ``python -m stages.execution.warm.resident ORDERS REPLIES``.

The arguments are the numbers of two pipes. It reads a line for each Request, is one of its ranks, and replies when the
Request is done. If the Request failed, it ends without a reply; if something of it is left in the process, it says so
and ends. Its supervisor then starts another process, which gives the same bits. Between Requests it waits for a line,
never for other ranks. Standard input is not read: through it the process holds the lock of its device.
"""

import importlib
import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.imports import uncollected, without_torchvision_warnings
from cosmos_rl_core.process_trees import kill, tree
from cosmos_rl_core.processes import become_rank, begin_again, die_with_parent
from stages.execution import runner
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome, failure_of
from stages.execution.warm import LEFT


def main() -> None:
    """Serve until no orders can come."""
    die_with_parent()
    without_torchvision_warnings()
    orders, replies = map(int, sys.argv[1:])
    for pipe in (orders, replies):
        os.set_inheritable(pipe, False)
    leftovers: Any = None
    with open(orders, "rb") as lines:
        for line in lines:
            if leftovers is not None:
                begin_again()
            leftovers = _serve(json.loads(line), leftovers, replies)
            # The reply says how many bytes of weights this process keeps.
            os.write(replies, b"%d\n" % sys.modules["cosmos_rl_core.parallel.kept"].KEPT.num_bytes)


def _serve(order: dict[str, Any], leftovers: Any, replies: int) -> Any:
    """Run one rank of a Request, and return the state before the first one. Ends the process if it cannot go on."""
    request = Path(order["request"])
    try:
        _write_to(order["log"])
        if leftovers is None:
            leftovers = _set_up(Execution.read(request), order["kept_bytes"])
    except Exception as error:
        # Report it like a new process, where this set-up is part of the stage.
        _end(runner.report(error, Outcome(request.parent, order["rank"])))
    try:
        meeting, here = Path(order["meeting"]), order["here"]
        become_rank(order["rank"], order["ranks"], meeting, alone=True, here=here, host=order["host"])
        code = runner.main([str(request)])
        # Forget plugins from outside: the next Request imports them anew, and so their modules' state.
        outside_plugins.find(())
        if code != 0:
            _end(code)
        if found := leftovers.found():
            print(f"this process serves no other stage, because something is left: {'; '.join(found)}", file=sys.stderr)
            os.write(replies, LEFT)
            _end(code)
    except BaseException as error:
        with suppress(OSError):
            traceback.print_exc()
        _end(failure_of(error).exit_code)
    _write_to(os.devnull)
    return leftovers


def _set_up(execution: Execution, kept_bytes: int) -> Any:
    """Bring the process into the state in which it begins every Request, and return the record of that state."""
    # Imported here, so that what goes wrong is in the log of the Request.
    with uncollected():
        torch_runtime = importlib.import_module("stages.execution.torch_runtime")
        leftovers = importlib.import_module("stages.execution.warm.leftovers")
    torch_runtime.set_up(execution)
    leftovers.settle(execution.device)
    importlib.import_module("cosmos_rl_core.parallel.kept").KEPT.limit_bytes = kept_bytes
    return leftovers.Leftovers(lambda: torch_runtime.set_up(execution))


def _write_to(log: str) -> None:
    """Send everything that this process prints to another file."""
    _flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The log may be on a full disk.
        with suppress(OSError):
            stream.flush()


def _end(code: int) -> NoReturn:
    """End without cleaning up, which could wait for other ranks. Processes that this one started are ended first."""
    _flush()
    kill(tree(os.getpid())[1:])
    os._exit(code)


if __name__ == "__main__":
    main()
