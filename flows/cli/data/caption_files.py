"""The command that writes captions into files."""

from typing import Annotated

from typer import Argument, Option

from flows.cli.base.command import OwnExitCode
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found, say
from flows.operations import caption_files as operation


def caption_files(
    folder: Annotated[str, Argument(help="Folder with videos/ or images/")],
    prompt: Annotated[str, Option(help="The caption")],
    is_image: Annotated[bool, Option("--is-image", help="Caption images/*.jpg, not videos/*.mp4")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write one caption into metas/ for each video or image that has none.

    Exits with 2 if videos/ is missing, with 1 if images/ is, as the script of cosmos-predict2.5 means to.

    Examples:
        cosmos-flows data caption-files datasets/cosmos_nemo_assets --prompt "A video of sks teal robot."
    """
    try:
        found = operation.write_captions(folder, prompt, is_image=is_image)
    except operation.NoMediaError as error:
        say(error, err=True)
        raise OwnExitCode(error.own_exit_code) from error
    print_found(found, found.lines(), as_json=as_json)
