"""What the command line imports: no command before it runs, and nothing that takes seconds at its start."""

import subprocess
import sys

import pytest

from tests.flows.cli.test_app import LEAVES, ROOT


def imported(*names: str) -> set[str]:
    """Return everything that a new process has imported after these modules."""
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ended.stdout.split())


LITTLE = {"numpy", "httpx", "fsspec", "flows.planning", "flows.cli.looking.status"}


@pytest.mark.parametrize("words", ["--help", "data --help", "reward-service --help", "--version"])
def test_the_help_imports_no_command(words):
    """Help is printed by the process that tells what it has imported."""
    code = (
        f"import sys; from flows.cli.app import app; app({words.split()}, standalone_mode=False); print(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(ended.stdout.splitlines()[-1].split()) & LITTLE


def test_completion_imports_little():
    assert not imported("flows.cli.app") & {*LITTLE, "pydantic", "rich.markdown"}


def test_no_command_imports_slow_modules_at_its_start():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "flows/cli").glob("*/*.py")]
    assert len(modules) > len(LEAVES)
    heavy = {"torch", "prefect", "pandas", "pyarrow", "matplotlib", "fastapi", "transformers", "huggingface_hub.hf_api"}
    assert not imported(*modules) & heavy


def test_status_imports_neither_torch_nor_slow_modules():
    """pandas and the client of the hub took half of its time."""
    plugins = ("cosmos_rl_core.algorithms.nft", "cosmos_rl_core.algorithms.ddrl")
    found = imported("flows.cli.looking.status", *plugins)
    assert not found & {"torch", "pandas", "pyarrow", "huggingface_hub.hf_api", "prefect"}
