"""Memory and time of prompts with references, as a plan counts them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.datasets._base import Prompt, Reference, prompt_id
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.weights.shapes import component_shapes, count_elements
from flows.explaining.explain import as_json
from flows.ledger import predicted
from flows.planning.plan import Plan, Settings, plan_of
from flows.sizes import memory
from flows.sizes.activations import micro_batch
from flows.sizes.basis import largest, typical

SIZES = [(64, 64), (64, 64), (64, 64), (64, 96), (128, 64)]
"""Size of the reference of each prompt."""


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save("flux2_klein", tmp_path_factory.mktemp("pipelines") / "klein"))


def prompt(text: str, *pictures: tuple[int, int]) -> Prompt:
    found = [Reference(digest=f"{number:064x}", height=h, width=w) for number, (h, w) in enumerate(pictures)]
    return Prompt(id=prompt_id(text, [one.digest for one in found]), text=text, references=tuple(found))


def plan(recipe: Any, folder: Path, klein: str, *overrides: str, references: bool = True) -> Plan:
    """NFT on klein from prompts of the sizes above, each with a reference or none."""
    rows = [{"prompt": f'"x{number}"', "references": [f"{number}.png"] * references} for number in range(len(SIZES))]
    for number, (height, width) in enumerate(SIZES):
        Image.fromarray(np.full((height, width, 3), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "edits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    named = f'name = "prompts"\npath = "{folder}/edits.jsonl" # '
    path = recipe(("package:tiny-sd3", klein), ('name = "ocr"\nlocal_dir = ', named))
    return plan_of(Settings(path, overrides=overrides))


def test_the_largest_and_the_typical_references_of_all_prompts_are_found(klein: str):
    prompts = [prompt(f"x{number}", size) for number, size in enumerate(SIZES)]
    assert largest(klein, prompts) == ((128, 64),)
    assert typical(klein, prompts) == ((64, 64),)
    two = prompt("two", (64, 96), (64, 64))
    assert largest(klein, [*prompts, two]) == ((64, 96), (64, 64))
    assert largest(klein, [prompt("a"), prompt("b")]) == typical(klein, [prompt("a")]) == ()


def test_a_plan_counts_the_tokens_of_references(recipe, tmp_path: Path, klein: str):
    path = str(tmp_path)
    own, without = plan(recipe, tmp_path, klein), plan(recipe, tmp_path, klein, references=False)
    assert (own.basis.pictures, without.basis.pictures) == (((128, 64),), ())
    found, plain = as_json(own, path), as_json(without, path)
    channels, side = 16, 8
    of_largest = 4 * channels * (128 // side) * (64 // side)
    assert found["writes"]["embedding"] - plain["writes"]["embedding"] == of_largest
    batches = [memory.stages(each.settled, ["update"], each.basis)[0].rows[memory.BATCH] for each in (own, without)]
    assert batches[0].device - batches[1].device == micro_batch(own.recipe, ()) * of_largest
    assert predicted.forward_flops(own) > predicted.forward_flops(without)
    embeds = [memory.stages(each.settled, ["embed"], each.basis)[0].rows[memory.OTHERS] for each in (own, without)]
    vae = count_elements(component_shapes(klein, "vae"))
    assert embeds[0].device - embeds[1].device == 4 * vae


def test_tokens_of_references_leave_room_for_fewer_rows_in_a_forward_pass(recipe, tmp_path: Path, klein: str):
    size = plan(recipe, tmp_path, klein).media.size
    tokens = sizes.num_tokens(klein, size, 1)
    setting = f"train.train_policy.tokens_per_forward={4 * tokens}"
    filled = plan(recipe, tmp_path, klein, setting)
    assert micro_batch(filled.recipe, ()) == 4
    assert micro_batch(filled.recipe, [(64, 64)]) == 1
    assert sizes.num_tokens(klein, size, 1, [(64, 64), (64, 64)]) == 5 * tokens
