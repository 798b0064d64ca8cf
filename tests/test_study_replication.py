"""The study's own arithmetic: statistics of pictures with known answers, and the arms as plans."""

import numpy as np
import pandas as pd
import pytest

from docs.studies.replication import study
from docs.studies.replication.study import ARM, ARMS, MEASURES, SEEDS, TITLES, draw, markdown, statistics
from flows.planning.plan import Settings, plan_of

GREY = np.full((8, 16, 3), 200, dtype=np.uint8)


def test_ink_edges_and_diversity_of_known_pictures():
    barred = GREY.copy()
    barred[2:6, 4:8] = 0
    found = statistics([[GREY, barred]])
    assert found["ink"] == pytest.approx(16 / 128 / 2)
    step = 200 / 255
    # The bar has 8 sides of a pixel each up and down, and 8 left and right.
    assert found["edges"] == pytest.approx(step * (8 / (7 * 16) + 8 / (8 * 15)) / 2)
    assert found["diversity"] == pytest.approx(step * (16 / 128) ** 0.5)


def test_ink_is_what_differs_from_the_background_whatever_its_colour():
    for background in (0, 90, 255):
        picture = np.full((8, 8, 3), background, dtype=np.uint8)
        picture[3:5, 3:5, 1] = (background + 128) % 256
        assert statistics([[picture, picture]])["ink"] == pytest.approx(4 / 64)


def test_pictures_of_other_prompts_do_not_count_as_diversity():
    assert statistics([[GREY, GREY], [0 * GREY, 0 * GREY]])["diversity"] == 0


def test_every_arm_is_a_recipe_and_changes_what_it_says(tmp_path):
    base = "policy.model_name_or_path=package:tiny-sd3"
    plans = {arm: plan_of(Settings(ARM, overrides=(base, *changes))) for arm, changes in ARMS.items()}
    policies = {arm: plan.recipe.train.train_policy.model_dump() for arm, plan in plans.items()}
    assert {arm: policy["data_beta"] for arm, policy in policies.items()} == {
        "none": 0, "kl": 0, "kl-strong": 0, "ddrl": 0.01, "ddrl-weak": 0.001, "data-alone": 0.01, "shuffled": 0,
    }  # fmt: skip
    assert [arm for arm, policy in policies.items() if policy["kl_beta"]] == ["kl", "kl-strong"]
    assert [arm for arm, policy in policies.items() if not policy["policy_weight"]] == ["data-alone"]
    assert [arm for arm, policy in policies.items() if policy["shuffle_rewards"]] == ["shuffled"]
    shared = [
        {name: value for name, value in policy.items() if name in ("train_on", "clip_ratio", "mini_batch", "dataset")}
        for policy in policies.values()
    ]
    assert all(policy == shared[0] for policy in shared)
    assert plans["ddrl"].data_prompts
    assert not {p.id for p in plans["ddrl"].data_prompts} & {p.id for p in plans["ddrl"].held_out_prompts}


def test_the_table_has_a_row_for_each_arm_with_the_error_of_its_mean_over_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "data_statistics", lambda: {"ink": 0.5, "edges": 0.1, "diversity": 0.2})
    rows = [
        {"arm": arm, "seed": seed, "version": version} | dict.fromkeys(MEASURES, seed + 10.0 * version)
        for arm in ARMS
        for seed in SEEDS
        for version in (0, 30)
    ]
    table = pd.DataFrame(rows)
    lines = markdown(table).splitlines()
    assert len(lines) == 2 + 2 + len(ARMS)
    assert lines[3].startswith("| base | 1.000 |")
    assert all(f"| {title} | 301.000 ± 0.577 |" in line for title, line in zip(TITLES.values(), lines[4:], strict=True))
    draw(table, tmp_path / "results.svg")
    assert all(
        title in (tmp_path / "results.svg").read_text() for title in ("held-out diffusion loss", "OCR (not trained on)")
    )
