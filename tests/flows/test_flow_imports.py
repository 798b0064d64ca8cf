"""What a file of a flow imports: Prefect imports it once more to cancel a flow run, or to mark it as crashed."""

import subprocess
import sys
from pathlib import Path

import pytest

TABLES_AND_MEDIA = ("pandas", "pyarrow", "av", "PIL")


def modules_after(statement: str, *names: str) -> str:
    """Return those modules that a new interpreter has after a statement."""
    code = f"{statement}; import sys; print([name for name in {names} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_status_is_imported_without_modules_that_it_does_not_need():
    unneeded = (*TABLES_AND_MEDIA, "torch", "prefect", "httpx", "huggingface_hub.errors")
    # The verdict on a run is imported once there is a run to judge.
    assert modules_after("import flows.cli.looking.status, flows.warning.signs", *unneeded) == "[]\n"


@pytest.mark.processes
def test_a_flow_imports_no_package_that_reads_tables_or_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    assert modules_after("import flows.nft", *TABLES_AND_MEDIA) == "[]\n"
