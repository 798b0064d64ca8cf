"""A score that a vision-language model states by a rubric. The model is in a folder: trained here, or any other.

It uses the question and the parser of ``vlm_judge``, without a service: the stage ``judge``, the reward
service or ``cosmos-flows score`` loads the model. Each sample gets forward passes of its own, and every token is the
likeliest one, so no answer depends on other samples.
"""

from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.answers import brief
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._base.pixels import frames_of, no_reference
from cosmos_rl_core.rewards._batches.preparation import Prepared
from cosmos_rl_core.rewards._files import agreement
from cosmos_rl_core.rewards._judge.rubric import RubricOptions
from cosmos_rl_core.rewards._judge.service import PROMPT, UnreadableError
from cosmos_rl_core.rewards._vlm.files import device_and_dtype
from cosmos_rl_core.vlms import _folders
from cosmos_rl_core.vlms._base import Changes

DEFAULT_FPS = 2.0


class Options(RubricOptions):
    """The model, the rubric, and how its answers are read."""

    facts = Facts(
        scores={"vlm_answer": "the number that the model states, from `lowest` to `highest`"},
        source="the recipe's rubric and model; the name is `vlm_answer-<criterion>` if it has a criterion",
        torch=True,
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["vlm_answer"] = "vlm_answer"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the model, or its name on the Hugging Face hub, ``owner/name`` or ``owner/name@revision``, which is in
    the local cache. Scores depend on its files, not on their path."""
    system: str | None = Field(default=None, min_length=1)
    """System prompt. Default: none."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens of an answer. An answer that reaches it is cut, so it is a failure."""
    num_frames: int | None = Field(default=None, ge=1)
    """Number of frames that the model sees of a video, evenly spaced."""
    fps: float | None = Field(default=None, gt=0)
    """Frames that it sees of each second of a video, instead of ``num_frames``. Default: 2, without ``num_frames``."""
    max_side: int | None = Field(default=1024, ge=1)
    """Largest height and width of an image or frame in pixels. Larger ones are scaled down."""
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and of the computations of the model."""
    agreement: UserPath | None = Field(default=None, min_length=1, json_schema_extra=NOT_IDENTITY)
    """File that says how far this model agrees with labels of people: ``cosmos-flows score --labels --agreement``
    writes it. A reward with the role ``train`` needs it."""

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> Self:
        if self.num_frames is not None and self.fps is not None:
            raise ValueError("num_frames and fps are both set; set one of them")
        return self

    @property
    def changes(self) -> Changes:
        """Return the settings that replace the settings in the model's folder."""
        fps = self.fps or DEFAULT_FPS
        return {"video": {"fps": fps} if self.num_frames is None else {"num_frames": self.num_frames}}


class Reward:
    """Score under the options' label: the number that the model states.

    A sample fails if its answer is cut, has no number, or has a number off the rubric's scale.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages, and the digests of the model's files and of its question.

        Raises :class:`ConfigError` with every reason why the model cannot be used.
        """
        options = self._options
        _folders.check(self._folder, options.changes, options.rubric)
        asked = digest({"rubric": options.rubric, "system": options.system, "parser": options.parser})[:16]
        packages = f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}"
        return f"{packages}, sha256:{_folders.digest(self._folder)[:16]}, asked sha256:{asked}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: every prompt can be asked about."""
        return None

    def agreement(self) -> str:
        """Return one line of text on how far the model agrees with labels.

        Raises :class:`ConfigError` unless the options name a file that was written with this model, question and
        parser.
        """
        if (path := self._options.agreement) is None:
            raise ConfigError(
                f"{self._options.label} would train on what a model says, and nothing shows that it is right; score "
                "labelled files that it was not trained on (cosmos-flows score FILES --labels ... --agreement FILE), "
                "and name the file: agreement = FILE. With role = 'monitor' it needs none"
            )
        return agreement.read(path, self._options.label, self.version).words()

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's score by name, or the error that says why it has none, in order."""
        vlm, options = self._vlm, self._options

        def score(_: Sample, batch: Any) -> dict[str, float]:
            (answer,) = vlm.answers(batch, options.max_new_tokens)
            if not answer.whole:
                cut = f"the answer is cut at max_new_tokens = {options.max_new_tokens}; raise it: {brief(answer.text)}"
                raise UnreadableError(cut)
            return options.read(answer.text)

        return self._prepared.each(samples, score)

    def expect(self, samples: list[Sample]) -> None:
        """Prepare samples in the background."""
        self._prepared.expect(samples)

    @cached_property
    def _prepared(self) -> Prepared[Any]:
        return Prepared(lambda sample: self._vlm.prepare([self._asked(sample)]))

    def _asked(self, sample: Sample) -> list[dict[str, Any]]:
        """Return the conversation about a sample. Raises ``ValueError`` if it has no references and they are needed."""
        uses = self._options.uses_references
        if uses == "needed" and not sample.references:
            raise no_reference(sample)
        before = () if uses == "ignored" else sample.references
        shown = [_part(replace(sample, pixels=one)) for one in (*before, sample.pixels)]
        question = {"type": "text", "text": self._options.rubric.replace(PROMPT, sample.prompt)}
        system = [] if self._options.system is None else [{"role": "system", "content": self._options.system}]
        return [*system, {"role": "user", "content": [*shown, question]}]

    @cached_property
    def _folder(self) -> str:
        return _folders.resolve(self._options.model)

    @cached_property
    def _vlm(self) -> Any:
        # Imported here, so that planning never loads torch.
        vlms, options = import_module("cosmos_rl_core.vlms._model"), self._options
        return vlms.load(self._folder, *device_and_dtype(options.param_dtype), options.changes, options.max_side)


def _part(sample: Sample) -> dict[str, Any]:
    """Return the part of a message that shows a sample."""
    frames = frames_of(sample)
    if len(frames) == 1:
        return {"type": "image", "image": frames}
    return {"type": "video", "video": frames, "fps": sample.fps}
