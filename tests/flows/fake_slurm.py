"""Slurm's commands as far as the launcher uses them, each job a process of this machine: ``python -m ... COMMAND``.

A node of the partition ``l40s`` is of another kind than those of every other one, and each step of a reward runs on a
node of its own (:mod:`tests.flows.machines`). Nothing waits, and no limit ends a job.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.flows import machines

FOLDER = "TEST_SLURM_FOLDER"
SWITCHES = ("--me", "--noheader", "--parsable", "--quiet", "--overlap")
VALUES = ("--name", "--jobs", "--states", "--format", "--nodes", "--ntasks", "--ntasks-per-node", "--job-name")
VALUES += ("--export", "--kill-on-bad-exit", "--cpu-bind")
COMMANDS = ("sbatch", "squeue", "scancel", "srun", "sacct")


def install(folder: Path) -> dict[str, str]:
    """Write the commands into ``folder``; returns the variables by which a flow finds them."""
    bin_, root = folder / "bin", Path(__file__).parents[2]
    for path in (bin_, folder / "jobs"):
        path.mkdir(parents=True)
    for name in COMMANDS:
        script = bin_ / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {root}/tests/flows/fake_slurm.py {name} "$@"\n')
        script.chmod(0o755)
    path = machines.install(folder)
    return {FOLDER: str(folder), "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": path}


def sbatch(folder: Path, script: str) -> None:
    """Start a job; its number goes to standard output."""
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))
    number = 1 + len(list((folder / "jobs").iterdir()))
    kind = "b" if given.get("partition") == "l40s" else "a"
    with Path(given["output"]).open("ab") as log:
        process = subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | machines.node(kind),
        )
    job = {"name": given["job-name"], "partition": given.get("partition"), "pid": process.pid}
    (folder / "jobs" / str(number)).write_text(json.dumps(job))
    print(number)


def squeue(folder: Path, arguments: argparse.Namespace) -> None:
    """Print numbers of the jobs of a name that run, or the state of one number."""
    jobs = {path.name: json.loads(path.read_text()) for path in (folder / "jobs").iterdir()}
    if arguments.name is not None:
        print("\n".join(n for n, job in jobs.items() if job["name"] == arguments.name and _runs(job["pid"])))
    elif (job := jobs.get(arguments.jobs)) is not None:
        print(f"{'RUNNING' if _runs(job['pid']) else 'CANCELLED'}|None")


def scancel(folder: Path, number: str) -> None:
    """End a job and wait for it."""
    pid = json.loads((folder / "jobs" / number).read_text())["pid"]
    if _runs(pid):
        os.killpg(pid, signal.SIGTERM)
    while _runs(pid):
        time.sleep(0.1)


def srun(folder: Path, name: str, command: list[str]) -> None:
    """Become the step's command, on a node of the job's kind; a reward's on a new one."""
    there = machines.next_node(folder) if name.startswith("reward-") else {}
    os.execvpe(command[0], command, os.environ | there)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(command: str, argv: list[str]) -> None:
    """Be one of the commands."""
    folder = Path(os.environ[FOLDER])
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    for option in (
        "--name",
        "--jobs",
        "--states",
        "--format",
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--job-name",
    ):
        parser.add_argument(option)
    for option in ("--me", "--noheader", "--parsable", "--quiet", "--overlap"):
        parser.add_argument(option, action="store_true")
    for option in ("--export", "--kill-on-bad-exit", "--cpu-bind"):
        parser.add_argument(option)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    if command == "sbatch":
        sbatch(folder, sys.stdin.read())
    elif command == "squeue":
        squeue(folder, arguments)
    elif command == "scancel":
        scancel(folder, arguments.rest[0])
    elif command == "srun":
        srun(folder, arguments.job_name, arguments.rest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
