"""Prompts that a reward cannot score are found when a run is planned, by text and by metadata."""

import json

from tests.flows.planning.test_plan import mistakes_of


def test_tags_in_the_metadata_of_prompts_are_checked_with_everything_else(recipe, tmp_path):
    rows = [
        {"prompt": "a dog", "tag": "single_object", "include": [{"class": "dog", "count": 1}]},
        {"prompt": "a dragon", "tag": "single_object", "include": [{"class": "dragon", "count": 1}]},
        {"prompt": "no tags"},
    ]
    (tmp_path / "tags.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    message = mistakes_of(
        recipe(
            ('name = "ocr"\nlocal_dir = ', f'name = "prompts"\npath = "{tmp_path}/tags.jsonl" # '),
            ('name = "ocr", line_width = 96', 'name = "geneval", model = "no/clip", detector = "no/detector"'),
        )
    )
    assert "geneval cannot score 2 prompts: prompt p-" in message
    assert "tags are wrong: include.0.class: Value error, 'dragon' is none of GenEval's 80 classes" in message
    assert "the prompt's metadata holds nothing, expected GenEval's `tag` and `include`" in message
    assert "hf download no/detector" in message
