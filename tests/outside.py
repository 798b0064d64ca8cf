"""A plugin of every kind in a folder of its own, and a tiny recipe that needs all of them."""

import json
import shutil
from pathlib import Path

from cosmos_rl_core import errors
from cosmos_rl_core.pipelines import directories

CORE = Path(errors.__file__).parent
REWARD = '''
"""How bright a picture is."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.train import RewardOptions


class Options(RewardOptions):
    name: Literal["bright"]
    factor: float = Field(default=1.0, gt=0)
    """Multiplies the score."""


class Reward:
    def __init__(self, options):
        self.options = options
        self.version = "1"

    def check_prompt(self, prompt):
        return None

    def score(self, samples):
        return [{"bright": self.options.factor * float(sample.pixels.mean()) / 255} for sample in samples]
'''
DATASET = '''
"""Signs that show a number."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt, prompt_id


class Options(DatasetOptions):
    name: Literal["signs"]
    count: int = Field(default=4, ge=1)
    """How many there are."""


def prompts(options):
    texts = [f'a sign that says "{number}"' for number in range(options.count)]
    return tuple(Prompt(id=prompt_id(text), text=text) for text in texts)
'''
SPEC = """
from dataclasses import replace

from cosmos_rl_core.models import sd3

SPEC = replace(sd3.SPEC, pipeline_classes=("OtherPipeline",))
"""
RECIPE = """
plugins = PLUGINS

[policy]
model_name_or_path = "BASE"
lora = { r = 2 }
diffusers = { inference_size = [32, 64], max_prompt_length = 12, sample = { num_steps = 2 } }

[train]
num_iterations = 1
train_batch_per_replica = 4
optm_lr = 1e-3
train_policy = { type = "nft2", mini_batch = 2, timesteps_fraction = 1.0, dataset = { name = "signs" } }

[rollout]
n_generation = 2
n_generation_mini_batch = 2
samples_per_shard = 2

[[rewards]]
fn = { name = "bright" }

[launch]
mode = "MODE"
max_attempts = 1
"""


def write_plugins(folder: Path) -> list[Path]:
    """An algorithm, copied and renamed; a reward; a dataset; a model that claims ``OtherPipeline``."""
    model = folder / "tiny2"
    model.mkdir(parents=True)
    algorithm = (
        (CORE / "algorithms" / "nft.py").read_text(encoding="utf-8").replace('Literal["nft"]', 'Literal["nft2"]')
    )
    written = {"nft2.py": algorithm, "bright.py": REWARD, "signs.py": DATASET, "tiny2/__init__.py": SPEC}
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copy(CORE / "models" / "sd3" / "model.py", model / "model.py")
    return [folder / "nft2.py", folder / "bright.py", folder / "signs.py", model]


def write_base(folder: Path) -> Path:
    """The tiny pipeline under a name that no plugin of the package claims."""
    shutil.copytree(directories.resolve_path("package:tiny-sd3"), folder)
    index = json.loads((folder / directories.INDEX).read_text(encoding="utf-8"))
    (folder / directories.INDEX).write_text(json.dumps(index | {"_class_name": "OtherPipeline"}), encoding="utf-8")
    return folder


def write_recipe(folder: Path, plugins: list[str], mode: str = "cold") -> str:
    """The recipe in ``folder``; ``plugins`` are paths as the recipe has them."""
    base = write_base(folder / "base")
    text = RECIPE.replace("PLUGINS", json.dumps(plugins)).replace("BASE", str(base)).replace("MODE", mode)
    (folder / "own.toml").write_text(text, encoding="utf-8")
    return str(folder / "own.toml")
