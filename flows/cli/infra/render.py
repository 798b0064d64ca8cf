"""The command that writes batch scripts and manifests, which make a cluster."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found

SCHEDULER = Argument(metavar="slurm|kuberay", help="What gives the nodes")
PROFILE = Argument(help="Cluster profile: a TOML file, or package:ray")
COMMAND = Argument(metavar="[-- COMMAND]", help="With kuberay: the command of the flow's pod")
OUT = Option(help="Folder for the files; none is overwritten. Default: print them")


def render(
    scheduler: Annotated[str, SCHEDULER],
    profile: Annotated[str, PROFILE],
    command: Annotated[list[str] | None, COMMAND] = None,
    out: Annotated[Path | None, OUT] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the batch scripts of Slurm, or the manifests of KubeRay, for the nodes of a profile.

    Examples:
        cosmos-flows cluster render slurm package:slurm --out jobs
        cosmos-flows cluster render kuberay package:ray -- cosmos-flows run package:ddrl/2b --store s3://bucket/runs
    """
    rendering: Any = import_module("flows.clusters.render")  # reads the contracts of all stages
    files = rendering.render(scheduler, profile, command or [])
    if out is not None:
        rendering.write(files, out)
    rows = [{"name": file.name, "path": str(out / file.name) if out else None, "text": file.text} for file in files]
    lines = (row["path"] or row["text"].rstrip("\n") for row in rows)
    print_found(rows, lines, as_json=as_json)
