"""Virtual environments for tests: the libraries of this one, and wheels of their own."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("flows", "stages", "cosmos_rl_core", "configs", "deployments", "pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this project in an empty folder, from a copy of the sources, to which setuptools adds."""
    for name in BUILT_FROM:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
        else:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "dist", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True)
    (built,) = (folder / "dist").iterdir()
    return built


def make_environment(folder: Path, wheel: Path) -> tuple[Path, Path]:
    """Make a virtual environment with a wheel in it. Return its ``bin`` folder and its ``site-packages``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # What a requirement of the wheel would bring in.
    here = sysconfig.get_path("purelib")
    (packages / "libraries.pth").write_text(f"import site; site.addsitedir({here!r})", encoding="utf-8")
    install = ["install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", folder / "bin" / "python", *install], check=True)
    return folder / "bin", packages
