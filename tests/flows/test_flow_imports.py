"""What a file of a flow imports: Prefect imports it once more to cancel a flow run, or to mark it as crashed."""

import subprocess
import sys
from pathlib import Path

import pytest

TABLES_AND_MEDIA = ("pandas", "pyarrow", "av", "PIL")


def test_a_flow_is_imported_without_what_reads_tables_and_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    code = f"import sys, flows.nft; print([name for name in {TABLES_AND_MEDIA} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
