"""The command that deletes prepared data."""

from typing import Annotated

from typer import Option

from flows.cli.base.options import DryRunOption, JsonOption, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE, GRACE_H, SNAPSHOTS_KEPT
from flows.garbage.datasets import gc_datasets

RECIPE = "Keep what this recipe would read of the newest snapshots, too; may be repeated"
OLDER_THAN = "Hours: keep what was written since then. 0 only if nothing works on the store"


def gc(
    store: StoreOption = DEFAULT_STORE,
    keep: Annotated[int, Option(min=1, help="Newest snapshots of each dataset that stay")] = SNAPSHOTS_KEPT,
    recipe: Annotated[list[str] | None, Option(help=RECIPE)] = None,
    older_than: Annotated[float, Option(min=0, help=OLDER_THAN)] = GRACE_H,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete prepared data that no run and no kept snapshot reads: parts, captions, embeddings, latents.

    A run reads them until its folder in the store is removed. Runs and preparations may work meanwhile.

    Examples:
        cosmos-flows data gc --dry-run
        cosmos-flows data gc --keep 1 --store s3://bucket/prefix
        cosmos-flows data gc --recipe my_sft.toml
    """
    found = gc_datasets(store, keep=keep, recipes=recipe or (), dry_run=dry_run, older_than_h=older_than)
    print_found(found, found.lines(), as_json=as_json)
