"""Nodes that are unlike, on this machine: a stage finds another CPU, and computes with other instructions.

``sitecustomize`` in a folder of ``PYTHONPATH`` has ``/proc/cpuinfo`` name the CPU that ``TEST_NODE_CPU`` gives.
PyTorch itself obeys ``ATEN_CPU_CAPABILITY``, so that results of the two kinds of node do differ in their last bits.
"""

from pathlib import Path

CPU = "TEST_NODE_CPU"

SITE = f"""
import io, os

if (cpu := os.environ.get({CPU!r})) is not None:
    def open_here(file, *args, real=io.open, **kwargs):
        if str(file) == "/proc/cpuinfo":
            return io.StringIO(f"processor : 0\\nmodel name : {{cpu}}\\n")
        return real(file, *args, **kwargs)

    io.open = open_here
"""

COUNT = "nodes-of-light-stages"


def install(folder: Path) -> str:
    """Write what makes nodes unlike into ``folder``; returns the ``PYTHONPATH`` of the processes on them."""
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    return f"{folder}:{Path(__file__).parents[2]}"


def node(kind: str) -> dict[str, str]:
    """Return the environment of a node: "a" has all instructions of this machine, "b" the plain ones."""
    return {CPU: f"CPU of node {kind}"} | ({"ATEN_CPU_CAPABILITY": "default"} if kind == "b" else {})


def next_node(folder: Path) -> dict[str, str]:
    """Return the environment of a node that nothing has run on before."""
    with (folder / COUNT).open("a+", encoding="utf-8") as file:
        file.write("another\n")
        file.seek(0)
        return node(f"light-{len(file.readlines())}")
