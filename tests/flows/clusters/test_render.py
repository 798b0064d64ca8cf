"""Files of a cluster: manifests against the schemas of Kubernetes and KubeRay, scripts against bash, wrong profiles."""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cosmos_rl_core.errors import ConfigError
from flows.clusters.render import File, render, write

KUBERNETES = "1.34"
SCHEMA = json.loads((Path(__file__).parent / "ray_cluster.json").read_text(encoding="utf-8"))
COMMAND = ["cosmos-flows", "run", "package:ddrl/2b", "--set", 'a.b="c d"']
RAY = """
[launch]
launcher = "ray"
device = "cuda"
processes = 4
stage_processes = { update = 6 }
environment = { HF_HOME = "/weights/hf" }
elastic = { min = 1, max = 5, stages = ["rollout", "evaluate"] }
[launch.ray]
nodes = 2
gpus_per_node = 2
cpus_per_node = 3
[launch.ray.stages.update]
nodes = 3
[launch.ray.stages.rollout]
labels = { "ray.io/market-type" = "spot" }
accelerator_type = "L4"
[launch.kubernetes]
image = "mine:1"
service_account = "flow"
secrets = ["store"]
memory_gb_per_node = 64
volumes = [{ claim = "weights", path = "/weights" }, { claim = "runs", path = "/runs", read_only = false }]
tolerations = ["nvidia.com/gpu"]
[launch.kubernetes.stages.rollout]
min_nodes = 0
node_selector = { "cloud/spot" = "true" }
[launch.slurm]
setup = ["module load cuda"]
partition = "h100"
time_limit_min = 60
options = ["--account=mine"]
[launch.slurm.stages.rollout]
partition = "l4"
"""


def profile(folder: Path, text: str) -> str:
    """The path of a profile."""
    path = folder / "it's a profile.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def manifests(path: str, *command: str) -> list[dict[str, Any]]:
    """The documents of the stream of YAML, each valid."""
    (file,) = render("kuberay", path, command)
    found = list(yaml.safe_load_all(file.text))
    cluster, *others = found
    jsonschema.validate(cluster, SCHEMA)
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    for other in others:
        kubernetes_validate.validate(other, KUBERNETES, strict=True)
    return found


def test_each_kind_of_nodes_is_a_group_with_the_pods_that_its_stages_need(tmp_path: Path):
    cluster, policy = manifests(profile(tmp_path, RAY))
    main, rollout = cluster["spec"]["workerGroupSpecs"]
    assert (main["groupName"], main["minReplicas"], main["maxReplicas"]) == ("main", 3, 3)
    # Five workers with a GPU each, two on a node.
    assert (rollout["groupName"], rollout["minReplicas"], rollout["maxReplicas"]) == ("rollout", 0, 3)
    assert rollout["resources"] == {"CPU": "6", "GPU": "2", "accelerator_type:L4": "1"}
    assert rollout["labels"] == {"ray.io/market-type": "spot"}
    assert rollout["template"]["spec"]["nodeSelector"] == {"cloud/spot": "true"}
    assert "nodeSelector" not in main["template"]["spec"]
    (container,) = main["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "6", "memory": "64Gi", "nvidia.com/gpu": "2"}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/weights", "/runs"]
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]


def test_pods_whose_number_is_fixed_need_no_autoscaler(tmp_path: Path):
    cluster, _ = manifests(profile(tmp_path, RAY.replace("min_nodes = 0", "")))
    assert cluster["spec"]["enableInTreeAutoscaling"] is False
    assert "autoscalerOptions" not in cluster["spec"]
    assert [group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]] == [3, 3]


