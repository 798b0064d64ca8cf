"""Plan, run, watch and repeat post-training.

Exit codes:
0 success
1 a check of `check-plugin` failed
64 wrong settings or command line
65 wrong data
70 another failure
75 something does not answer or is busy: try the same command later
76 at its limit of device hours: train.max_gpu_hours
77 suspended by a warning, until `cosmos-flows approve`
78 every setting of a what-if ended: its policies went too far from the rollouts
130, 143 ended by Ctrl-C, by SIGTERM or `stop`: the same command continues
"""

import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option

from cosmos_rl_core.errors import ConfigError, CosmosRLError
from flows.cli.base.command import PROGRAM, OwnExitCode
from flows.cli.base.lazy import LazyGroup
from flows.cli.base.printing import accept_all_characters, say

DATA, KEEP = "Data and rewards", "Keep the house"


class DataCommands(LazyGroup):
    """Commands for datasets."""

    modules = {"": ("flows.cli.data.show", "flows.cli.data.gc", "flows.cli.data.caption_files")}


class RewardCommands(LazyGroup):
    """Commands of the reward service. The first word may be a file of settings, which is then served."""

    modules = {"": ("flows.cli.rewards.serve", "flows.cli.rewards.prepare", "flows.cli.rewards.check")}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command ``serve`` before arguments that name none."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["serve", *args]
        return super().parse_args(ctx, args)


class InfraCommands(LazyGroup):
    """Commands for what runs need."""

    modules = {"": ("flows.cli.infra.init", "flows.cli.infra.check")}


class ClusterCommands(LazyGroup):
    """Commands for clusters."""

    modules = {"": ("flows.cli.infra.render",)}


class Commands(LazyGroup):
    """All commands by the titles that the help lists them under."""

    modules = {
        "Make and end runs": (
            "flows.cli.making.run",
            "flows.cli.making.plan",
            "flows.cli.making.rerun",
            "flows.cli.making.fork",
            "flows.cli.making.rescore",
            "flows.cli.making.what_if",
            "flows.cli.making.study",
            "flows.cli.making.decode",
            "flows.cli.making.approve",
            "flows.cli.making.stop",
        ),
        "Look at runs": (
            "flows.cli.looking.status",
            "flows.cli.looking.runs",
            "flows.cli.looking.logs",
            "flows.cli.looking.report",
            "flows.cli.looking.cost",
            "flows.cli.looking.export",
        ),
        "Prove and compare": (
            "flows.cli.proving.audit",
            "flows.cli.proving.sign",
            "flows.cli.proving.replay",
            "flows.cli.proving.diff",
        ),
        DATA: ("flows.cli.data.preprocess", "flows.cli.rewards.score"),
        KEEP: (
            "flows.cli.keeping.check_plugin",
            "flows.cli.keeping.schema",
            "flows.cli.keeping.gc",
            "flows.cli.keeping.shipped",
            "flows.cli.keeping.delete",
        ),
        "Take over from elsewhere": (
            "flows.cli.importing.import_recipe",
            "flows.cli.importing.import_weights",
        ),
    }


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
for name, commands, panel, words in (
    ("data", DataCommands, DATA, "Look at datasets, delete what nothing reads, write captions."),
    ("reward-service", RewardCommands, DATA, "Serve rewards: `reward-service rewards.toml`, or a command."),
    ("infra", InfraCommands, KEEP, "Set up and check Prefect, GPUs and services."),
    ("cluster", ClusterCommands, KEEP, "Write what makes the cluster of a profile."),
):
    app.add_typer(typer.Typer(cls=commands, no_args_is_help=True, help=words), name=name, rich_help_panel=panel)


def _print_version(asked: bool) -> None:
    if asked:
        # Imported here, because it takes longer than the rest of the help.
        say(f"{PROGRAM} {import_module('importlib.metadata').version('cosmos-rl-flows')}")
        raise typer.Exit


VERSION = Option("--version", callback=_print_version, is_eager=True, help="Print the version")


@app.callback(help=__doc__)
def options(
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Accept ``--version``, the only option without a command."""


def main() -> None:
    """Run the command line."""
    accept_all_characters()
    try:
        app(prog_name=PROGRAM)
    except SystemExit as end:
        # Click exits with 2 for a wrong command line.
        wrong_words = end.code == 2 and not isinstance(end, OwnExitCode)
        sys.exit(ConfigError("").exit_code if wrong_words else end.code)
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        sys.exit(CosmosRLError("").exit_code)


if __name__ == "__main__":
    main()
