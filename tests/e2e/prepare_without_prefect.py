"""``preprocess`` as ``cosmos-flows`` does it, with the same waves, but without Prefect and its server."""

import sys
from contextlib import closing

from cosmos_rl_core.errors import CosmosRLError
from cosmos_rl_core.recipes.dataset import read_dataset
from flows.operations.preprocess import outcome_of, preprocess
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts import snapshots
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest


def main(dataset: str, store: str) -> None:
    """Prepare a dataset, each stage once at most."""
    config = read_dataset(dataset)
    shown = Display()
    with closing(Waves(snapshots.root_of(store, config.name), config.launch, shown)) as waves:

        def launch(name: str, request: Request) -> list[Manifest]:
            skipped = current_manifest(request) is not None
            if not skipped:
                waves.make(name, [request])
            manifest = current_manifest(request)
            assert manifest is not None
            shown.done(name, [manifest], skipped=skipped)
            return [manifest]

        shown.note(outcome_of(*preprocess(config, store, launch)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except CosmosRLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
