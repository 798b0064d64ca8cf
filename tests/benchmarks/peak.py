"""Run a stage like :mod:`stages.execution.runner`, and print the most memory that was resident, in bytes."""

import re
import sys
from pathlib import Path

from stages.execution import runner


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory of a process that was resident until now."""
    # Not getrusage: it also counts what the parent had at the fork.
    (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return 1024 * int(kibibytes)


def main(argv: list[str]) -> int:
    """Run the stage; returns its exit code."""
    code = runner.main(argv)
    print(peak_bytes())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
