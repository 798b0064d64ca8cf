"""Settings of the reward service: cosmos-rl's ``rewards.toml`` as it is, and the table ``[service]`` of our own."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.config import toml
from cosmos_rl_core.config.base import Section, UserPath, written
from cosmos_rl_core.config.reading import validated
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.rewards._base.names import plugin_of

TOKEN = "REWARD_SERVICE_TOKEN"
"""Environment variable with the token that clients must send."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Batching = Literal["exact", "fast"]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Visible = Annotated[str, Field(pattern=r"^[\w,-]+$")]


class RewardArgs(Section):
    """One scorer: cosmos-rl's fields, then ours."""

    reward_type: str = "cosmos_reason1"
    """A reward plugin, by its name or another name under which it is offered."""
    enable: bool = True
    """Whether it is served."""
    venv_python: str = "python"
    """Interpreter of its processes; ``python`` is the one of the service."""
    model_path: str = ""
    """Weights, for plugins with an option of this name or ``model``."""
    dtype: str = "float16"
    """Number format, for plugins with an option of this name."""
    device: Device = "cuda"
    """``cuda``: each process has a GPU of its own; a model that finds none does not load. ``cuda:1``: the second GPU.
    ``cpu``: none. If it is not set, each process has a GPU if there are GPUs."""
    endpoint_url: str = ""
    """Server of a judge, for plugins with an option of this name or ``url``."""
    endpoint_api_key: str = Field(default="", repr=False)
    """Key of the judge's server, for plugins with an option of this name or ``token_variable``."""
    download_path: str = ""
    """Not used."""
    setup_script: str = ""
    """Not used."""
    work_dir: str = ""
    """Not used."""
    tmp_dir: str = ""
    """Not used."""

    name: str = Field(default="", pattern=r"^[\w.-]*$")
    """Name under which it is served; by default all names of the plugin."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the plugin, as in a recipe."""
    processes: int = Field(default=1, ge=1, le=64)
    """Number of its processes, which score requests side by side."""
    gpus: tuple[Visible, ...] = ()
    """Values of ``CUDA_VISIBLE_DEVICES`` for its processes, in turn. Default: ``service.gpus``."""
    batching: Batching = "exact"
    """``exact`` scores a request by itself. ``fast`` scores waiting requests of equal shape together."""
    fast_samples: int = Field(default=64, ge=1)
    """Maximum number of samples that ``fast`` scores together."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds within which a process must answer; after that it is killed."""


_OPTIONS = ("model_path", "dtype", "endpoint_url", "endpoint_api_key")
"""Fields of cosmos-rl that reach the plugins that have an option of the same name."""
_OTHERWISE = {"model_path": "model", "endpoint_url": "url", "endpoint_api_key": "token_variable"}
"""Option that such a field sets in plugins that have no option of the field's name."""
KEY = "OPENAI_API_KEY"
"""Environment variable with ``endpoint_api_key``, for plugins that read a key from one."""
_UNUSED = {
    "download_path": "weights are read where the options name them",
    "setup_script": "`cosmos-flows reward-service prepare` converts weights",
    "work_dir": "the service writes to service.spool alone",
    "tmp_dir": "the service writes to service.spool alone",
}


class DecodeArgs(Section):
    """Decoders of latents."""

    model_path: UserPath = ""
    """Folder of diffusers with the VAE of Wan 2.1 (16 channels), or of a pipeline that has it. Empty: no decoder."""
    wan2pt2_model_path: UserPath = ""
    """Folder of diffusers with the VAE of Wan 2.2 (48 channels), or of a pipeline that has it. Empty: no decoder."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Number format of the decoder."""
    device: Device = "cuda"
    """Device of the decoder, with the values that scorers take."""
    chunk_duration: int = 81
    """Not used."""
    temporal_window: int = 16
    """Not used."""
    load_mean_std: bool = False
    """Not used."""
    wan2pt2_credential_path: str = ""
    """Not used."""


