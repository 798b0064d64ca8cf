"""The command that deletes garbage of a run."""

from typing import Annotated

from typer import Option

from flows.cli.base.options import DryRunOption, JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE, GRACE_H
from flows.garbage import run as operation

OLDER_THAN = Option(min=0, help="Hours: keep files of attempts that wrote since then")


def gc(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    superseded: Annotated[bool, Option(help="Also delete files of ended generations")] = False,
    older_than: Annotated[float, OLDER_THAN] = GRACE_H,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete files of killed attempts that belong to no artifact. Refused while a process works on the run.

    Works on a full disk. Also deletes folders of killed flows in this machine's TMPDIR.

    Examples:
        cosmos-flows gc nft-1a2b3c4d --dry-run
        cosmos-flows gc nft-1a2b3c4d --superseded
        cosmos-flows gc nft-1a2b3c4d --dry-run --json
    """
    found = operation.gc(store, run_id, superseded=superseded, dry_run=dry_run, older_than_h=older_than)
    print_found(found, found.lines(), as_json=as_json)
