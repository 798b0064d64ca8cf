"""The command that copies weights of a run."""

from typing import Annotated

from typer import Argument, Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE
from flows.library import exports
from flows.library.exports import Format


def export(
    run_id: RunArgument,
    directory: Annotated[str, Argument(help="Directory for the files")],
    store: StoreOption = DEFAULT_STORE,
    policy: Annotated[int | None, Option(min=0, help="Policy version; default: the newest that was exported")] = None,
    best: Annotated[bool, Option("--best", help="The best by validation.best_by of the recipe")] = False,
    every: Annotated[bool, Option("--all", help="Every exported version")] = False,
    form: Annotated[Format, Option("--format", help="For diffusers, or a LoRA that ComfyUI reads")] = "diffusers",
    as_json: JsonOption = False,
) -> None:
    """Copy a run's newest exported weights, or other versions, to a directory that diffusers can load.

    Examples:
        cosmos-flows export nft-1a2b3c4d out
        cosmos-flows export nft-1a2b3c4d out --best
        cosmos-flows export nft-1a2b3c4d ComfyUI/models/loras --format comfyui
    """
    if (policy is not None) + best + every > 1:
        raise ConfigError("--policy, --best and --all exclude each other: give one of them")
    which = policy if policy is not None else "best" if best else "all" if every else "newest"
    found = exports.export(store, run_id, directory, which, form)
    print_found(found, found.lines(), as_json=as_json)
