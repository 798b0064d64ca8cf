"""Commands for datasets."""

from importlib import import_module
from typing import Annotated

import typer
from typer import Argument, Option

from flows.cli.command import OwnExitCode, StoreOption, command, print_parts
from flows.defaults import DEFAULT_STORE

data_app = typer.Typer(no_args_is_help=True, help="Look at datasets, and write captions into folders.")
SNAPSHOT = "Name of a dataset, or NAME@NUMBER of a snapshot; default: the newest"


@command(data_app, "show")
def data_show(
    snapshot: Annotated[str, Argument(help=SNAPSHOT)],
    store: StoreOption = DEFAULT_STORE,
    output: Annotated[str | None, Option(help="Folder for the pages; default: NAME@NUMBER")] = None,
    first: Annotated[int, Option(min=1, max=1000, help="Items on a page")] = 100,
    all_pages: Annotated[bool, Option("--all", help="Write the pages after the first, too")] = False,
) -> None:
    """Write HTML pages with the media of a snapshot, their captions and sizes, and what was left out.

    Examples:
        cosmos-flows data show clips
        cosmos-flows data show clips@3 --store s3://bucket/prefix --all
    """
    operation = import_module("flows.operations.show_data")
    print_parts(*operation.show(store, snapshot, output, first, all_pages=all_pages))


@command(data_app, "caption-files")
def data_caption_files(
    folder: Annotated[str, Argument(help="Folder with videos/ or images/")],
    prompt: Annotated[str, Option(help="The caption")],
    is_image: Annotated[bool, Option("--is-image", help="Caption images/*.jpg, not videos/*.mp4")] = False,
) -> None:
    """Write one caption into metas/ for each video or image that has none.

    Exits with 2 if videos/ is missing, with 1 if images/ is, as the script of cosmos-predict2.5 means to.

    Examples:
        cosmos-flows data caption-files datasets/cosmos_nemo_assets --prompt "A video of sks teal robot."
    """
    operation = import_module("flows.operations.caption_files")
    try:
        print_parts(*operation.write_captions(folder, prompt, is_image=is_image))
    except operation.NoMediaError as error:
        typer.echo(str(error), err=True)
        raise OwnExitCode(error.own_exit_code) from error
