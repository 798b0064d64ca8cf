"""README and the pages of docs/, and the files that they show."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_EXAMPLE = re.compile(r"^```(?:python|toml)\n# (\S+\.(?:py|toml))\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples(*pages: str) -> dict[str, str]:
    """The files that pages of docs/extend show in full, by name: blocks whose first line is a comment with the name."""
    texts = [(ROOT / "docs" / "extend" / page).read_text(encoding="utf-8") for page in pages]
    return {name: code for text in texts for name, code in _EXAMPLE.findall(text)}


def write_examples(folder: Path) -> None:
    """Write the reward, the dataset, the algorithm, and the recipe that names them."""
    write(folder, examples("reward.md", "dataset.md", "algorithm.md", "index.md"))


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files by their names, with the folders that they lie in."""
    for name, code in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code, encoding="utf-8")
