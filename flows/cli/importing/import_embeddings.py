"""The command that converts pickled embeddings."""

from typing import Annotated

from typer import Argument

from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found
from flows.operations import import_embeddings as operation


def import_embeddings(
    folder: Annotated[str, Argument(help="A folder with t5_xxl/ or text_embedding/, and metas/")],
    directory: Annotated[str, Argument(help="A new directory for the safetensors files")],
    as_json: JsonOption = False,
) -> None:
    """Convert text embeddings that cosmos-rl's scripts pickled to safetensors, without unpickling them.

    Examples:
        cosmos-flows import-embeddings datasets/cosmos_nemo_assets embeddings
    """
    found = operation.import_embeddings(folder, directory)
    print_found(found, [str(found)], as_json=as_json)
