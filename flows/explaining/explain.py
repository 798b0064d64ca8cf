"""A plan in words and as JSON: sizes, memory and an estimate of time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import humanize
from rich.table import Table

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import counted
from cosmos_rl_core.estimates.estimate import FEWEST
from cosmos_rl_core.pipelines import directories, distilled, weight_files
from cosmos_rl_core.pipelines.memory import Bytes
from cosmos_rl_core.pipelines.sizes import Pictures
from flows.checking import checks, references
from flows.devices import fitting
from flows.ledger import estimates, predicted
from flows.planning import kinds
from flows.planning.base import AnyPlan
from flows.planning.plan import Plan, run_url
from flows.planning.run import Run, run_of
from flows.post_train import post_train
from flows.sizes import costs, memory
from stages.contracts import Judge, Rollout

MIB, GIB = 2**20, 2**30
COUNTED = (
    "All of this is predicted, not measured. The allowance is for CUDA, its libraries and the allocator. Files in "
    "transit are not counted."
)
UNCOUNTED = "Activations are not counted for a model of this size, nor files in transit, nor CUDA itself: leave room."


def _adapter(plan: Plan) -> str:
    """Return the name of the model plugin, and of the shipped one that it replaces."""
    replaced = directories.replaced(directories.resolve_path(plan.model.path))
    return plan.model.adapter + (f" in place of {replaced}" if replaced else "")


def explain_plan(plan: Plan, store_url: str, named_by: str = "", *, gpu_slots: int | None = None) -> str:
    """Return a text on what a run would do, one line for each subject.

    ``named_by`` says where the store's name comes from; ``gpu_slots`` is the number of ``launch.gpu_limit``, if known.
    """
    recipe, train, launch = plan.recipe, plan.recipe.train, plan.recipe.launch
    total, trained = (humanize.intword(count, "%.3g") for count in costs.parameters(recipe))
    weights = f"LoRA of rank {recipe.policy.lora.r}" if recipe.policy.lora else "all weights"
    files = plan.model.digest[:12] or "not all files are here"
    subjects: dict[str, str | list[str]] = {
        "run": plan.run_id,
        "store": run_url(store_url, plan.run_id) + named_by,
        "model": f"{plan.model.path} ({_adapter(plan)}, {files}), {weights}",
        "distilled": _distilled(plan),
        "references": [*references.unread(recipe, plan.prompts)],
        "begins": f"with {plan.lineage}" if plan.lineage else [],
        "trains": f"{trained} of {total} parameters",
        "algorithm": f"{train.train_policy.type}, {counted(train.num_iterations, 'iteration')}, seed {train.seed}",
        "prompts": f"{plan.num_prompts} to train on, {len(plan.validation_prompts)} held out",
        "follows": _follows(recipe),
        "data": [f"{p.items} items, {p.dataset}@{p.number}" for p in plan.snapshots],
        "buckets": ", ".join(f"{height} x {width}" for height, width in plan.buckets) or [],
    }
    stages = _stages(plan, store_url)
    if train.train_policy.rewarded:
        sample = recipe.policy.diffusers.sample
        solver = f"{sample.num_steps} {sample.solver} steps, guidance {sample.guidance_scale:g}"
        batch = f"{recipe.prompts_per_iteration} prompts x {recipe.rollout.n_generation} samples"
        rewards = [f"{r.fn.label} ({r.role}, weight {r.weight:g})" for r in Run(plan, store_url).scored]
        subjects |= {"iteration": f"{batch}, {solver}", "rewards": ", ".join(rewards), "warns": _warns(plan)}
        subjects |= {"agreement": checks.agreements(recipe), "overlaps": _overlaps(plan, store_url, gpu_slots)}
    if missing := missing_files(plan):
        command = directories.download_command(recipe.policy.model_name_or_path)
        missing += [] if command is None else [f"a run needs them: {command}"]
    where = launch.mode if launch.launcher == "local" else launch.launcher
    subjects |= {
        "plugins": [f"{pin.name} of {pin.kind}, {pin.path}" for pin in plan.plugins],
        "stages": f"{stages.total()}: {', '.join(stages)}",
        "writes": _writes(recipe, plan.basis.pictures),
        "judges": [_judge(options) for options in memory.scorers(recipe)],
        "launch": f"{where}, {counted(launch.processes, 'process')}, {counted(launch.threads, 'thread')} each",
        "turns": [
            f"{wave} does not fit the devices at once: {cut}"
            for wave, cut in turns(plan, store_url, gpu_slots=gpu_slots).items()
        ],
        "time": [*predicted.time_lines(plan), *(like.lines() if (like := estimates.estimate(plan, store_url)) else [])],
        "missing": missing,
    }
    listed = {name: [said] if isinstance(said, str) else said for name, said in subjects.items()}
    between = "\n" + " " * 11
    return "\n".join(f"{name:<11}{between.join(lines)}" for name, lines in listed.items() if lines)


def _distilled(plan: Plan) -> list[str]:
    """Return a warning if the base takes few steps, which losses on noised samples unlearn."""
    recipe = plan.recipe
    sign = distilled.sign_of(recipe.policy.model_name_or_path, costs.base_path(recipe))
    if not sign or costs.needs_of(recipe).transitions:
        return []
    return [
        f"the base seems to be distilled to few steps ({sign}); {recipe.train.train_policy.type} trains on noised "
        "samples, which unlearns that",
        "the authors of DiffusionNFT report blurred pictures and collapse; take the model that it was distilled from",
    ]


def _follows(recipe: Recipe) -> list[str]:
    """Return the sources of the data whose contents may change under the same name, each once."""
    policy, validation = recipe.train.train_policy, recipe.validation
    datasets = [policy.dataset, getattr(policy, "data", None), validation and validation.dataset]
    return [*dict.fromkeys(said for dataset in datasets if dataset for said in dataset.follows)]


def _overlaps(plan: Plan, store_url: str, gpu_slots: int | None) -> list[str]:
    """Return lines on the rewards that are scored during the rollout, and on why others are not."""
    launch, overlapping = plan.recipe.launch, [reward for reward in plan.recipe.rewards if reward.overlap]
    labels = ", ".join(reward.fn.label for reward in overlapping)
    if labels and launch.launcher != "local":
        return [f"nothing: with launcher = {launch.launcher!r}, {labels} begins after the rollout"]
    count = fitting.most(launch, fitting.devices_for(launch, runs_here=False), gpu_slots)
    together, after = _most_with_a_rollout(plan, store_url, count) if overlapping else [], list[str]()
    for reward in overlapping:
        if not reward.fn.facts.torch:
            continue
        if why := fitting.why_not_together([*together, Judge.name], launch, count):
            after.append(f"{reward.fn.label} begins after the rollout: {why}")
        else:
            together.append(Judge.name)
    late = {line.partition(" begins ")[0] for line in after}
    early = ", ".join(reward.fn.label for reward in overlapping if reward.fn.label not in late)
    return [f"{early}: scored while the rollout runs"] * bool(early) + after


def _most_with_a_rollout(plan: Plan, store_url: str, count: int | None) -> list[str]:
    """Return the most stages that run at the same time as a rollout, and the rollout."""
    found: list[str] = []
    for wave in post_train(run_of(plan, store_url)):
        kinds = [step.kind for step in wave.steps]
        for turn in fitting.turns(kinds, plan.recipe.launch, count):
            stages = [kinds[place] for place in turn]
            found = max(found, stages, key=len) if Rollout.name in stages else found
    return found


def turns(plan: Plan, store_url: str, *, gpu_slots: int | None = None) -> dict[str, str]:
    """Return the turns of each wave that does not fit the profile's devices at once, by the names of its stages.

    ``gpu_slots`` is the number of ``launch.gpu_limit``, if it is known.
    """
    launch, found = plan.recipe.launch, dict[str, str]()
    count = fitting.most(launch, fitting.devices_for(launch, runs_here=False), gpu_slots)
    for wave in post_train(run_of(plan, store_url)):
        names = [step.stage for step in wave.steps]
        cut = fitting.turns([step.kind for step in wave.steps], launch, count)
        if len(cut) > 1:
            found["+".join(names)] = ", then ".join(" and ".join(names[place] for place in some) for some in cut)
    return found


def _judge(options: RewardOptions) -> str:
    """Return a line on a scorer with torch: the size of its weights if that is known, and what is not known."""
    size = memory.weight_bytes(options)
    weights = "weights of a size that its settings do not tell" if size is None else f"{_size(size)} of weights"
    return f"{options.label}: {weights} on each rank of judge; not known are its activations and arithmetic"


def _warns(plan: Plan) -> str | list[str]:
    """Return lines on the limits on scores, and on what a tripped limit does; empty without limits."""
    warning = plan.early_warning
    if warning is None or not warning.limits:
        return []
    then = {"mark": "marks it", "suspend": "suspends the run until it is approved", "stop": "ends the run"}
    names = ", ".join(dict.fromkeys(limit.name for limit in warning.limits))
    lines = [f"before each update, a mean outside its limits {then[warning.on_trip]}: {names}"]
    count, on_drift = plan.recipe.prompts_per_iteration, any(limit.fall or limit.rise for limit in warning.limits)
    if on_drift and count < FEWEST:
        prompts = counted(count, "prompt")
        lines.append(f"no verdict on drift (fall, rise): an iteration has {prompts}, which takes at least {FEWEST}")
    return lines


def _writes(recipe: Recipe, pictures: Pictures) -> list[str]:
    """Return lines on the bytes that an iteration writes, and on the bytes that all iterations leave."""
    parts, train = costs.policy_parts(recipe), recipe.train
    of_parts = ", ".join(f"{part} {_size(size)}" for part, size in parts.items())
    lines = [f"a policy of {_size(sum(parts.values()))} an iteration: {of_parts}"]
    left = costs.kept_policy_bytes(recipe)
    if train.train_policy.rewarded:
        each = costs.sample_bytes(recipe)
        picture = _size(costs.pixel_bytes(recipe))
        samples = f"{train.train_batch_per_replica} samples of {_size(each)} an iteration"
        lines.insert(0, f"{samples}, each with a picture of {picture} before compression")
        left += costs.kept_samples(recipe) * each
    of_all = f"{_size(left)} and the pictures in {counted(train.num_iterations, 'iteration')}"
    return [*lines, f"{of_all}; embeddings of {_size(costs.embedding_bytes(recipe, pictures))} a prompt"]


def _size(num_bytes: int) -> str:
    return humanize.naturalsize(num_bytes, binary=True, format="%.4g")


def missing_files(plan: Plan) -> list[str]:
    """Return a line for each file of the base model that a run needs and that is absent."""
    return [] if plan.model.digest else weight_files.damages(costs.base_path(plan.recipe))


def as_json(plan: AnyPlan, store_url: str, *, gpu_slots: int | None = None) -> dict[str, Any]:
    """Return the plan for scripts. ``gpu_slots`` is the number of ``launch.gpu_limit``, if it is known.

    ``recipe`` has every setting, resolved. ``init`` says what policy version 0 begins with, "" for the base model.
    ``model.digest`` is ``""`` if files of the model are ``missing``.
    ``stages`` has the number of runs of each, ``turns`` the turns of waves that do not fit. Bytes of ``writes``:
    ``sample`` (null without rollouts), ``embedding`` of a prompt, ``policy`` of one iteration by part. ``memory`` of
    each stage: bytes of one rank on the ``device`` and in ``cpu`` memory, as ``rows`` by kind, at each of
    its ``moments`` and as ``peak``, with the ``moment`` when the device holds that, and the ``nodes`` of its ranks.
    ``time``: ``forward_flops`` of a sample and, for each stage of an iteration and an evaluation, its ``flops`` on all
    ranks and its predicted ``seconds``, also by ``causes``, at ``device_flops`` a second on each rank; and ``like``,
    what another run of the same shape took, or null.
    """
    if (kind := kinds.of(plan)) is not None:
        return kind.as_json(plan, store_url)
    assert isinstance(plan, Plan)
    recipe = plan.recipe
    total, trained = costs.parameters(recipe)
    rewarded = recipe.train.train_policy.rewarded
    return {
        "run": plan.run_id,
        "url": run_url(store_url, plan.run_id),
        "init": plan.lineage,
        "algorithm": recipe.train.train_policy.type,
        "iterations": recipe.train.num_iterations,
        "recipe": recipe.model_dump(mode="json"),
        "model": plan.model.model_dump(include={"path", "adapter", "digest"}),
        "parameters": {"total": total, "trained": trained},
        "prompts": {"train": plan.num_prompts, "held_out": len(plan.validation_prompts)},
        "stages": _stages(plan, store_url),
        "turns": turns(plan, store_url, gpu_slots=gpu_slots),
        "writes": {
            "sample": costs.sample_bytes(recipe) if rewarded else None,
            "embedding": costs.embedding_bytes(recipe, plan.basis.pictures),
            "policy": costs.policy_parts(recipe),
        },
        "memory": [each.as_json() for each in _memory(plan, store_url)],
        "time": {
            "forward_flops": predicted.forward_flops(plan),
            "device_flops": predicted.DEVICE_FLOPS,
            "stages": [asdict(work) | {"seconds": work.seconds} for work in predicted.stages(plan)],
            "like": estimates.estimate(plan, store_url),
        },
        "missing": missing_files(plan),
    }


def explained(
    plan: AnyPlan, store_url: str, named_by: str = "", *, gpu_slots: int | None = None
) -> Iterator[str | Table]:
    """Yield the text of :func:`explain_plan`, a table of the memory of one rank, a column for each stage, and notes.

    ``named_by`` says where the store's name comes from; ``gpu_slots`` is the number of ``launch.gpu_limit``, if known.
    """
    if (kind := kinds.of(plan)) is not None:
        words, found, uncounted = kind.explained(plan, store_url, named_by)
        yield words
        if found:
            yield ""
            yield _memory_table(found)
            yield f"\n{uncounted}"
        return
    assert isinstance(plan, Plan)
    yield f"{explain_plan(plan, store_url, named_by, gpu_slots=gpu_slots)}\n"
    yield _memory_table(_memory(plan, store_url))
    if costs.is_large(plan.recipe):
        yield ""
        yield _time_table(predicted.stages(plan))
    yield f"\n{COUNTED if costs.is_large(plan.recipe) else UNCOUNTED}"


def _memory_table(found: Sequence[memory.StageMemory]) -> Table:
    unit, name = (GIB, "GiB") if max(stage.peak.device for stage in found) >= GIB else (MIB, "MiB")
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    table.collapse_padding = True
    table.add_column(f"a rank's memory, {name}", no_wrap=True)
    for stage in found:
        table.add_column(stage.stage, justify="right", no_wrap=True)

    def add(row: str, bytes_by_stage: list[int], style: str = "") -> None:
        if any(bytes_by_stage):
            cells = (f"{held / unit:.2f}" if held else "" for held in bytes_by_stage)
            table.add_row(row, *cells, style=style)

    table.add_row("ranks", *(str(stage.ranks) for stage in found))
    for row in memory.ROWS:
        held = [stage.rows.get(row, Bytes()) for stage in found]
        add(row, [each.device + each.cpu for each in held])
    add("on the device", [stage.peak.device for stage in found], "bold")
    if any(stage.peak.device for stage in found):
        table.add_row("most is held in", *(stage.moment if stage.peak.device else "" for stage in found))
    add("meanwhile on the CPU", [stage.peak.cpu for stage in found], "bold")
    if any(stage.ranks > stage.nodes for stage in found):
        add("CPU of all ranks", [stage.peak.cpu * stage.ranks // stage.nodes for stage in found], "bold")
    return table


def _time_table(work: Sequence[predicted.StageWork]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    table.collapse_padding = True
    table.add_column("predicted seconds", no_wrap=True)
    for stage in work:
        table.add_column(stage.stage, justify="right", no_wrap=True)
    for cause in predicted.CAUSES:
        seconds = [stage.causes.get(cause, 0.0) for stage in work]
        if any(seconds):
            table.add_row(cause, *(f"{each:.1f}" if each else "" for each in seconds))
    table.add_row("together", *(f"{stage.seconds:.1f}" for stage in work), style="bold")
    return table


def _stages(plan: Plan, store_url: str) -> Counter[str]:
    """Return how often each stage runs, by the name that ``rerun`` takes, in the order of the loop."""
    return Counter(step.stage for wave in post_train(run_of(plan, store_url)) for step in wave.steps)


def _memory(plan: Plan, store_url: str) -> list[memory.StageMemory]:
    kinds = (step.kind for wave in post_train(run_of(plan, store_url)) for step in wave.steps)
    large = costs.is_large(plan.recipe)
    return memory.stages(plan.settled, kinds, plan.basis, activations=large)
