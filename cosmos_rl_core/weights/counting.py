"""Shapes and arithmetic of a pipeline without its weights.

A separate process counts, because counting needs torch: ``python -m cosmos_rl_core.weights.counting MODULE QUESTION``.
It prints the answer as JSON.
"""

import functools
import importlib
import json
import subprocess
import sys
from typing import Any

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.imports import uncollected, without_torchvision_warnings
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.sizes import Pictures

COUNTER = "cosmos_rl_core.weights.counter"


@functools.cache
def shapes(pipeline: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors of each component that has weights, by name, from its ``config.json``."""
    found = ask(COUNTER, "shapes", pipeline)
    return {name: {key: tuple(shape) for key, shape in of.items()} for name, of in found.items()}


@functools.cache
def forward_flops(
    pipeline: str, size: tuple[int, int], frames: int, max_prompt_length: int, pictures: Pictures = ()
) -> int:
    """Return the operations of one unguided forward pass of the transformer on one sample.

    A multiplication and an addition are two. ``size`` is height and width in pixels; ``pictures`` is a tuple, which can
    be kept as a key.
    """
    return ask(COUNTER, "forward_flops", pipeline, size, frames, max_prompt_length, pictures)


def ask(module: str, count: str, pipeline: str, *arguments: Any) -> Any:
    """Call the function ``count`` of ``module`` with the pipeline and the arguments in a separate process.

    Arguments and result are JSON values. Raises :class:`ConfigError` with the last line of the process if it fails.
    """
    pins = [pin.model_dump(mode="json") for pin in outside_plugins.pins(directories.adapter_name(pipeline))]
    question = json.dumps({"plugins": pins, "count": count, "arguments": [pipeline, *arguments]})
    command = [sys.executable, "-m", __spec__.name, module, question]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        reason = (ended.stderr.strip().splitlines() or ["no reason was printed"])[-1]
        raise ConfigError(f"the pipeline {pipeline!r} cannot be built from its config files: {reason}")
    return json.loads(ended.stdout.splitlines()[-1])


def main(module: str, question: str) -> None:
    """Print the answer to a question: JSON with the keys ``plugins``, ``count`` (a function's name), ``arguments``."""
    asked: dict[str, Any] = json.loads(question)
    without_torchvision_warnings()
    with uncollected():
        counter = importlib.import_module(module)
    outside_plugins.use(asked["plugins"], verify=False)
    print(json.dumps(getattr(counter, asked["count"])(*asked["arguments"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
