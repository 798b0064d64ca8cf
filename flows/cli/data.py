"""Commands for datasets."""

from importlib import import_module
from typing import Annotated

import typer
from typer import Argument, Option

from flows.cli.command import (
    JsonOption,
    OwnExitCode,
    StoreOption,
    command,
    print_json,
    print_parts,
    say,
)
from flows.defaults import DEFAULT_STORE, GRACE_H, SNAPSHOTS_KEPT

data_app = typer.Typer(no_args_is_help=True, help="Look at datasets, delete what nothing reads, write captions.")
RECIPE = "Keep what this recipe would read of the newest snapshots, too; may be repeated"
OLDER_THAN = "Hours: keep what was written since then. 0 only if nothing works on the store"
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


@command(data_app, "gc")
def data_gc(
    store: StoreOption = DEFAULT_STORE,
    keep: Annotated[int, Option(min=1, help="Newest snapshots of each dataset that stay")] = SNAPSHOTS_KEPT,
    recipe: Annotated[list[str] | None, Option(help=RECIPE)] = None,
    older_than: Annotated[float, Option(min=0, help=OLDER_THAN)] = GRACE_H,
    dry_run: Annotated[bool, Option(help="Print what would be deleted; change nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete prepared data that no run and no kept snapshot reads: parts, captions, embeddings, latents.

    A run reads them until its folder in the store is removed. Runs and preparations may work meanwhile.

    Examples:
        cosmos-flows data gc --dry-run
        cosmos-flows data gc --keep 1 --store s3://bucket/prefix
        cosmos-flows data gc --recipe my_sft.toml
    """
    collect = import_module("flows.garbage.datasets").gc_datasets
    found = collect(store, keep=keep, recipes=recipe or (), dry_run=dry_run, older_than_h=older_than)
    print_json(found) if as_json else print_parts(*found.lines())


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
        say(error, err=True)
        raise OwnExitCode(error.own_exit_code) from error
