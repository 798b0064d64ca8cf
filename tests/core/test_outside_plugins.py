"""Plugins at paths: which files and folders are plugins, what is pinned of them, and all mistakes at once."""

import json
from pathlib import Path

from cosmos_rl_core import outside_plugins
from flows.planning.plan import Settings, plan_of
from tests.flows.planning.test_plan_plugins import NAMES, folder, recipe, refused

__all__ = ["folder", "recipe"]


CHATS = """
from typing import Literal

from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions


class Options(ChatDatasetOptions):
    name: Literal["chats"]


def rows(options):
    return []
"""


def test_a_dataset_of_conversations_from_outside_is_pinned(folder: Path):
    (folder / "chats.py").write_text(CHATS, encoding="utf-8")
    outside_plugins.find([str(folder / "chats.py")])
    (pin,) = outside_plugins.pins("")
    assert (pin.kind, pin.name, [*pin.files]) == ("chat_datasets", "chats", ["chats.py"])
    outside_plugins.use([pin.model_dump(mode="json")], verify=True)


def test_a_folder_laid_out_like_the_package_holds_plugins_too(recipe: str, folder: Path):
    for kind, name in NAMES.items():
        file = folder / name if kind == "models" else folder / f"{name}.py"
        (folder / "all" / kind).mkdir(parents=True)
        file.rename(folder / "all" / kind / file.name)
    plan = plan_of(Settings(recipe, overrides=(f'plugins=["{folder / "all"}"]',)))
    assert {pin.kind: pin.name for pin in plan.plugins} == NAMES


def test_every_plugin_that_cannot_be_used_is_named_at_once(recipe: str, folder: Path):
    sources = {
        "broken.py": "import nothing_of_this_name",
        "empty.py": "x = 1",
        "ocr.py": (folder / "bright.py").read_text(encoding="utf-8"),
        "copied.py": (folder / "bright.py").read_text(encoding="utf-8"),
        "lone.py": (folder / "tiny2" / "__init__.py").read_text(encoding="utf-8"),
    }
    for name, source in sources.items():
        (folder / name).write_text(source, encoding="utf-8")
    paths = [str(folder / name) for name in ("nosuch.py", "nosuch", *sources)]
    said = refused(recipe, f"plugins={json.dumps(paths)}", 'rewards=[{ fn = { name = "copied" } }]')
    for mistake in (
        "nosuch.py: there is no such file",
        "nosuch holds no plugin; expected a .py file",
        "broken.py cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        "empty.py defines the members of no plugin; expected SPEC (models); or Options and Algorithm (algorithms)",
        "ocr.py: there is another plugin 'ocr' of rewards; rename one",
        "lone.py: a model is a folder with __init__.py, which defines SPEC, and model.py",
        "copied.py: Options.name must be Literal['copied'], found typing.Literal['bright']",
    ):
        assert mistake in said


def test_a_folder_with_a_helper_is_one_plugin(recipe: str, folder: Path):
    (folder / "bright").mkdir()
    text = (folder / "bright.py").read_text(encoding="utf-8")
    (folder / "bright" / "__init__.py").write_text(f"{text}\nfrom .helper import HALF\n", encoding="utf-8")
    (folder / "bright" / "helper.py").write_text("HALF = 0.5\n", encoding="utf-8")
    (folder / "bright.py").unlink()
    paths = json.dumps([str(folder / name) for name in ("nft2.py", "bright", "signs.py", "tiny2")])
    plan = plan_of(Settings(recipe, overrides=(f"plugins={paths}",)))
    (pin,) = (pin for pin in plan.plugins if pin.name == "bright")
    assert [*pin.files] == ["bright/__init__.py", "bright/helper.py"]
