"""Scorers of a service: their identity, their processes, and the requests that they accept."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import cosmos_rl_core
from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ConfigError, counted
from cosmos_rl_core.outside_plugins import named_by
from cosmos_rl_core.reward_service import frames
from cosmos_rl_core.reward_service.config import KEY, TOKEN, Config, DecodeArgs, RewardArgs, Served
from cosmos_rl_core.reward_service.pool import Start, WorkerPool
from cosmos_rl_core.reward_service.results import Identity
from cosmos_rl_core.rewards._base.answers import brief

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")
DECODE_TIMEOUT_S = 1800.0
"""Seconds within which the latents of a request must be decoded."""
WORKER = "cosmos_rl_core.reward_service.worker"
DECODER = "cosmos_rl_core.reward_service.decoder"
NO_REFERENCES = 'give the prompts some, and set references = "needed" in the recipe'
"""Advice for requests without references."""


@dataclass(frozen=True)
class Scorer:
    """A served reward and its processes."""

    served: Served
    pool: WorkerPool
    code: Mapping[str, str]
    """Digests of the files of a plugin from outside the package."""
    decoder: str
    """Version of the decoder of latents; "" without one."""

    @property
    def media(self) -> list[frames.Media]:
        """Return the forms of samples that it accepts."""
        images: list[frames.Media] = [] if self.served.facts.input == "video" else ["image"]
        latents: list[frames.Media] = ["latent"] if self.decoder else []
        return [*images, "video", *latents]

    @property
    def identity(self) -> Identity:
        """Return name, version and digest; version and digest are "" until a process has loaded."""
        name, version = self.served.names[0], self.pool.version
        if not version:
            return Identity(name, "", "")
        told: dict[str, Any] = {
            "plugin": self.served.plugin,
            "options": self.served.options.identity(),
            "version": version,
            "batching": self.served.args.batching,
        }
        told |= {"code": dict(self.code)} if self.code else {}
        told |= {"decoder": self.decoder} if self.decoder else {}
        return Identity(name, version, digest(told))

    def info(self) -> dict[str, Any]:
        """Return the description of the scorer for ``/info``."""
        facts, identity = self.served.facts, self.identity
        told = {
            "plugin": self.served.plugin,
            "version": identity.version,
            "digest": identity.digest,
            "scores": {facts.wire.get(name, name): scale for name, scale in facts.scores.items()},
            "input": facts.input,
            "media": self.media,
            "metadata": True,
            "references": self.served.options.uses_references,
            "batching": self.pool.batching or self.served.args.batching,
            "ready": self.pool.ready > 0,
        }
        return told | ({"error": self.pool.fault} if self.pool.fault else {})


def _named(samples: Sequence[int]) -> str:
    return f"{counted(len(samples), 'sample')} ({brief(', '.join(map(str, samples)))})"


class RefusedError(Exception):
    """A request that is not accepted, with the HTTP status of the answer."""

    def __init__(self, status: int, detail: str, **told: Any) -> None:
        super().__init__(detail)
        self.status, self.detail, self.told = status, detail, told


@dataclass(frozen=True)
class Offer:
    """The rewards that a service offers."""

    scorers: Mapping[str, Scorer]
    """Scorers by each of their names."""
    decoders: Mapping[str, Path]
    """Folders of the decoders of latents, by their channels."""

    def check(self, frame: frames.Frame) -> None:
        """Raise :class:`RefusedError` for a frame that cannot be scored here."""
        for name in frame.rewards:
            scorer = self.scorers.get(name)
            if scorer is None:
                raise RefusedError(422, f"unknown reward {brief(repr(name))}; known: {', '.join(sorted(self.scorers))}")
            if frame.media not in scorer.media:
                raise RefusedError(422, f"{name} takes {' or '.join(scorer.media)}, not {frame.media}")
            bare = [i for i, shown in enumerate(frame.references) if not shown]
            if bare and scorer.served.options.uses_references == "needed":
                found = f"{name} compares with references, and {_named(bare)} of the request"
                raise RefusedError(422, f"{found} {'has' if len(bare) == 1 else 'have'} none; {NO_REFERENCES}")
            if scorer.pool.broken:
                raise RefusedError(503, scorer.pool.fault)
            self._check_expected(name, frame.scorers.get(name), scorer)
        if frame.media == "latent" and (channels := str(frame.shape[1])) not in self.decoders:
            raise RefusedError(422, f"latents of {channels} channels; this service decodes {', '.join(self.decoders)}")

    def _check_expected(self, name: str, expected: str | None, scorer: Scorer) -> None:
        if expected is None:
            return
        identity = scorer.identity
        if not identity.digest:
            raise RefusedError(503, f"{name} is still loading, so its digest is not known yet")
        if expected != identity.digest:
            found = f"{name} is {identity.version} (digest {identity.digest})"
            raise RefusedError(409, f"{found}; the request expects {brief(expected)}", scorer=identity.as_json())


class Devices:
    """Devices of this machine, given to processes in turn."""

    def __init__(self, config: Config) -> None:
        self._named = config.settings.service.gpus or _visible(config.environment)
        self._turn: Iterator[str] | None = cycle(self._named) if self._named else None

    def environments(self, device: str, gpus: Sequence[str], count: int) -> list[dict[str, str]]:
        """Return for each of ``count`` processes the environment variables that let it see its device only.

        ``cuda`` gives the processes ``gpus``, or else the service's GPUs, in turn. ``cuda:1`` is the second of the
        service's GPUs. Without GPUs, ``cuda`` assigns none.

        Raises :class:`ConfigError` for a number with which the service has no GPU, and for a number next to ``gpus``.
        """
        if device == "cpu":
            return [{VISIBLE: ""}] * count
        turn = cycle(gpus) if gpus else self._turn
        if number := device.partition(":")[2]:
            if gpus:
                both = f"device = {device!r} and gpus = {[*gpus]}"
                raise ConfigError(f"{both} both say where it computes; set device = 'cuda', or leave out gpus")
            if self._named and int(number) >= len(self._named):
                raise ConfigError(f"device = {device!r}: this service has the GPUs {', '.join(self._named)}, from 0 on")
            return [{VISIBLE: self._named[int(number)] if self._named else number}] * count
        return [{VISIBLE: next(turn)} if turn else {} for _ in range(count)]


def _asked(args: RewardArgs | DecodeArgs) -> str | None:
    """Return ``cpu`` or ``cuda`` if the settings name it; else None, and models take a GPU if there is one."""
    return args.device.partition(":")[0] if "device" in args.model_fields_set else None


def _visible(environment: Mapping[str, str]) -> list[str]:
    if (named := environment.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(i) for i in range(len([*DEVICES.glob("nvidia[0-9]*")]))]


def environment_of(config: Config, interpreter: str) -> dict[str, str]:
    """Return the environment of a process: the service's without its token, with this package in ``PYTHONPATH``.

    Another interpreter must have the package's dependencies itself. If this package is installed in ``site-packages``,
    it must also have the package, because that folder would bring it all other packages too.
    """
    environment = {name: value for name, value in config.environment.items() if name != TOKEN}
    root = Path(str(cosmos_rl_core.__file__)).parents[1]
    if interpreter == sys.executable or root.name != "site-packages":
        paths = [str(root), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def scorer_of(served: Served, config: Config, devices: Devices, logs: Path, decoder: str) -> Scorer:
    """Return a scorer whose processes are yet to be started."""
    args, name = served.args, served.names[0]
    pins = named_by(served.options, config.pins)
    setup = {
        "plugin": served.plugin,
        "options": served.options.model_dump(mode="json"),
        "batching": args.batching,
        "device": _asked(args),
        "plugins": [pin.model_dump(mode="json") for pin in pins],
    }
    base = environment_of(config, served.interpreter)
    base |= {KEY: args.endpoint_api_key} if args.endpoint_api_key else {}
    shown = devices.environments(args.device, args.gpus, args.processes)
    command = (served.interpreter, "-m", WORKER)
    starts = [Start(command, base | own, setup, logs / f"{name}.{i}.log") for i, own in enumerate(shown)]
    code = {file: sha for pin in pins for file, sha in pin.files.items()}
    return Scorer(served, WorkerPool(name, starts, args.timeout_s, served.at_a_time), code, decoder)


def decoder_of(folders: Mapping[str, Path], config: Config, devices: Devices, logs: Path) -> WorkerPool:
    """Return the process that decodes latents, yet to be started."""
    args = config.settings.decode_args
    setup = {"decoders": {channels: str(path.resolve()) for channels, path in folders.items()}, "dtype": args.dtype}
    setup |= {"device": _asked(args)}
    (shown,) = devices.environments(args.device, (), 1)
    command = (sys.executable, "-m", DECODER)
    start = Start(command, environment_of(config, sys.executable) | shown, setup, logs / "decoder.log")
    return WorkerPool("the decoder", [start], DECODE_TIMEOUT_S)
