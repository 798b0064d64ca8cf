"""The command that converts weights of rewards."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found


def prepare(
    reward: Annotated[str, Argument(help="The reward: hpsv2, aesthetic, ...")],
    source: Annotated[Path, Argument(help="The published file")],
    target: Annotated[Path, Argument(help="The folder to make")],
    as_json: JsonOption = False,
) -> None:
    """Convert published weights of a reward to safetensors, once. Nothing else reads a pickle.

    Examples:
        cosmos-flows reward-service prepare hpsv2 HPS_v2.1_compressed.pt weights/hpsv2
        cosmos-flows reward-service prepare aesthetic sac+logos+ava1-l14-linearMSE.pth weights/aesthetic
    """
    files: Any = import_module("cosmos_rl_core.rewards._files.scores")  # brings pandas along
    files.prepare(reward, source, target)
    told = {"reward": reward, "source": str(source), "directory": str(target)}
    print_found(told, [f"{target}: the weights of {reward} from {source}"], as_json=as_json)