def test_the_flow_is_a_pod_without_gpus_that_has_the_profile_and_joins_with_the_token(tmp_path: Path):
    path = profile(tmp_path, RAY)
    _, policy, config, job = manifests(path, *COMMAND)
    assert tomllib.loads(config["data"]["cluster.toml"]) == tomllib.loads(RAY)
    pod = job["spec"]["template"]
    (flow,) = pod["spec"]["containers"]
    assert flow["args"] == COMMAND
    assert {"name": "HF_HOME", "value": "/weights/hf"} in flow["env"]
    assert [*flow["resources"]["limits"]] == ["cpu", "memory"]
    assert pod["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    # The script that joins: what it starts gets the words of the command, one by one.
    said = subprocess.run(
        ["bash", "-c", f"ray() {{ echo joins; }}; {flow['command'][2]}", "flow", "printf", "%s|", *COMMAND],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said == "joins\n" + "".join(f"{word}|" for word in COMMAND)


def test_the_schemas_refuse_unknown_keys(tmp_path: Path):
    cluster, *_, job = manifests(profile(tmp_path, RAY), *COMMAND)
    cluster["spec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(cluster, SCHEMA)
    job["spec"]["backoffLimits"] = 0
    with pytest.raises(kubernetes_validate.ValidationError, match="backoffLimits"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def asked(text: str) -> list[str]:
    """What a script asks Slurm for."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("name", ["package:ray", "package:slurm"])
def test_the_scripts_of_shipped_profiles_are_read_by_bash(name: str):
    for file in render("slurm", name, []):
        subprocess.run(["bash", "-n"], input=file.text, text=True, check=True)
        assert file.text.startswith("#!/bin/bash\n#")
        # Slurm reads no option after the first command.
        assert file.text.rindex("#SBATCH") < file.text.index("set -u")


def test_a_cluster_has_a_script_for_each_kind_of_nodes(tmp_path: Path):
    flow, rollout = render("slurm", profile(tmp_path, RAY), [])
    assert (flow.name, rollout.name) == ("cosmos-flows.sbatch", "cosmos-flows-rollout.sbatch")
    expected = ["--nodes=3", "--gres=gpu:2", "--partition=h100", "--time=60", "--account=mine", "--exclusive"]
    assert {*expected} <= {*asked(flow.text)}
    assert {"--nodes=1", "--array=1-3", "--partition=l4", "--time=60"} <= {*asked(rollout.text)}
    assert "--labels=ray.io/market-type=spot" in rollout.text
    assert "--labels" not in flow.text
    assert "\nmodule load cuda\n" in flow.text
    for file in (flow, rollout):
        subprocess.run(["bash", "-n"], input=file.text, text=True, check=True)


def test_a_job_of_slurm_has_the_resources_of_the_largest_stage(tmp_path: Path):
    text = "[launch]\nlauncher = 'slurm'\nprocesses = 2\nstage_processes = { update = 8 }\n[launch.slurm]\n"
    text += "gpus_per_node = 2\n[launch.slurm.stages.update]\nnodes = 4\ncpus_per_node = 6\n"
    (file,) = render("slurm", profile(tmp_path, text), [])
    assert {"--nodes=4", "--gres=gpu:2", "--cpus-per-task=6"} <= {*asked(file.text)}
    assert "export SRUN_CPUS_PER_TASK=6" in file.text


def test_all_mistakes_of_a_profile_are_named_at_once(tmp_path: Path):
    wrong = RAY.replace('image = "mine:1"', "").replace("[launch.ray]", '[launch.ray]\naddress = "here:1"')
    wrong = wrong.replace("min_nodes = 0", "min_nodes = 9") + "[launch.kubernetes.stages.update]\nmin_nodes = 1\n"
    wrong += "[launch.slurm.stages.rolout]\npartition = 'l4'\ntime_limit_min = 4\n"
    with pytest.raises(ConfigError) as error:
        render("kuberay", profile(tmp_path, wrong), [])
    for words in (
        "launch.kubernetes.image is missing",
        "launch.ray.address = 'here:1'; leave it out",
        "launch.kubernetes.stages.rollout.min_nodes = 9 is above the 3 nodes that stages need",
        "launch.kubernetes.stages.update asks for other nodes, which Ray could not tell from the rest",
    ):
        assert words in str(error.value)
    with pytest.raises(ConfigError) as error:
        render("slurm", profile(tmp_path, wrong), ["cosmos-flows", "run"])
    for words in (
        "sbatch cosmos-flows.sbatch COMMAND",
        "launch.slurm.stages.rolout names no stage; known: ",
        "launch.slurm.stages.rolout.time_limit_min = 4: Slurm warns 5 minutes before; give 15",
    ):
        assert words in str(error.value)


def test_a_profile_of_one_machine_has_no_cluster():
    with pytest.raises(ConfigError, match="launcher = 'local' needs no batch script"):
        render("slurm", "package:local", [])
    with pytest.raises(ConfigError, match=r"launcher = 'local' has no Ray cluster(.|\n)*image is missing"):
        render("kuberay", "package:local", [])
    with pytest.raises(ConfigError, match="launcher = 'slurm' has no Ray cluster"):
        render("kuberay", "package:slurm", [])
    with pytest.raises(ConfigError, match="unknown scheduler 'pbs'; known: kuberay, slurm"):
        render("pbs", "package:ray", [])


def test_no_file_is_overwritten(tmp_path: Path):
    write([File("a", "1")], tmp_path / "new")
    with pytest.raises(ConfigError, match=r"new/a exists already; delete it, or name another folder"):
        write([File("b", "2"), File("a", "2")], tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]
    assert (tmp_path / "new" / "a").read_text() == "1"
