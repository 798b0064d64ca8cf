"""Commands of the reward service."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, BadParameter, Option
from typer.core import TyperGroup

from flows.cli.command import (
    DATA,
    JsonOption,
    OwnExitCode,
    command,
    print_json,
    print_parts,
    say,
)

SERVE = "serve"


class ServeByDefault(TyperGroup):
    """A group whose first word may be a file of settings, which is then served."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command ``serve`` before arguments that name none."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = [SERVE, *args]
        return super().parse_args(ctx, args)


rewards_app = typer.Typer(
    cls=ServeByDefault, no_args_is_help=True, help="Serve rewards: `reward-service rewards.toml`, or a command."
)


@command(rewards_app, SERVE)
def serve(config: Annotated[Path, Argument(help="TOML: cosmos-rl's rewards.toml, or one with [service]")]) -> None:
    """Serve the rewards of a file, until SIGTERM or Ctrl-C.

    Examples:
        cosmos-flows reward-service serve rewards.toml
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings: Any = import_module("cosmos_rl_core.reward_service.config").read(config, os.environ)
    import_module("cosmos_rl_core.reward_service.server").run(settings, say)


score_app = typer.Typer()


@command(score_app, "score", DATA)
def score(
    files: Annotated[list[str], Argument(help="Pictures and videos")],
    reward: Annotated[str, Option(help="The reward: ocr, pixel_statistics, clip_score, ..., or one of --plugin")],
    prompt: Annotated[str, Option(help="The prompt of all files")] = "",
    prompts: Annotated[Path | None, Option(help="A text file with the prompt of each file on a line")] = None,
    settings: Annotated[list[str] | None, Option("--set", help="A setting: option=value; may be repeated")] = None,
    plugin: Annotated[list[str] | None, Option(help="A file with a reward of your own; may be repeated")] = None,
    labels: Annotated[Path | None, Option(help="A text file with the right score of each file on a line")] = None,
    agreement: Annotated[Path | None, Option(help="With --labels: write how far scores agree to this file")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score your own pictures and videos with any reward. A file that has no score is a failure, never a number.

    Exit with 65 if a file has no score, with 64 for an unknown reward or setting.

    Examples:
        cosmos-flows score a.png b.png --reward ocr --prompt 'a sign that says "K7"'
        cosmos-flows score clips/*.mp4 --reward pixel_statistics --json
        cosmos-flows score a.png b.png --reward aesthetic --set model=weights --labels labels.txt
    """
    if agreement is not None and labels is None:
        raise BadParameter("needs --labels", param_hint="--agreement")
    core: Any = import_module("cosmos_rl_core.rewards._files.scores")
    import_module("cosmos_rl_core.outside_plugins").find(plugin or ())
    people: Any = import_module("cosmos_rl_core.rewards._files.agreement")
    given = None if labels is None else people.labels_of(labels, len(files))
    asked = core.prompts_of(prompts, prompt, len(files))
    with redirect_stdout(sys.stderr):  # what scorers print is no part of the JSON
        scorer = core.FileScorer(reward, settings or ())
        found = [*scorer.score(files, asked)]
    failed = [one for one in found if one.error]
    agrees = None if given is None else scorer.agreement(found, given)
    if agreement is not None and agrees is not None:
        agreement.write_text(agrees.model_dump_json(indent=2) + "\n", encoding="utf-8")
    if as_json:
        told = {"reward": reward, "scorer": scorer.version, "files": found}
        print_json(told if agrees is None else told | {"agreement": agrees.model_dump()})
    else:
        lines = [f"scored by {scorer.version}", *([] if agrees is None else [agrees.words()])]
        print_parts(*_table(found, scorer.options.label), *lines)
    if failed:
        raise OwnExitCode(65)


def _table(found: Sequence[Any], label: str) -> Iterator[str]:
    """Yield a line a file with a column a score, the reward's own first, then the failures.

    Lines are as long as they need to be: names of scores that are cut look alike.
    """
    columns = list(dict.fromkeys([label, *(name for one in found for name in one.scores)]))
    rows = [["file", *columns], *([one.file, *_cells(one, columns)] for one in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    yield from (f"{one.file}: {one.error}" for one in found if one.error)


def _cells(one: Any, columns: Sequence[str]) -> list[str]:
    values = [one.scores.get(name, "") for name in columns]
    cells = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
    return ["FAILED", *cells[1:]] if one.error else cells


@command(rewards_app, "prepare")
def prepare(
    reward: Annotated[str, Argument(help="The reward: hpsv2, aesthetic, ...")],
    source: Annotated[Path, Argument(help="The published file")],
    target: Annotated[Path, Argument(help="The folder to make")],
) -> None:
    """Convert published weights of a reward to safetensors, once. Nothing else reads a pickle.

    Examples:
        cosmos-flows reward-service prepare hpsv2 HPS_v2.1_compressed.pt weights/hpsv2
        cosmos-flows reward-service prepare aesthetic sac+logos+ava1-l14-linearMSE.pth weights/aesthetic
    """
    import_module("cosmos_rl_core.rewards._files.scores").prepare(reward, source, target)
    say(f"{target}: the weights of {reward} from {source}")


@command(rewards_app, "check")
def check(
    url: Annotated[str, Argument(help="URL of the service: http://host:8080")],
    reward: Annotated[list[str] | None, Option(help="A reward to try; may be repeated. Default: all it tells")] = None,
    timeout_s: Annotated[float, Option(min=0.1, help="Seconds to wait for the scores of each")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Try any service with a test frame: this one or cosmos-rl's. The token is REMOTE_REWARD_TOKEN.

    Exit with 64 for a wrong URL, token or reward, with 75 for a service or scorer that does not work now.

    Examples:
        cosmos-flows reward-service check http://localhost:8080
        cosmos-flows reward-service check http://localhost:8080 --reward pickscore
    """
    found: list[Any] = []
    try:
        tried = import_module("flows.operations.reward_check").check(url, reward or (), timeout_s, os.environ)
        for finding in tried:
            found.append(finding)
            if not as_json:
                state = "works" if finding.works else "FAILS"
                print_parts(f"{finding.reward}: {state} in {finding.seconds:.1f} s: {finding.found}")
    finally:
        if as_json:
            print_json(found)
