"""A real PostgreSQL on this machine, on 127.0.0.1 and gone at the end."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Debian keeps the server out of PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
POSTGRES, INITDB, PSQL = (shutil.which(name, path=_PATH) for name in ("postgres", "initdb", "psql"))
needs_postgres = pytest.mark.skipif(
    None in (POSTGRES, INITDB, PSQL), reason="PostgreSQL is not installed: apt-get install postgresql"
)
USER = "postgres" if os.geteuid() == 0 else None
"""It refuses to run as root; Debian's package makes this user."""
STARTUP_S = 60.0


class Postgres:
    """One server with a database and a password."""

    def __init__(self, port: int, password: str) -> None:
        self.password = password
        self.port = port

    @property
    def url(self) -> str:
        """As Prefect takes it."""
        return f"postgresql+asyncpg://postgres:{self.password}@127.0.0.1:{self.port}/postgres"

    def ask(self, query: str) -> str:
        """What ``psql`` answers."""
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--username", "postgres", "--tuples-only"]
        environment = os.environ | {"PGPASSWORD": self.password}
        asked = [str(PSQL), *options, "--no-align", "--command", query]
        return subprocess.run(asked, env=environment, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def running() -> Iterator[Postgres]:
    """Yields it while it runs, with nothing in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        postgres = Postgres(probe.getsockname()[1], secrets.token_hex(12))
    # Not in pytest's own folder, which no other user may enter.
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        folder = Path(name)
        (folder / "password").write_text(postgres.password, encoding="utf-8")
        for path in (folder, folder / "password"):
            shutil.chown(path, USER or os.geteuid())
        made = [str(INITDB), "--pgdata", str(folder / "data"), "--auth", "scram-sha-256", "--username", "postgres"]
        made += ["--pwfile", str(folder / "password"), "--no-sync"]
        subprocess.run(made, user=USER, cwd=folder, check=True, capture_output=True)
        options = ["-D", str(folder / "data"), "-h", "127.0.0.1", "-p", str(postgres.port), "-k", str(folder)]
        with (folder / "log.txt").open("wb") as log:
            server = subprocess.Popen([str(POSTGRES), *options, "-F"], user=USER, cwd=folder, stdout=log, stderr=log)
        try:
            _wait_for(postgres)
            yield postgres
        finally:
            server.terminate()
            server.wait(30)


def _wait_for(postgres: Postgres) -> None:
    deadline_s = time.monotonic() + STARTUP_S
    while True:
        try:
            postgres.ask("select 1")
            return
        except subprocess.CalledProcessError as error:
            if time.monotonic() > deadline_s:
                raise TimeoutError(error.stderr) from error
            time.sleep(0.1)
