"""The stages of a re-score, with slots in its folder, and the scores of the run that it takes over."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Literal

from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from flows.planning import requests
from flows.planning.run import Run
from flows.planning.steps import Step, Wave
from flows.rescoring.record import Rescoring
from flows.rescoring.stock import Stock
from stages.artifacts.generations import has_begun
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import current_of, input_of
from stages.contracts import INDEX, MEDIA, TENSORS, Decode


class Form(Enum):
    """The form in which a reward reads samples. The value is the stage that decodes missing pictures, if one does."""

    PICTURES = ""
    LATENTS = "-"
    SHARE = "decode"
    """Pictures of the run, and others that it did not decode."""
    DECODED = "decode-all"
    """Pictures that were decoded again, because the run has deleted its own."""

    @property
    def decodes(self) -> bool:
        """Return whether pictures are decoded first."""
        return self in (Form.SHARE, Form.DECODED)


@dataclass(frozen=True)
class Rescore:
    """A re-score of a run."""

    run: Run
    record: Rescoring

    @property
    def url(self) -> str:
        """Return the URL of the re-score's folder."""
        return self.record.url(self.run.url)

    def waves(self, stock: Stock) -> Iterator[Wave]:
        """Yield the waves that make scores of some samples, without scores that the re-score or the run has."""
        missing = [reward for reward in self.record.rewards if self.found(stock, reward) is None]
        for form in dict.fromkeys(self.form_of(stock, reward) for reward in missing):
            if form.decodes and self._decoded_by_run(stock, form) is None:
                yield Wave(self._decoding(stock, form))
        if missing:
            yield Wave(*(self._scoring(stock, reward) for reward in missing))

    def begun(self) -> Iterator[Step]:
        """Yield the steps of all slots in its folder."""
        for stock in self.stocks():
            for form in (Form.SHARE, Form.DECODED):
                if has_begun(stock.moved(self.url, form.value)):
                    yield self._decoding(stock, form)
            for reward in self.record.rewards:
                if has_begun(self._slot(stock, reward)):
                    yield self._scoring(stock, reward)

    def stocks(self) -> Iterator[Stock]:
        """Yield the samples that the re-score has begun to score."""
        for held_out, folder in ((False, "iterations"), (True, "exports")):
            for name in sorted(store.names(store.join(self.url, folder))):
                if name.isdecimal():
                    yield Stock(self.run, int(name), held_out)

    def found(self, stock: Stock, reward: RewardConfig) -> str | None:
        """Return the slot with the scores of some samples by a reward: its own or, if they are the same, the run's."""
        own, label = self._slot(stock, reward), reward.fn.label
        slots = (own,) if label in self.record.served else (own, stock.scores(label))
        return next((slot for slot in slots if self._current(slot, stock, reward) is not None), None)

    def decoded(self, stock: Stock) -> list[str]:
        """Return the slots with pictures of some samples that were decoded later, its own and the run's."""
        if stock.held_out:
            return []
        own = (stock.moved(self.url, form.value) for form in Form if form.decodes)
        slots = [*own, self.run.slots.iteration(stock.k, Decode.name)]
        return [slot for slot in slots if current_of(slot)[1] is not None]

    def form_of(self, stock: Stock, reward: RewardConfig) -> Form:
        """Return the form in which a reward would read samples now."""
        if self._reads(stock, reward) == "latents":
            return Form.LATENTS
        if stock.held_out or stock.undecoded == 0:
            return Form.PICTURES
        return Form.SHARE if stock.there(MEDIA) else Form.DECODED

    def decodes(self, stock: Stock) -> int:
        """Return the number of samples that are decoded before they are scored."""
        forms = {self.form_of(stock, r) for r in self.record.rewards if self.found(stock, r) is None}
        return sum(stock.undecoded for form in forms if form.decodes and not self._is_decoded(stock, form))

    def lacks(self, stock: Stock) -> int:
        """Return the number of samples that some reward cannot score, because nothing is left to score."""
        forms = {self.form_of(stock, r) for r in self.record.rewards if self.found(stock, r) is None}
        if Form.LATENTS in forms and not stock.has_latents:
            return stock.counts.finite
        without = {form for form in forms if form.decodes and not self._is_decoded(stock, form)}
        held = stock.held_out and Form.PICTURES in forms
        return stock.undecoded if held or (without and not stock.has_latents) else 0

    def _decoding(self, stock: Stock, form: Form) -> Step:
        slot = stock.moved(self.url, form.value)
        return self._step(stock, form.value, Decode.name, slot, partial(self._decode, stock, form))

    def _scoring(self, stock: Stock, reward: RewardConfig) -> Step:
        slot = self._slot(stock, reward)

        def request() -> Request:
            found = self._current(slot, stock, reward)
            return found or self._scores(stock, reward, self.form_of(stock, reward))

        name = slot.rpartition("/")[2]
        return self._step(stock, name, requests.stage_for(reward).name, slot, request)

    def _step(self, stock: Stock, stage: str, kind: str, slot: str, request: Callable[[], Request]) -> Step:
        return Step(f"{stock.parent}/{stage}", kind, slot, request, stock.k)

    def _slot(self, stock: Stock, reward: RewardConfig) -> str:
        stage = "evaluate" if stock.held_out else "reward"
        return stock.moved(self.url, f"{stage}-{reward.fn.label}")

    def _current(self, slot: str, stock: Stock, reward: RewardConfig) -> Request | None:
        """Return the Request for which the artifact in a slot is current; None if it is current for none.

        Scores stay although the pictures that they were computed from are deleted later.
        """
        made = current_of(slot)[1]
        if made is None:
            return None
        latents = self._reads(stock, reward) == "latents"
        forms = (Form.LATENTS,) if latents else (Form.PICTURES, Form.SHARE, Form.DECODED)
        for form in forms[:1] if stock.held_out else forms:
            # A form whose inputs are missing was not scored.
            with suppress(ArtifactError):
                request = self._scores(stock, reward, form)
                if made.why_not(request) is None:
                    return request
        return None

    def _scores(self, stock: Stock, reward: RewardConfig, form: Form) -> Request:
        """Return the Request for scores. Raises :class:`ArtifactError` if an input is not there."""
        parts = {Form.LATENTS: (INDEX, TENSORS), Form.DECODED: (INDEX,)}.get(form, (INDEX, MEDIA))
        inputs: dict[str, tuple[Input, ...]] = {"samples": (input_of(stock.slot, *parts),)}
        if form.decodes:
            decoded = self._decoded_by_run(stock, form) or stock.moved(self.url, form.value)
            inputs["decoded"] = (input_of(decoded, INDEX, MEDIA),)
        config = requests.scored_by(reward, self.record.scorers[reward.fn.label], self._reads(stock, reward))
        request = self.run.plan.request(self._slot(stock, reward), config, stock.k, inputs)
        return self._pinned(request)

    def _decode(self, stock: Stock, form: Form) -> Request:
        request = requests.decode(self.run, stock.k)
        config = request.settings(Decode).model_copy(update={"undecoded_only": form == Form.SHARE})
        slot = stock.moved(self.url, form.value)
        return self._pinned(request.model_copy(update={"slot": slot, "config": config}))

    def _pinned(self, request: Request) -> Request:
        changes = {"version": self.record.versions[request.stage], "plugins": self.record.plugins}
        return request.model_copy(update=changes)

    def _decoded_by_run(self, stock: Stock, form: Form) -> str | None:
        """Return the run's slot with the same pictures by `cosmos-flows decode`; None if the re-score has its own."""
        if form != Form.SHARE or has_begun(stock.moved(self.url, form.value)):
            return None
        slot = self.run.slots.iteration(stock.k, Decode.name)
        made = current_of(slot)[1]
        return slot if made is not None and made.why_not(self._decode(stock, form)) is None else None

    def _is_decoded(self, stock: Stock, form: Form) -> bool:
        slot = self._decoded_by_run(stock, form) or stock.moved(self.url, form.value)
        return current_of(slot)[1] is not None

    def _reads(self, stock: Stock, reward: RewardConfig) -> Literal["media", "latents"]:
        # Evaluations have no latents.
        return "media" if stock.held_out else reward.fn.reads(self.run.plan.media.frames)
