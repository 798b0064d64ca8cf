"""Run one stage from its request: ``python -m stages.runner request.json``, also under ``torch.distributed.run``.

Validates, runs, and commits on rank 0, or leaves ``error.<rank>.json`` beside the request.
Exit codes: 0 done (or already standing), 64 config, 65 data, 75 unavailable, 70 anything else.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cosmos_rl_core import outside_plugins, store
from cosmos_rl_core.errors import ConfigError, CosmosRLError, NoSpaceError
from cosmos_rl_core.numerics import differences, numerics
from cosmos_rl_core.parallelism import ALONE, Parallelism
from cosmos_rl_core.processes import die_with_parent
from stages.artifacts import Attempt, layout_halvings, read_manifest
from stages.context import Alone, Context, Ranks
from stages.contracts import Request
from stages.garbage import clear
from stages.manifest import Manifest
from stages.outcome import Outcome, failure_of
from stages.records import FileEntry, Pinned

LAST_WORDS_S = 10.0
"""How long a rank that only lost another one waits for that one's error file before it ends."""


@dataclass(frozen=True)
class Settings:
    """How to run, as opposed to what: nothing here is part of a Request."""

    outcome: Path
    threads: int
    deterministic: bool
    numerics_record: str | None
    allow_numerics_change: bool
    halve: bool = False
    parallelism: Parallelism = ALONE
    rank_timeout_s: float = 3600.0
    tf32: bool = False


def main(argv: list[str] | None = None) -> int:
    """Run the stage; the exit code says how it ended."""
    die_with_parent()
    args = _parser().parse_args(argv)
    path = Path(args.request)
    outcome = Outcome(Path(args.outcome) if args.outcome else path.parent, int(os.environ.get("RANK", "0")))
    try:
        execute(_read(path), _settings(args, outcome.directory), outcome)
    except Exception as error:
        failure = failure_of(error, collective=_is_collective(error))
        try:
            outcome.failed(failure)
        except OSError as full:  # the reason still goes to the log, and the kind into the exit code
            print(f"the error file could not be written: {full}", file=sys.stderr)
        print(
            failure.traceback if failure.kind == "crash" else f"{failure.kind}: {failure.message}",
            file=sys.stderr,
            flush=True,
        )
        if failure.collective:
            # When this rank ends, torchrun ends the others of its node, whose reason may be still to come.
            outcome.wait_for_reason(LAST_WORDS_S)
        return failure.exit_code
    return 0


def _read(path: Path) -> Request:
    """The Request. The plugins that it names are imported first, because they validate their own settings."""
    data = path.read_bytes()
    outside_plugins.use(outside_plugins.named_in(data), verify=True)
    return Request.model_validate_json(data)


def _settings(args: argparse.Namespace, outcome: Path) -> Settings:
    return Settings(
        outcome=outcome,
        threads=args.threads,
        deterministic=not args.nondeterministic,
        numerics_record=args.numerics_record,
        allow_numerics_change=args.allow_numerics_change,
        halve=args.halve,
        parallelism=Parallelism(
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            dp_shard_size=args.dp_shard_size,
            cp_size=args.cp_size,
            fsdp_offload=args.fsdp_offload,
            compile=args.compile,
        ),
        rank_timeout_s=args.rank_timeout_s,
        tf32=args.tf32,
    )


def execute(request: Request, settings: Settings, outcome: Outcome) -> Manifest:
    """Make the Request's artifact stand, or find that it does; returns its manifest on every rank."""
    started_s = time.monotonic()
    outcome.progress("starting", 0, 1)
    if settings.threads < 1:
        raise ConfigError(f"threads must be at least 1, got {settings.threads}")
    require_own_version(request)
    ranks, found = _start(request, settings)
    begun = Attempt.begin(request, outcome.note) if ranks.rank == 0 else None
    halvings = 0 if begun is None else layout_halvings(request.slot, begun[0]) + settings.halve
    generation, attempt_id, stands, halvings = ranks.broadcast(
        begun and [begun[0], begun[1], begun[2] is not None, halvings]
    )
    if not stands:
        changes = _check_numerics(request.stage, found, settings, outcome) if ranks.rank == 0 else []
        attempt = Attempt(request, found, generation, attempt_id)
        attempt.use_layout({}, generation)
        with _cleared_on_a_full_store(request, attempt):
            stage = importlib.import_module(f"stages.{request.stage}")
            summary = stage.run(request, Context(attempt, ranks, outcome, halvings)) or {}
            if attempt.adopted:
                outcome.note(f"{attempt.adopted} finished shards of an earlier attempt were adopted")
            files = _gather_files(ranks, attempt)
            if ranks.rank == 0:
                summary["seconds"] = round(time.monotonic() - started_s, 3)
                summary |= {"numerics_changed": ", ".join(changes)} if changes else {}
                # Before the commit: a kill between the two must not leave an artifact whose numerics nobody is held to.
                if settings.numerics_record is not None:
                    store.put_if_absent(settings.numerics_record, Pinned(stage=request.stage, numerics=found).sealed())
                attempt.commit(files, summary, outcome.note)
        generation = ranks.broadcast(attempt.generation)
    # Not after an error: leaving a group whose other ranks wait can take for ever, and would keep the error back.
    ranks.close()
    manifest = read_manifest(request.slot, generation)
    assert manifest is not None
    return manifest


