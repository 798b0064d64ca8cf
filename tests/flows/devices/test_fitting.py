"""Whether stages fit the devices: told before anything starts, and waves made in turns. No test needs a GPU."""

import pytest
from pydantic import ValidationError

from cosmos_rl_core.config.launch import LaunchConfig
from flows.devices import fitting
from flows.devices.devices import VISIBLE, device_of

GPUS = [f"GPU-{n}" for n in range(8)]
JUDGES = ["judge", "judge"]
EIGHT = LaunchConfig(processes=8)


def launch(**settings: object) -> LaunchConfig:
    return LaunchConfig.model_validate(settings)


def slurm(**settings: object) -> LaunchConfig:
    nodes = {"nodes": 2, "gpus_per_node": 8}
    return launch(**{"launcher": "slurm", "processes": 16, "slurm": nodes} | settings)


@pytest.mark.parametrize(
    ("stages", "config", "count", "expected"),
    [
        (JUDGES, EIGHT, 8, [[0], [1]]),
        (JUDGES, EIGHT, 16, [[0, 1]]),
        (JUDGES, EIGHT, None, [[0, 1]]),
        (["judge", "reward", "judge", "reward"], EIGHT, 8, [[0, 1], [2, 3]]),
        (["judge"] * 5, launch(processes=8, stage_processes={"judge": 3}), 8, [[0, 1], [2, 3], [4]]),
        (["update", "fragment", "rollout"], EIGHT, 8, [[0, 1], [2]]),
        (["update", "fragment", "rollout"], launch(processes=4), 8, [[0, 1, 2]]),
        (["update", "rollout"], launch(stage_gpus={"update": [0, 1], "rollout": [2]}), 8, [[0, 1]]),
        (["update", "rollout"], launch(stage_gpus={"update": [0, 1], "rollout": [1]}), 8, [[0], [1]]),
        (JUDGES, launch(stage_gpus={"judge": [3]}), None, [[0], [1]]),
        (JUDGES, EIGHT, 4, [[0], [1]]),
        (JUDGES, slurm(), None, [[0], [1]]),
        (["reward", "judge", "reward"], slurm(), None, [[0, 1, 2]]),
        (JUDGES, slurm(slurm={"nodes": 2}), None, [[0, 1]]),
        (JUDGES, slurm(slurm={"nodes": 2}, device="cuda"), None, [[0], [1]]),
        (["update", "rollout"], slurm(), None, [[0], [1]]),
    ],
)
def test_a_wave_is_made_in_its_order_in_turns_that_fit(
    stages: list[str], config: LaunchConfig, count: int | None, expected: list[list[int]]
):
    assert fitting.turns(stages, config, count) == expected


def test_the_smallest_number_of_devices_that_any_source_names_counts():
    assert fitting.most(launch(gpus=8), GPUS[:4]) == 4
    assert fitting.most(launch(gpus=2), GPUS, gpu_slots=4) == 2
    assert fitting.most(launch(gpu_limit="gpus"), [], gpu_slots=4) == 4
    assert fitting.most(launch(), []) is None
    assert fitting.most(launch(mode="warm"), GPUS[:1]) == 1
    assert fitting.most(launch(mode="warm", device="cpu"), GPUS[:1]) is None
    assert fitting.most(launch(mode="warm", device="cpu", resident_gb=1), GPUS[:1]) == 1


def test_all_stages_that_do_not_fit_are_named_at_once():
    config = launch(processes=8, stage_processes={"update": 16}, stage_gpus={"encode": [0, 1, 2, 3, 4, 5, 6, 9]})
    found = fitting.misfits(["policy", "embed", "encode", "rollout", "reward", "update"], config, GPUS[:4])
    assert [line.split("; ")[0] for line in found] == [
        "embed, encode, rollout: 8 GPUs each, one for each process",
        "update: 16 GPUs, one for each process",
        "launch.stage_gpus.encode has 4, which is no index into the 4 GPUs that there are",
    ]
    assert "4 visible: GPU-0, GPU-1, GPU-2, GPU-3" in found[0]
    assert fitting.misfits(["rollout"], config, None, gpu_slots=4) == [
        f"rollout: 8 GPUs, one for each process; the limit None has 4 slots; {fitting.FEWER}"
    ]
    assert fitting.misfits(["rollout"], launch(gpus=8, processes=8), None) == []
    assert "launch.gpus = 4" in fitting.misfits(["rollout"], launch(gpus=4, processes=8), None)[0]
    assert fitting.misfits(["rollout"], config, []) == []


def test_a_machine_without_gpus_can_rehearse_and_plan_a_profile_of_gpus_but_not_run_it():
    config = launch(device="cuda", gpus=8, processes=8)
    (mistake,) = fitting.misfits(["rollout"], config, [])
    assert mistake.startswith("launch.device = 'cuda', and this machine shows no GPU")
    assert fitting.misfits(["reward"], config, []) == []
    assert fitting.misfits(["rollout"], config, None) == []
    assert fitting.misfits(["rollout"], config.model_copy(update={"device": "cpu"}), []) == []


