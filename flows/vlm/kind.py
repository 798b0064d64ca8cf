"""Runs that fine-tune a VLM, as a kind of run."""

from collections.abc import Iterator
from typing import Any

from cosmos_rl_core.config.vlm.recipe import VlmRecipe, checked, is_vlm
from flows.planning.kinds import Kind
from flows.vlm import explain
from flows.vlm.about import about, data
from flows.vlm.plan import VlmPlan, make_plan, written
from flows.vlm.run import VlmRun
from flows.vlm.shared_tokens import reached_from
from flows.vlm.waves import vlm_sft


def _stages(recipe: VlmRecipe) -> list[str]:
    judged = ["vlm_evaluate"] if recipe.validation is not None else []
    return ["vlm_policy", "vlm_tokenize", "vlm_finetune", "vlm_export", *judged]


def _shape(plan: VlmPlan, launch: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the arithmetic of an iteration: model, trained weights, and sizes of steps.

    Datasets are among them, because their conversations have different lengths.
    """
    recipe, options = plan.recipe, plan.recipe.train.train_policy
    return {
        "model": plan.model.digest,
        "policy": recipe.policy.model_dump(mode="json", exclude={"model_name_or_path"}),
        "algorithm": options.type,
        "steps": options.steps_per_iteration,
        "row": options.row_tokens,
        "samples": recipe.train.train_batch_per_replica,
        "dtype": recipe.train.param_dtype,
        "data": plan.data_digest,
        "held_out": plan.held_out_digest,
        "launch": launch,
    }


def _reads(run: VlmRun) -> Iterator[str]:
    for slot in run.token_slots:
        yield from reached_from(slot)


KIND = Kind(
    claims=is_vlm,
    check=checked,
    plan=VlmPlan,
    make_plan=make_plan,
    written=written,
    run=VlmRun,
    summary="Fine-tune a vision-language model on conversations.",
    waves=vlm_sft,
    stages=_stages,
    shape=_shape,
    about=about,
    data=data,
    explained=explain.with_memory,
    as_json=explain.as_json,
    reads=_reads,
)