@contextmanager
def _cleared_on_a_full_store(request: Request, attempt: Attempt) -> Iterator[None]:
    """Delete what a try has written if there is no space for the rest: else every try would take some more."""
    try:
        yield
    except NoSpaceError:
        with suppress(CosmosRLError):
            clear(request.slot, attempt.id)
        raise


def require_own_version(request: Request) -> None:
    """Raise :class:`ConfigError` if this code makes another version of the stage than is asked for."""
    if request.version != request.config.version:
        raise ConfigError(
            f"this code makes version {request.config.version} of {request.stage}, asked for is version "
            f"{request.version}: use the code that the run began with, or give the run's command with --remake"
        )


def _gather_files(ranks: Ranks, attempt: Attempt) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for rank_files in ranks.gather({name: entry.model_dump() for name, entry in attempt.files.items()}):
        for name, entry in rank_files.items():
            if name in files and files[name].sha256 != entry["sha256"]:
                raise RuntimeError(f"two ranks wrote different bytes for {name}")
            files[name] = FileEntry.model_validate(entry)
    return files


def _start(request: Request, settings: Settings) -> tuple[Any, dict[str, Any]]:
    if not request.config.torch:
        return Alone(), numerics()
    # Only here, so that a light stage never loads it.
    torch_runtime = importlib.import_module("stages.torch_runtime")
    ranks = torch_runtime.start(
        threads=settings.threads,
        deterministic=settings.deterministic,
        tf32=settings.tf32,
        timeout_s=settings.rank_timeout_s,
        parallelism=settings.parallelism,
    )
    return ranks, torch_runtime.numerics(ranks, getattr(request.config, "param_dtype", "float32"))


def _check_numerics(stage: str, found: dict[str, Any], settings: Settings, outcome: Outcome) -> list[str]:
    """Compare with what the first artifact of this stage in the run was made under; other stages have their own.

    Returns the changes that are allowed. Raises :class:`ConfigError` if they are not.
    """
    if settings.numerics_record is None:
        return []
    pinned = Pinned.read(settings.numerics_record, stage)
    changes = [] if pinned is None else differences(pinned.numerics, found)
    if changes and not settings.allow_numerics_change:
        raise ConfigError(
            f"this run began {stage} under other numerics ({', '.join(changes)}); its results would not be those of an "
            "uninterrupted run. Continue under the old ones, or accept the change with --allow-numerics-change"
        )
    if changes:
        outcome.note(f"numerics changed, as allowed: {', '.join(changes)}")
    return changes


def _is_collective(error: BaseException) -> bool:
    distributed = sys.modules.get("cosmos_rl_core.distributed")
    return distributed is not None and distributed.is_collective(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.runner", description="Run one stage from its request.json.")
    parser.add_argument("request", help="path of the request (JSON)")
    parser.add_argument("--outcome", help="directory for status.json and error.<rank>.json (default: the request's)")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of each process; changes the last bits of results"
    )
    parser.add_argument(
        "--nondeterministic", action="store_true", help="allow kernels whose bits differ from run to run"
    )
    parser.add_argument("--tf32", action="store_true", help="round factors of float32 products to 10 bits on GPUs")
    parser.add_argument("--numerics-record", help="URL where the run's numerics of this stage are pinned")
    parser.add_argument(
        "--allow-numerics-change", action="store_true", help="go on although the numerics differ from the pinned ones"
    )
    parser.add_argument(
        "--rank-timeout-s", type=float, default=3600.0, help="how long a rank waits for the others, in seconds"
    )
    parser.add_argument("--dp-shard-size", type=int, default=1, help="how many ranks share one copy of the weights")
    parser.add_argument("--cp-size", type=int, default=1, help="how many ranks share the tokens of a video")
    parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
    parser.add_argument("--fsdp-offload", action="store_true", help="shared weights rest in the CPU's memory")
    parser.add_argument(
        "--halve",
        action="store_true",
        help="half as many samples in memory at once as the last attempt had",
    )
    return parser


def leave(code: int) -> NoReturn:
    """End this process with an exit code.

    After a failure nothing is cleaned up: work of NCCL in flight, or a thread that waits, could keep the exit back.
    """
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)


if __name__ == "__main__":
    leave(main())