@pytest.mark.parametrize(
    ("config", "devices", "refused"),
    [
        (launch(processes=2), ["MIG-a", "MIG-b"], True),
        (launch(processes=2), ["MIG-a", "GPU-a", "GPU-b"], False),
        (launch(processes=2), ["MIG-a", "GPU-a"], True),
        (launch(stage_gpus={"rollout": [0, 1]}), ["MIG-a", "MIG-b", "GPU-a", "GPU-b"], True),
        (launch(stage_gpus={"rollout": [2, 3]}), ["MIG-a", "MIG-b", "GPU-a", "GPU-b"], False),
        (launch(), ["MIG-a", "MIG-b"], False),
        (launch(processes=2, device="cpu"), ["MIG-a", "MIG-b"], True),
    ],
)
def test_several_ranks_on_parts_of_gpus_are_refused(config: LaunchConfig, devices: list[str], refused: bool):
    found = fitting.misfits(["policy", "rollout"], config, devices)
    assert [line.split(" (")[0] for line in found] == ["rollout: 2 processes on MIG devices"] * refused


def test_nodes_that_ask_for_fewer_gpus_than_they_start_processes_are_refused():
    found = fitting.misfits(["policy", "rollout", "update"], slurm(slurm={"nodes": 4, "gpus_per_node": 2}), None)
    assert [line.split("; ")[0] for line in found] == [
        f"{stage}: 4 processes on each of 4 nodes" for stage in ("rollout", "update")
    ]
    assert fitting.misfits(["rollout"], slurm(), None) == []
    # GPUs may come from options of sbatch.
    assert fitting.misfits(["rollout"], slurm(slurm={"nodes": 2}, device="cuda"), None) == []


@pytest.mark.parametrize(
    ("config", "devices", "expected"),
    [
        (launch(), [], None),
        (launch(), GPUS, "cuda"),
        (launch(device="cpu"), GPUS, "cpu"),
        (launch(device="cuda"), [], "cuda"),
        (launch(gpus=8), [], "cuda"),
        (launch(gpu_limit="gpus"), [], "cuda"),
        (launch(stage_gpus={"update": [0]}), [], "cuda"),
        (launch(mode="warm"), GPUS, "cuda"),
        (launch(mode="warm"), [], "cpu"),
        (launch(mode="warm", device="cuda"), [], "cuda"),
        (slurm(), [], "cuda"),
        (slurm(slurm={"nodes": 2}), GPUS, None),
    ],
)
def test_ranks_compute_on_gpus_if_the_profile_names_some(
    config: LaunchConfig, devices: list[str], expected: str | None
):
    assert device_of("rollout", config, devices) == expected


@pytest.mark.parametrize(
    ("config", "on_cpu", "on_gpu"),
    [
        (launch(), "cold", "cold"),
        (launch(resident_gb=1), "cold", "cold"),
        (launch(mode="warm"), "forked", "resident"),
        (launch(mode="warm", resident_gb=0), "forked", "cold"),
        (launch(mode="warm", resident_gb=1), "resident", "resident"),
        (launch(mode="warm", resident_gb=1, compile=True), "resident", "resident"),
    ],
)
def test_a_profile_decides_whether_processes_stay_on_cpu_and_on_gpus(config: LaunchConfig, on_cpu: str, on_gpu: str):
    assert (config.ranks_on("cpu"), config.ranks_on("cuda")) == (on_cpu, on_gpu)


def test_gpus_of_warm_forks_and_of_other_launchers_are_refused():
    with pytest.raises(ValidationError, match="forks stages, which use no GPU"):
        launch(mode="warm", device="cpu", stage_gpus={"update": [0]})
    assert launch(mode="warm", device="cpu", stage_gpus={"update": [0]}, resident_gb=1).stage_gpus == {"update": (0,)}
    with pytest.raises(ValidationError, match="gpus needs launcher = 'local'"):
        slurm(gpus=8)


def test_a_plan_counts_this_machines_devices_only_if_the_profile_gives_no_number(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(VISIBLE, "GPU-here")
    for config, planned, run in (
        (launch(), ["GPU-here"], ["GPU-here"]),
        (launch(gpus=8), None, ["GPU-here"]),
        (launch(mode="warm"), ["GPU-here"], ["GPU-here"]),
        (launch(mode="warm", device="cpu"), None, None),
        (slurm(), None, None),
    ):
        assert fitting.devices_for(config, runs_here=False) == planned
        assert fitting.devices_for(config, runs_here=True) == run
    monkeypatch.setenv(VISIBLE, "")
    assert fitting.devices_for(launch(), runs_here=False) is None
    assert fitting.devices_for(launch(), runs_here=True) == []
