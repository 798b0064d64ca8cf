"""The command that scores files."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from cosmos_rl_core.outside_plugins import find
from cosmos_rl_core.storage import store
from flows.cli.base.command import WRONG_DATA, OwnExitCode
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found


def score(
    files: Annotated[list[str], Argument(help="Pictures and videos")],
    reward: Annotated[str, Option(help="The reward: ocr, pixel_statistics, clip_score, ..., or one of --plugin")],
    prompt: Annotated[str, Option(help="The prompt of all files")] = "",
    prompts: Annotated[Path | None, Option(help="A text file with a prompt a line, or .jsonl with references")] = None,
    settings: Annotated[list[str] | None, Option("--set", help="A setting: option=value; may be repeated")] = None,
    plugin: Annotated[list[str] | None, Option(help="A file with a reward of your own; may be repeated")] = None,
    labels: Annotated[Path | None, Option(help="A text file with the right score of each file on a line")] = None,
    agreement: Annotated[Path | None, Option(help="With --labels: write how far scores agree to this file")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score your own pictures and videos with any reward. A file that has no score is a failure, never a number.

    Exit with 65 if a file has no score, with 64 for an unknown reward or setting, with 75 if a service is away.

    Examples:
        cosmos-flows score a.png b.png --reward ocr --prompt 'a sign that says "K7"'
        cosmos-flows score clips/*.mp4 --reward pixel_statistics --json
        cosmos-flows score a.png b.png --reward aesthetic --set model=weights --labels labels.txt
    """
    if agreement is not None and labels is None:
        raise BadParameter("needs --labels", param_hint="--agreement")
    core: Any = import_module("cosmos_rl_core.rewards._files.scores")  # brings pandas along
    find(plugin or ())
    given = (
        None
        if labels is None
        else import_module("cosmos_rl_core.rewards._files.agreement").labels_of(labels, len(files))
    )
    asked = core.prompts_of(prompts, prompt, len(files), core.options_of(reward, settings or ()))
    with redirect_stdout(sys.stderr):  # what scorers print is no part of the JSON
        scorer = core.FileScorer(reward, settings or ())
        found = [*scorer.score(files, asked)]
    failed = [one for one in found if one.error]
    agrees = None if given is None else scorer.agreement(found, given)
    told = {"reward": reward, "scorer": scorer.version, "files": found}
    told |= {} if agrees is None else {"agreement": agrees.model_dump()}
    lines = [f"scored by {scorer.version}", *([] if agrees is None else [agrees.words()])]
    print_found(told, [*_table(found, scorer.options.label), *lines], as_json=as_json)
    # Last, so that scores are not lost if the file cannot be written.
    if agreement is not None and agrees is not None:
        store.write(str(agreement.absolute()), f"{agrees.model_dump_json(indent=2)}\n".encode())
    if failed:
        raise OwnExitCode(WRONG_DATA)


def _table(found: Sequence[Any], label: str) -> Iterator[str]:
    """Yield one line per file with one column per score, the reward's own first, then the failures.

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
