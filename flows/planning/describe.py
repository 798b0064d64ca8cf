"""A plan in words and as JSON: sizes, memory and an estimate of time."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from cosmos_rl_core.pipelines import directories, weight_files
from cosmos_rl_core.pipelines.memory import Bytes
from flows.planning import costs, estimate, memory
from flows.planning.plan import Plan, run_url
from flows.planning.run import Run
from flows.post_train import post_train


def describe_plan(plan: Plan, store_url: str) -> str:
    """Return what a run would do, a line a subject."""
    recipe = plan.recipe
    train, sample = recipe.train, recipe.policy.diffusers.sample
    total, trained = costs.parameters(recipe)
    weights = f"LoRA of rank {recipe.policy.lora.r}" if recipe.policy.lora else "all weights"
    files = plan.model.digest[:12] or "not all files are here"
    lines = [
        f"run        {plan.run_id}",
        f"store      {run_url(store_url, plan.run_id)}",
        f"model      {plan.model.path} ({plan.model.adapter}, {files}), {weights}",
        f"trains     {_count(trained)} of {_count(total)} parameters",
        f"algorithm  {train.train_policy.type}, {train.num_iterations} iterations, seed {train.seed}",
        f"prompts    {len(plan.prompts)} to train on, {len(plan.validation_prompts)} held out",
    ]
    if train.train_policy.rewarded:
        rewards = ", ".join(f"{r.fn.label} ({r.role}, weight {r.weight:g})" for r in recipe.rewards)
        batch = f"{recipe.prompts_per_iteration} prompts x {recipe.rollout.n_generation} samples"
        lines += [
            f"iteration  {batch}, {sample.num_steps} {sample.solver} steps, guidance {sample.guidance_scale:g}",
            f"rewards    {rewards}",
        ]
    lines += [f"plugin     {pin.name} of {pin.kind}, {pin.path}" for pin in plan.plugins]
    lines.append(_subject("writes", costs.describe(recipe)))
    launch = recipe.launch
    how = launch.mode if launch.launcher == "local" else launch.launcher
    lines.append(f"launch     {how}, {launch.processes} processes, {launch.threads} threads each")
    if time := estimate.describe(plan):
        lines.append(_subject("time", time))
    if missing := missing_files(plan):
        lines.append(_subject("missing", [*missing, *_download(recipe.policy.model_name_or_path)]))
    return "\n".join(lines)


def _download(name: str) -> list[str]:
    command = directories.download_command(name)
    return [] if command is None else [f"a run needs them: {command}"]


def missing_files(plan: Plan) -> list[str]:
    """Return a line for each file of the base model that a run needs and that is absent."""
    return [] if plan.model.digest else weight_files.damages(directories.resolve_path(plan.model.path))


def _subject(name: str, lines: list[str]) -> str:
    return f"{name:<11}" + "\n           ".join(lines)


def as_json(plan: Plan, store_url: str) -> dict[str, Any]:
    """Return the plan for scripts.

    ``recipe`` has every setting, resolved. ``model.digest`` is ``""`` if files of the model are ``missing``. Bytes of
    ``writes``: ``sample`` (null without rollouts), ``embedding`` of a prompt, ``policy`` of one iteration by part.
    ``memory`` of each stage: bytes of one rank on the ``device`` and in the ``cpu`` memory beside it, as ``rows`` by
    kind and as ``peak``. ``time``: ``forward_flops`` of a sample and, for each stage of an iteration and an evaluation,
    its ``flops`` on all ranks and its ``seconds`` at ``device_flops`` a second on each rank.
    """
    recipe = plan.recipe
    total, trained = costs.parameters(recipe)
    rewarded = recipe.train.train_policy.rewarded
    return {
        "run": plan.run_id,
        "url": run_url(store_url, plan.run_id),
        "algorithm": recipe.train.train_policy.type,
        "iterations": recipe.train.num_iterations,
        "recipe": recipe.model_dump(mode="json"),
        "model": {"path": plan.model.path, "adapter": plan.model.adapter, "digest": plan.model.digest},
        "parameters": {"total": total, "trained": trained},
        "prompts": {"train": len(plan.prompts), "held_out": len(plan.validation_prompts)},
        "writes": {
            "sample": costs.sample_bytes(recipe) if rewarded else None,
            "embedding": costs.embedding_bytes(recipe),
            "policy": costs.policy_parts(recipe),
        },
        "memory": [
            {
                "stage": stage.stage,
                "ranks": stage.ranks,
                "rows": {row: None if held is None else asdict(held) for row, held in stage.rows.items()},
                "peak": asdict(stage.peak),
            }
            for stage in _memory(plan, store_url)
        ],
        "time": {
            "forward_flops": estimate.forward_flops(plan),
            "device_flops": estimate.DEVICE_FLOPS,
            "stages": [asdict(stage) | {"seconds": stage.seconds} for stage in estimate.stages(plan)],
        },
        "missing": missing_files(plan),
    }


def describe_memory(plan: Plan, store_url: str) -> Iterator[str | Table]:
    """Yield a table of the memory of one rank, a column a stage, and notes."""
    found = _memory(plan, store_url)
    peaks = [stage.peak for stage in found]
    unit, name = (GIB, "GiB") if max(peak.device for peak in peaks) >= GIB else (MIB, "MiB")
    table = Table(box=None, padding=(0, 2), collapse_padding=True, pad_edge=False, header_style="bold")
    table.add_column(f"a rank's memory, {name}", no_wrap=True)
    for stage in found:
        table.add_column(stage.stage, justify="right", no_wrap=True)
    table.add_row("ranks", *(str(stage.ranks) for stage in found))
    for row in memory.ROWS:
        held = [stage.rows.get(row, Bytes()) for stage in found]
        if any(each != Bytes() for each in held):
            table.add_row(row, *("?" if each is None else _cell(each.device + each.cpu, unit) for each in held))
    table.add_row("on the device", *(_cell(peak.device, unit) for peak in peaks), style="bold")
    if any(peak.cpu for peak in peaks):
        table.add_row("beside it on the CPU", *(_cell(peak.cpu, unit) for peak in peaks), style="bold")
    yield table
    yield _NOTES


def _memory(plan: Plan, store_url: str) -> list[memory.StageMemory]:
    kinds = (step.kind for wave in post_train(Run(plan, store_url)) for step in wave.steps)
    return memory.stages(plan.recipe, kinds)


MIB, GIB = 2**20, 2**30

_NOTES = """
? is a size that no file states. Activations are not counted, nor files in transit, nor CUDA itself: leave room."""


def _cell(size: int, unit: int) -> str:
    return f"{size / unit:.2f}" if size else ""


def _count(number: int) -> str:
    unit, name = next(((u, n) for u, n in _NUMBERS if number >= u), (1, ""))
    return f"{number / unit:.3g}{name}"


_NUMBERS = ((10**9, " billion"), (10**6, " million"), (1000, " thousand"))
