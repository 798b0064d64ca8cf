"""Pack the wheels that the lane needs and a CUDA image lacks: ``make gpu-bundle``; and install them there.

They are wheels of the lock, for the Python of the image, in ``outputs/gpu/wheels``. ``python -m tests.gpu --wheels``
installs them into a folder of their own. Imports nothing but the standard library.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGE, LOCK = Path(__file__).with_name("image.txt"), ROOT / "deployments" / "requirements.lock"
FOLDER = ROOT / "outputs" / "gpu" / "wheels"
MOST_MIB = 60
NEEDED = (
    "accelerate", "av", "diffusers", "fsspec", "ftfy", "httpx", "huggingface-hub", "humanize", "numpy", "pandas",
    "peft", "pillow", "psutil", "pyarrow", "pydantic", "pytest", "rich", "safetensors", "sentencepiece", "torch",
    "transformers",
)  # fmt: skip
"""What the lane imports, by the names of the lock: no Prefect, no S3, no text recognition."""
GLIBC = ("2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
"""Versions of glibc whose wheels an image takes, the newest of which is older than its own."""
SHOWN = 5


def name_of(text: str) -> str:
    """Return a package's name as the lock spells it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s=<>~!;@\[]", text.strip(), maxsplit=1)[0]).lower()


def image_of(text: str) -> set[str]:
    """Return the names of the packages that an image has, from the output of ``pip list --format=freeze``."""
    return {name_of(line) for line in text.splitlines() if line.strip() and not line.startswith("#")}


def locked(text: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the versions of a lock, and the packages that need each one, by name."""
    versions: dict[str, str] = {}
    needed_by: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if (pin := re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;\\]+)", line)) is not None:
            name = name_of(pin[1])
            versions[name], needed_by[name] = pin[2], set()
        elif (via := re.match(r"    # (?:via|  )\s*(.*)", line)) is not None and via[1]:
            needed_by[name].add(name_of(via[1]))
    return versions, needed_by


def needed(names: Iterable[str], image: set[str], needed_by: dict[str, set[str]]) -> set[str]:
    """Return the packages to be packed: the named ones and what these need, without what the image has.

    What only a package of the image needs is in the image.
    """
    found: set[str] = set()
    new = {*names} - image
    while new:
        found |= new
        new = {name for name, by in needed_by.items() if by & found} - found - image
    return found


def pack(folder: Path, image: set[str], python: str) -> list[Path]:
    """Download the wheels into an empty folder and return them, the largest first."""
    versions, needed_by = locked(LOCK.read_text(encoding="utf-8"))
    if unknown := sorted({*NEEDED} - versions.keys()):
        raise SystemExit(f"{LOCK} has no {', '.join(unknown)}, which the lane imports")
    pins = [f"{name}=={versions[name]}" for name in sorted(needed(NEEDED, image, needed_by))]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in GLIBC]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    fetch += [f"--python-version={python}", "--implementation=cp", *platforms, f"--dest={folder}", *pins]
    subprocess.run(fetch, cwd=folder, check=True)
    return sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)


def refused(wheels: list[Path], most_mib: float) -> str | None:
    """Return why the wheels, the largest first, are too large together; None if they are not."""
    if (size := mib(wheels)) <= most_mib:
        return None
    largest = ", ".join(f"{wheel.name} ({mib([wheel]):.1f} MiB)" for wheel in wheels[:SHOWN])
    return (
        f"the bundle has {size:.1f} MiB, at most {most_mib:g}; its largest wheels are {largest}. Name what the image "
        "has already: make gpu-bundle IMAGE=FILE, with the output of `python3 -m pip list --format=freeze` there"
    )


def mib(wheels: Iterable[Path]) -> float:
    """Return the size of files together."""
    return sum(wheel.stat().st_size for wheel in wheels) / 2**20


def installed(wheels: Path) -> Path:
    """Install the wheels of a folder into one of their own, and return it. What is found first is what it has.

    No virtual environment: one that is made by the Python of another has none of the other's packages.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"{wheels} has no wheels; make them by `make gpu-bundle`")
    target = Path(tempfile.gettempdir()) / "cosmos-rl-flows-wheels"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*pip, f"--target={target}", *map(str, found)], check=True)
    return target


def main(argv: list[str]) -> int:
    """Pack, say what was packed, and refuse too much."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.wheels", description=__doc__)
    parser.add_argument("--image", type=Path, default=IMAGE, help="packages that the image has, one a line")
    parser.add_argument("--python", default="3.12", help="version of the image's Python")
    parser.add_argument("--most-mib", type=float, default=MOST_MIB)
    parser.add_argument("--output", type=Path, default=FOLDER, help="a folder, which is emptied first")
    settings = parser.parse_args(argv)
    image = image_of(settings.image.read_text(encoding="utf-8"))
    wheels = pack(settings.output.resolve(), image, settings.python)
    for wheel in wheels:
        print(f"{mib([wheel]):6.2f} MiB  {wheel.name}")
    print(f"{mib(wheels):6.2f} MiB in {len(wheels)} wheels: {settings.output}")
    if (why := refused(wheels, settings.most_mib)) is not None:
        shutil.rmtree(settings.output)
        print(why, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
