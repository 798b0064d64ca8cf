"""A fork server for single-process CPU stages: ``python -m stages.warm``.

Imports everything once, then forks a runner for each request. Speaks JSON lines. In: ``{"argv": [...], "log": path}``.
Out: ``{"pid": n}`` at once, ``{"pid": n, "returncode": c}`` at the end.
The server itself computes nothing: it has no thread pool and no CUDA context that a fork could break.
"""

import json
import os
import selectors
import sys
import traceback
from typing import Any, TextIO

import diffusers
import onnxruntime
import pandas
import peft
import pyarrow.parquet
import rapidocr
import torch
import transformers

from cosmos_rl_core.processes import die_with_parent
from stages import embed, encode, evaluate, export, finetune, policy, report, reward, rollout, runner, update, validate

PRELOADED = (
    diffusers,
    onnxruntime,
    pandas,
    peft,
    pyarrow.parquet,
    rapidocr,
    torch,
    transformers,
    embed,
    encode,
    evaluate,
    export,
    finetune,
    policy,
    report,
    reward,
    rollout,
    update,
    validate,
)
"""What every fork already has."""

REAP_INTERVAL_S = 0.02


def main() -> None:
    """Serve until standard input closes."""
    die_with_parent()
    replies = sys.stdout
    # Unbuffered, so that what select sees is all there is.
    requests = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    _reply(replies, {"ready": os.getpid()})
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    children: set[int] = set()
    while True:
        if selector.select(REAP_INTERVAL_S if children else None):
            line = requests.readline()
            if not line:
                return
            children.add(_fork(json.loads(line), replies))
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.remove(pid)
                _reply(replies, {"pid": pid, "returncode": os.waitstatus_to_exitcode(status)})


def _fork(order: dict[str, Any], replies: TextIO) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run(order)
    _reply(replies, {"pid": pid})
    return pid


def _run(order: dict[str, Any]) -> None:
    """Be the stage: never returns, whatever happens."""
    code = 70
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = runner.main(order["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the server's own cleanup must not run in a fork.
        os._exit(code)


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
