"""The command that invalidates a stage."""

from typing import Annotated

from typer import Option

from flows.cli.base.options import DryRunOption, JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE
from flows.operations import rerun as operation

STAGE = (
    "policy embed encode embed-held-out encode-held-out rollout reward-NAME update finetune export "
    "validate evaluate evaluate-NAME report, or another name that status shows"
)
ITERATION = "Number of the iteration, from 0; for export and evaluate the policy version"


def rerun(
    run_id: RunArgument,
    stage: Annotated[str, Option(help=STAGE)],
    iteration: Annotated[int | None, Option(min=0, help=ITERATION)] = None,
    store: StoreOption = DEFAULT_STORE,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Invalidate one stage, finished or not, so that the next run makes it again. No file is deleted.

    Examples:
        cosmos-flows rerun nft-1a2b3c4d --stage reward-ocr --iteration 7
        cosmos-flows rerun nft-1a2b3c4d --stage evaluate --iteration 16 --dry-run
        cosmos-flows rerun nft-1a2b3c4d --stage report
    """
    found = operation.rerun(store, run_id, stage, iteration, dry_run=dry_run)
    print_found(found, found.lines(), as_json=as_json)
