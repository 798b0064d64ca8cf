"""The fit of stages to devices: of each stage alone, checked before a run starts, and of a wave's stages together.

A wave whose stages do not fit together is made in turns, in its order. The turns depend on the machine alone, and are
part of no name and no digest.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import Mistakes
from flows.devices.devices import MIG, VISIBLE, Need, device_of, need_of, visible
from stages.registry import STAGES

FEWER = "use fewer processes (launch.processes, launch.stage_processes)"


def most(launch: LaunchConfig, devices: Sequence[str] | None, gpu_slots: int | None = None) -> int | None:
    """Return how many devices the stages of a wave may use together, None for any number.

    ``devices`` come from :func:`devices_for`; ``gpu_slots`` is the number of slots of ``launch.gpu_limit``, if known.
    """
    return min((count for count, _ in _bounds(launch, devices or (), gpu_slots)), default=None)


def devices_for(launch: LaunchConfig, *, runs_here: bool) -> list[str] | None:
    """Return the devices of this machine that stages have to fit, None if they need not run on it.

    A plan that need not run on this machine counts its devices only if the profile gives no number of GPUs.
    """
    if launch.launcher != "local" or launch.forks or not (runs_here or launch.gpus is None):
        return None
    return visible() if runs_here else visible() or None


def turns(stages: Sequence[str], launch: LaunchConfig, count: int | None) -> list[list[int]]:
    """Cut a wave into turns whose stages fit the devices. Return the indices into ``stages`` of each turn, in order.

    ``count`` is :func:`most`. A stage that does not fit alone is a turn.
    """
    found: list[list[int]] = []
    for place, stage in enumerate(stages):
        if found and _fit([*(stages[i] for i in found[-1]), stage], launch, count):
            found[-1].append(place)
        else:
            found.append([place])
    return found


def why_not_together(stages: Sequence[str], launch: LaunchConfig, count: int | None) -> str:
    """Return why the last of ``stages`` cannot compute next to the others, with advice; "" if it can.

    ``count`` is :func:`most`.
    """
    if launch.gpu_limit is not None:
        return "launch.gpu_limit has slots for the stages of a wave only; leave it out of the profile"
    if _fit(stages, launch, count):
        return ""
    needs = [need for stage in stages if (need := need_of(stage, launch)).count]
    wanted = sum(need.count for need in needs)
    if count is not None and wanted > count:
        found = f"{' and '.join(need.stage for need in needs)} need {wanted} GPUs together, and there are {count}"
        return f"{found}; show more, or {FEWER}"
    return f"launch.stage_gpus gives {stages[-1]} GPUs of another stage; give it others"


def misfits(
    stages: Sequence[str], launch: LaunchConfig, devices: Sequence[str] | None, gpu_slots: int | None = None
) -> list[str]:
    """Return a message for each reason why a stage does not fit the devices even alone.

    ``devices`` are what this machine shows, None if stages need not run on it.
    """
    needs = [need for stage in dict.fromkeys(stages) if (need := need_of(stage, launch)).count]
    if launch.launcher != "local":
        return _misfits_of_nodes(needs, launch)
    if not needs or launch.forks:
        return []
    found = _too_many(needs, _bounds(launch, devices or (), gpu_slots))
    if devices is not None and not devices and launch.device == "cuda":
        found.append(
            f"launch.device = 'cuda', and this machine shows no GPU ({VISIBLE}, nvidia-smi, the driver's files); mend "
            "that, or set launch.device = 'cpu'"
        )
    return [*found, *(why for need in needs if (why := _of_choice(need, launch, devices or ())))]


def misfits_of(
    launch: LaunchConfig,
    stages: Sequence[str],
    gpu_slots_of: Callable[[LaunchConfig], int | None],
    *,
    runs_here: bool,
) -> list[str]:
    """Return a message for each reason why a stage does not fit the profile, this machine or the limit's slots.

    ``gpu_slots_of`` returns the number of slots of ``launch.gpu_limit``, None if it has none or it is not known. The
    message of its :class:`ConfigError` is one of the messages.
    """
    found = Mistakes()
    gpu_slots = found.catch(gpu_slots_of, launch)
    return [*found, *misfits(stages, launch, devices_for(launch, runs_here=runs_here), gpu_slots)]


def _bounds(launch: LaunchConfig, devices: Sequence[str], gpu_slots: int | None) -> list[tuple[int, str]]:
    """Return each upper limit on the number of devices, with a text that names its source."""
    found: list[tuple[int, str]] = []
    if not launch.forks:
        found += [(launch.gpus, f"launch.gpus = {launch.gpus}")] if launch.gpus else []
        found += [(len(devices), f"{len(devices)} visible: {', '.join(devices)}")] if devices else []
    if gpu_slots is not None:
        found.append((gpu_slots, f"the limit {launch.gpu_limit!r} has {gpu_slots} slots"))
    return found


def _fit(stages: Sequence[str], launch: LaunchConfig, count: int | None) -> bool:
    """Return whether stages can run side by side."""
    needs = [need for stage in stages if (need := need_of(stage, launch)).count]
    if launch.launcher == "local":
        chosen = [index for need in needs for index in need.chosen]
        return len({*chosen}) == len(chosen) and (count is None or sum(need.count for need in needs) <= count)
    # Nothing divides the GPUs of a Slurm job among the stages in it.
    on_gpus = [need for need in needs if device_of(need.stage, launch, ()) == "cuda"]
    return launch.launcher == "ray" or len(on_gpus) <= 1


def _too_many(needs: Sequence[Need], bounds: Sequence[tuple[int, str]]) -> list[str]:
    """Return a message for each number of devices above the lowest limit, with the stages that need so many."""
    if not bounds:
        return []
    count, why = min(bounds)
    stages: dict[int, list[str]] = defaultdict(list)
    for need in needs:
        if need.count > count:
            stages[need.count].append(need.stage)
    return [
        f"{', '.join(some)}: {needed} GPUs{' each' * (len(some) > 1)}, one for each process; {why}; {FEWER}"
        for needed, some in stages.items()
    ]


def _of_choice(need: Need, launch: LaunchConfig, devices: Sequence[str]) -> str:
    """Return why a stage cannot use the devices that it would get; "" if it can."""
    total = min(filter(None, (launch.gpus, len(devices))), default=None)
    absent = [index for index in need.chosen if total is not None and index >= total]
    if absent:
        return f"launch.stage_gpus.{need.stage} has {absent[0]}, which is no index into the {total} GPUs that there are"
    eligible = [devices[index] for index in need.chosen if index < len(devices)] or devices
    whole = [name for name in eligible if not name.startswith(MIG)]
    if need.count > 1 and len(whole) < min(need.count, len(eligible)):
        parts = ", ".join(name for name in eligible if name.startswith(MIG))
        return f"{need.stage}: {need.count} processes on MIG devices ({parts}); ranks cannot meet on them; {FEWER}"
    return ""


def _misfits_of_nodes(needs: Sequence[Need], launch: LaunchConfig) -> list[str]:
    found: list[str] = []
    for need in needs:
        resources = launch.cluster.resources_of(need.stage)
        distributed = STAGES[need.stage].distributed
        ranks = launch.processes_of(need.stage) // resources.nodes if distributed else 1
        gpus, where = resources.gpus_per_node, f"launch.{launch.launcher}"
        if gpus and ranks > gpus:
            found.append(
                f"{need.stage}: {ranks} processes on each of {resources.nodes} nodes; {where} asks for {gpus} GPUs on "
                f"each (gpus_per_node); {FEWER}, or ask for more"
            )
    return found
