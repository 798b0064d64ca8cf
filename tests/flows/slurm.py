"""A real Slurm on this machine: a controller, two nodes and their munge, all on 127.0.0.1 and gone at the end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")
MISSING = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None]
CANNOT = (
    f"not installed: {', '.join(MISSING)}; apt-get install slurmctld slurmd slurm-client munge"
    if MISSING
    else "Slurm's daemons run as root here"
    if os.geteuid() != 0
    else None
)
needs_slurm = pytest.mark.skipif(CANNOT is not None, reason=CANNOT or "")
STARTUP_S = 60.0

CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is requeued begins when the credentials of its first time have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
CommunicationParameters={listens}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=2
ReturnToService=2
MpiDefault=none
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=n1 NodeHostname=localhost NodeAddr={addresses[0]} Port={ports[1]} CPUs=16 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr={addresses[1]} Port={ports[2]} CPUs=16 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=n2 MaxTime=INFINITE State=UP
"""


def steps(job: str) -> list[str]:
    """Names of the steps of a job that run, without those that every job has."""
    said = _call("squeue", "--steps", "--jobs", job, "--noheader", "--format", "%j")
    return [name for name in said.split() if name not in ("extern", "batch", "interactive")]


@contextlib.contextmanager
def allocation(nodes: int) -> Iterator[dict[str, str]]:
    """Have a job; yields the variables that it sets on its first node, and that lead ``srun`` to it."""
    asked = ["salloc", "--no-shell", f"--nodes={nodes}", "--ntasks-per-node=1", "--job-name=flow"]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stderr
    job = said.rpartition("job allocation ")[2].strip()
    try:
        yield {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NODEID": "0"}
    finally:
        cancel(job)


def cancel(job: str) -> None:
    """End a job, and wait until it is gone."""
    _call("scancel", job)
    deadline_s = time.monotonic() + STARTUP_S
    while _call("squeue", "--noheader", "--me", "--format", "%A").split() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def running(folder: Path, *, own_network: bool = False) -> Iterator[Path]:
    """Yields the path of ``slurm.conf`` while the cluster runs. In a network of its own nodes have two addresses."""
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    addresses = ("127.0.0.11", "127.0.0.12") if own_network else ("127.0.0.1", "127.0.0.1")
    listens = "EnableIPv4" if own_network else "NoInAddrAny,NoCtldInAddrAny"
    values = {"folder": folder, "ports": _free_ports(3), "addresses": addresses, "listens": listens}
    conf.write_text(CONF.format_map(values), encoding="utf-8")
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n", encoding="utf-8")
    munge = ["--force", f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/munged.pid"]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
    environment = os.environ | {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", *munge],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            with (folder / f"{command[0]}.out").open("ab") as out:
                daemons.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
                )
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: _idle_nodes(environment) == 2, folder)
        yield conf
    finally:
        _end(daemons, environment)


def _idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--partition", "main", "--format", "%T"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False).stdout.count("idle")


def _wait(happened: Callable[[], bool], folder: Path) -> None:
    deadline_s = time.monotonic() + STARTUP_S
    while not happened():
        if time.monotonic() > deadline_s:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.[lo][ou][gt]"))
            raise TimeoutError(f"Slurm did not start within {STARTUP_S:g} s:\n{logs}")
        time.sleep(0.1)


def _end(daemons: "list[subprocess.Popen[bytes]]", environment: dict[str, str]) -> None:
    """The jobs first; then each daemon, by its number."""
    subprocess.run(["scancel", "--me"], env=environment, check=False, capture_output=True)
    steps = [child for daemon in daemons for child in _children(daemon.pid)]
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for process in steps:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_until_all_are_known:
        probes = [open_until_all_are_known.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
