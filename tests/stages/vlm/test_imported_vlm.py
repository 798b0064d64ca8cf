"""cosmos-rl's recipe of Cosmos-Reason2 on LLaVA data, imported, trains a tiny model for a step and exports it."""

import json
from pathlib import Path

from cosmos_rl_core.config.vlm.recipe import checked
from cosmos_rl_core.recipes.reading import read_values
from cosmos_rl_core.weights.parts import CURRENT
from flows.library.exports import export
from flows.planning.plan import freeze
from flows.session import loop
from flows.vlm.plan import make_plan
from flows.vlm.run import VlmRun
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from stages.vlm.contracts import VlmTokenize
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.stages.conftest import make
from tests.stages.vlm_data import picture, talk

UPSTREAM = Path(__file__).parents[2] / "core/upstream_vlm_recipes/reason2-llava-sft.toml"


def test_an_imported_recipe_trains(tmp_path: Path):
    media = tmp_path / "media"
    media.mkdir()
    picture(media / "a.jpg", 20, 30)
    rows = [
        talk("<image>\nWhat?", "A wave.", image="a.jpg"),
        talk("Hello", "Hi.", "And now?", "Good night."),
        talk("<image>\nAnd this?", "Another wave.", image="a.jpg"),
        talk("Hello again", "Hi."),
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    text = UPSTREAM.read_text(encoding="utf-8")
    for old, new in (
        ("nvidia/Cosmos-Reason2-2B", tiny.save_model(tmp_path / "model", QWEN3)),
        ("data/sft/annotations.json", str(tmp_path / "rows.json")),
        ("data/sft/train2017", str(media)),
        # The first step of a warm-up has the learning rate 0.
        ("train_batch_per_replica = 32", "train_batch_per_replica = 1\noptm_warmup_steps = 0"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    file = tmp_path / "theirs.toml"
    file.write_text(text, encoding="utf-8")
    recipe, _ = checked(read_values(str(file)), str(file))
    assert (recipe.train.train_batch_per_replica, recipe.train.train_policy.steps_per_iteration) == (4, 1)
    run = VlmRun(freeze(make_plan(recipe, "imported", str(file)), str(tmp_path)), str(tmp_path))  # pyright: ignore[reportArgumentType]

    def launch(_: str, *asked: Request) -> list[Manifest]:
        return [make(request, tmp_path) for request in asked]

    loop.make(run, launch)
    before, after = (read_part(input_of(run.slots.policy(k)), CURRENT) for k in (0, 1))
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    # Adam's first step moves each number by at most the learning rate; weights near 1 are rounded to 1.2e-7.
    assert 0.9e-6 < moved < 1.2e-6
    (step,) = read_table(Artifact(input_of(run.slots.policy(1))), METRICS).to_dict("records")
    # Every answer of every turn, and the token that ends each.
    assert step["label_tokens"] == labels(run)
    export(str(tmp_path), run.plan.run_id, str(tmp_path / "out"))
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "out").rglob("*")}


def labels(run: VlmRun) -> int:
    """How many labels the index of the tokens counts, of four conversations with five answers."""
    table = read_table(Artifact(run.tokens()), VlmTokenize.INDEX)
    assert len(table) == 4
    return sum(table["labels"].tolist())