_UNUSED_DECODING = {
    "chunk_duration": "a sample is decoded whole",
    "temporal_window": "a sample is decoded whole",
    "load_mean_std": "mean and deviation come from the VAE's config.json",
    "wan2pt2_credential_path": "weights are read from a folder",
}


class ServiceSettings(Section):
    """Settings for which cosmos-rl's file has no field."""

    spool: UserPath = "reward-spool"
    """Folder of accepted requests and their results, on a disk of this machine."""
    token_file: UserPath = ""
    """File with the token that clients must send. If ``REWARD_SERVICE_TOKEN`` is set, it is used instead."""
    result_ttl_s: float = Field(default=86400.0, gt=0)
    """Seconds for which a result can be fetched."""
    max_queue: int = Field(default=1024, ge=1)
    """Maximum number of requests without results; further ones are answered 429."""
    max_body_mb: float = Field(default=1024.0, gt=0)
    """Largest body of a request, in MiB."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a byte of the body after which a request is given up. A body that takes longer than this must
    arrive at 4 KiB a second or more, on average."""
    max_connections: int = Field(default=2048, ge=16)
    """Maximum number of open connections; fewer where the system lets the service open fewer files. If all are in use,
    the connection that has waited longest without a request is closed for a new one. Requests beyond the maximum are
    answered 503."""
    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that running work may take after SIGTERM. Requests that wait or are stopped are scored after the next
    start."""
    gpus: tuple[Visible, ...] = ()
    """Devices for ``CUDA_VISIBLE_DEVICES``, one for each process, in turn. Default: all that the service sees."""
    redis_url: str = Field(default="", repr=False)
    """URL of a Redis to which results are copied, for ``result_ttl_s``, so that other replicas can answer with them."""
    plugins: tuple[str, ...] = ()
    """Files and folders of reward plugins outside the package."""


class Settings(Section):
    """The whole file."""

    host: str = "127.0.0.1"
    """Address to listen at. Every address except 127.0.0.1, localhost and ::1 needs a token."""
    port: int = Field(default=8080, ge=0, lt=2**16)
    """First port to try; 0 takes any free one."""
    redis_host: str = ""
    """Not used."""
    redis_port: int = 0
    """Not used."""
    no_latent_decoder: bool = False
    """Leave out the decoders."""
    reward_args: tuple[RewardArgs, ...] = ()
    """Scorers."""
    decode_args: DecodeArgs = DecodeArgs()
    service: ServiceSettings = ServiceSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(args.enable for args in self.reward_args):
            raise ValueError("no scorer: expected a [[reward_args]] table that is enabled")
        return self

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each field that is written and has no effect here."""
        for name in written(self, "redis_host", "redis_port"):
            yield f"{name} has no effect: results lie in service.spool; service.redis_url copies them to a Redis"
        for name in written(self.decode_args, *_UNUSED_DECODING):
            yield f"decode_args.{name} has no effect: {_UNUSED_DECODING[name]}"
        for args in self.reward_args:
            for name in written(args, *_UNUSED):
                yield f"{args.reward_type}: {name} has no effect: {_UNUSED[name]}"


@dataclass(frozen=True)
class Served:
    """An enabled scorer with its plugin."""

    args: RewardArgs
    plugin: str
    options: RewardOptions
    names: tuple[str, ...]
    """Names under which it is served, its own first."""
    unused: tuple[str, ...] = ()
    """Fields of cosmos-rl that were written and that the plugin has no option for."""

    @property
    def facts(self) -> Facts:
        """Return the facts that the plugin declares."""
        return self.options.facts

    @property
    def at_a_time(self) -> int:
        """Return the largest number of requests that a process scores in one call."""
        return self.args.fast_samples if self.args.batching == "fast" else 1

    @property
    def interpreter(self) -> str:
        """Return the interpreter of its processes."""
        return sys.executable if self.args.venv_python == "python" else self.args.venv_python


