"""Does parts of the lane: a line of JSON on standard input orders one, and its rows go to a pipe as lines of JSON."""

import importlib
import json
import os
import sys
import traceback
from typing import Any

from cosmos_rl_core.processes import die_with_parent
from tests.gpu.task import Task


def main(argv: list[str]) -> int:
    """Serve until no orders can come."""
    die_with_parent()
    replies = int(argv[0])
    os.set_inheritable(replies, False)

    def say(**said: Any) -> None:
        os.write(replies, json.dumps(said).encode() + b"\n")

    for line in sys.stdin:
        order = json.loads(line)
        module, _, name = order["work"].rpartition(".")
        print(f"\n{order['work']} {order['options']}", flush=True)
        error = ""
        try:
            work = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
            for row in work(Task(tiny=order["tiny"], options=tuple(order["options"]), known=order["known"])):
                say(row=row)
        except Exception:
            error = traceback.format_exc()
            print(error, file=sys.stderr, flush=True)
        say(error=error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