@dataclass(frozen=True)
class Config:
    """Everything that a service is started with."""

    settings: Settings
    served: tuple[Served, ...]
    pins: tuple[outside_plugins.Pin, ...]
    token: str = field(repr=False)
    """Token that clients must send; "" if they need none."""
    notes: tuple[str, ...] = ()
    """Sentences on settings without effect."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def read(path: Path, environment: Mapping[str, str]) -> Config:
    """Read a file of settings and import the reward plugins that it names.

    Raises one :class:`ConfigError` with every mistake of the file.
    """
    try:
        values = toml.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used as TOML: {error}") from error
    settings = validated(Settings, values, str(path))
    outside_plugins.find(settings.service.plugins)
    served, mistakes = _served(settings)
    token = _token(settings, environment, mistakes)
    if mistakes:
        raise mistakes_in(path, mistakes)
    unused = (f"{s.names[0]}: {name} has no effect: no option of its plugin" for s in served for name in s.unused)
    pins = outside_plugins.pins("")
    return Config(settings, served, pins, token, (*settings.without_effect(), *unused), environment)


def _served(settings: Settings) -> tuple[tuple[Served, ...], list[str]]:
    """Return the enabled scorers, and the mistakes in the settings of others."""
    found, mistakes, owners = list[Served](), list[str](), dict[str, int]()
    for i, args in enumerate(settings.reward_args):
        if not args.enable:
            continue
        try:
            served = _with_plugin(args)
        except ConfigError as error:
            mistakes.append(f"reward_args.{i}: " + str(error).replace("\n", "\n    "))
            continue
        if taken := [name for name in served.names if name in owners]:
            first = f"reward_args.{owners[taken[0]]} serves {taken[0]!r} too"
            mistakes.append(f"reward_args.{i}: {first}; give one of them another `name`")
        owners |= dict.fromkeys(served.names, i)
        found.append(served)
    return tuple(found), mistakes


def _with_plugin(args: RewardArgs) -> Served:
    plugin = plugin_of(args.reward_type)
    options: type[RewardOptions] = plugins.load("rewards", plugin).Options
    given, unused = _given(args, options)
    values = {"name": plugin} | dict(options.facts.served) | given | args.options
    chosen = validated(options, values, f"options of {plugin}")
    if args.batching == "fast" and chosen.facts.groupwise:
        raise ConfigError(f'{plugin} compares the samples of a request, so batching = "fast" cannot mix requests')
    names = (args.name,) if args.name else (plugin, *chosen.facts.also)
    return Served(args, plugin, chosen, names, unused)


def _given(args: RewardArgs, options: type[RewardOptions]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of cosmos-rl's fields by the plugin's options, and the fields that the plugin lacks."""
    given, unused = dict[str, Any](), list[str]()
    for name in written(args, *_OPTIONS):
        target = name if name in options.model_fields else _OTHERWISE.get(name, name)
        if target not in options.model_fields:
            unused.append(name)
        elif (value := getattr(args, name)) != "":
            given[target] = KEY if target == "token_variable" else value
    return given, tuple(unused)


def _token(settings: Settings, environment: Mapping[str, str], mistakes: list[str]) -> str:
    token, file = environment.get(TOKEN, "").strip(), settings.service.token_file
    if not token and file:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            mistakes.append(f"service.token_file cannot be read: {error}")
        if not token:
            mistakes.append(f"service.token_file {file} holds no token")
    if not token and not file and settings.host not in LOOPBACK:
        found = f"host = {settings.host!r} lets other machines in"
        mistakes.append(f"{found} and there is no token; set {TOKEN} or service.token_file")
    if not token.isascii() or not token.isprintable() or " " in token:
        mistakes.append(f"the token of {TOKEN} or service.token_file has characters that no HTTP header takes")
    return token
