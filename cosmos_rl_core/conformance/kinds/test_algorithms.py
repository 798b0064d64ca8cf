"""Every algorithm: what it needs is possible, its loss is one number per sample, and only scored samples count."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms._base import Batch, Loss, Transitions
from cosmos_rl_core.algorithms._needs import DRIFT_METRICS
from cosmos_rl_core.conformance.kinds.members import file_of, options_of, runnable
from cosmos_rl_core.sampling.transition import Coefficients
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, OLD, REFERENCE

AnyBatch = Batch | Transitions


@dataclass(frozen=True)
class Subject:
    """An algorithm with its options."""

    file: str
    make: Any
    options: Any

    def batches(self) -> list[AnyBatch]:
        """Return a batch of each kind that the loss takes: three samples, or two pairs."""
        needs = self.make(self.options).needs
        drawn = [1.0, -1.0, 1.0, -1.0] if needs.unit == "pair" else [-1.0, 0.0, 1.0]
        advantages, half = torch.tensor(drawn, device="cpu"), torch.full((len(drawn),), 0.5, device="cpu")
        ones = torch.ones(2, len(drawn), 2, 4, 4, device="cpu")
        x_0, noise = ones * torch.tensor([1.0, -1.0], device="cpu").view(2, 1, 1, 1, 1)
        number = half.double()
        at = Coefficients(number, number, number, -number, number, number, number)
        steps = Transitions(x=x_0, x_next=noise, history=x_0, at=at, log_prob=-number, advantages=advantages)
        rewarded = self.options.rewarded and not needs.transitions
        plain = Batch(x_0, noise, half, advantages if rewarded else None)
        takes_plain = needs.data_term is not None or not needs.transitions
        return [*([steps] if needs.transitions else []), *([plain] if takes_plain else [])]

    def loss(self, algorithm: Any, batch: AnyBatch, asked: list[str] | None = None) -> tuple[Loss, Tensor]:
        """Return the loss if ``current`` predicts 0.5 and other parts predict 0, and the prediction of ``current``."""
        prediction = torch.full(batch.x_t.shape, 0.5, device="cpu", requires_grad=True)

        def velocity(part: str) -> Tensor:
            if asked is not None:
                asked.append(part)
            return prediction if part == CURRENT else torch.zeros_like(prediction)

        return algorithm.loss(velocity, batch), prediction


@pytest.fixture(scope="module", params=runnable("algorithms"))
def algorithm(request: pytest.FixtureRequest, plugin_settings: Mapping[str, Any]) -> Subject:
    """Return each algorithm."""
    name = request.param
    options = options_of("algorithms", name, plugin_settings, dataset={"name": "rendered_text"})
    if options is None:
        pytest.skip("its settings have no defaults")
    return Subject(file_of("algorithms", name), plugins.load("algorithms", name).Algorithm, options)


def test_what_an_algorithm_needs_is_possible(algorithm: Subject):
    needs, file = algorithm.make(algorithm.options).needs, algorithm.file
    assert needs.behaviour in {CURRENT, OLD, REFERENCE}, f"{file}: needs.behaviour is {needs.behaviour!r}"
    unknown = set(needs.roles) - {CURRENT, OLD, BEHAVIOUR, REFERENCE}
    assert not unknown, f"{file}: needs.roles names {', '.join(sorted(unknown))}"
    reads_old = OLD in {needs.behaviour, *needs.roles}
    assert (needs.old_decay is not None) == reads_old, f"{file}: needs.old_decay goes with the part 'old'"
    assert 1 <= needs.num_times(20) <= 20, f"{file}: it trains at {needs.num_times(20)} of 20 noise levels"
    assert needs.transitions == (needs.max_logp_drift is not None), f"{file}: train_on goes with max_logp_drift"
    assert needs.transitions or needs.data_term is None, f"{file}: data_term goes with train_on"


def test_a_loss_is_a_number_a_sample_with_gradient(algorithm: Subject):
    made = algorithm.make(algorithm.options)
    for batch in algorithm.batches():
        loss, prediction = algorithm.loss(made, batch)
        where, expected = f"{algorithm.file}: Loss.per_sample", tuple(batch.t.shape)
        assert tuple(loss.per_sample.shape) == expected, f"{where} is {tuple(loss.per_sample.shape)}, not {expected}"
        assert loss.per_sample.requires_grad, f"{where} has no gradient: use velocity({CURRENT!r}) as it is"
        assert loss.per_sample.dtype == torch.float32, f"{where} is {loss.per_sample.dtype}, expected float32"
        (gradient,) = torch.autograd.grad(loss.per_sample.sum(), prediction)
        numbers = (loss.per_sample.detach(), gradient)
        assert all(bool(number.isfinite().all()) for number in numbers), f"{where} or its gradient is not finite"


def test_the_current_weights_are_asked_last_and_no_others_than_needed(algorithm: Subject):
    made, asked = algorithm.make(algorithm.options), list[str]()
    for batch in algorithm.batches():
        algorithm.loss(made, batch, asked)
        assert asked[-1] == CURRENT, f"{algorithm.file}: its loss asks {asked}; call velocity({CURRENT!r}) last"
        more = set(asked) - set(made.needs.roles)
        assert not more, f"{algorithm.file}: its loss asks for {', '.join(sorted(more))}, which needs.roles lacks"


def test_metrics_are_a_finite_number_a_sample_without_gradient(algorithm: Subject):
    made = algorithm.make(algorithm.options)
    for batch in algorithm.batches():
        metrics = algorithm.loss(made, batch)[0].metrics
        for name, value in metrics.items():
            where = f"{algorithm.file}: the metric {name!r}"
            assert value.shape == batch.t.shape, f"{where} is {tuple(value.shape)}, expected one number per sample"
            assert not value.requires_grad, f"{where} has a gradient; detach it"
            assert bool(value.isfinite().all()), f"{where} is {value.tolist()}; expected finite numbers"
        if isinstance(batch, Transitions):
            missing = set(DRIFT_METRICS) - metrics.keys()
            assert not missing, f"{algorithm.file}: metrics lack {', '.join(sorted(missing))}"


def test_a_loss_has_no_memory_and_leaves_its_batch_as_it_is(algorithm: Subject):
    """After a process was lost, training goes on with a new ``Algorithm``."""
    used = algorithm.make(algorithm.options)
    for batch, kept in zip(algorithm.batches(), algorithm.batches(), strict=True):
        losses = [algorithm.loss(made, batch)[0].per_sample for made in (used, used, algorithm.make(algorithm.options))]
        assert torch.equal(losses[0], losses[1]), f"{algorithm.file}: the same batch has another loss the second time"
        assert torch.equal(losses[0], losses[2]), f"{algorithm.file}: a new Algorithm has another loss than a used one"
        for name, tensor in vars(kept).items():
            same = not isinstance(tensor, Tensor) or torch.equal(tensor, getattr(batch, name))
            assert same, f"{algorithm.file}: its loss changes batch.{name} in place"


def test_a_loss_heeds_the_mask_of_given_dimensions(algorithm: Subject):
    """Given dimensions, here the first row, have no part in the gradient."""
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0], device="cpu").view(1, 1, 4, 1)
    for batch in algorithm.batches():
        loss, prediction = algorithm.loss(algorithm.make(algorithm.options), replace(batch, mask=mask))
        (gradient,) = torch.autograd.grad(loss.per_sample.sum(), prediction)
        given = gradient[:, :, 0].count_nonzero()
        assert given == 0, f"{algorithm.file}: its loss does not heed batch.mask; average with batch.mean"
        assert gradient[:, :, 1:].count_nonzero() > 0, f"{algorithm.file}: its loss has no gradient"


def test_advantages_are_of_samples_with_a_reward(algorithm: Subject):
    if not algorithm.options.rewarded:
        return
    made, file = algorithm.make(algorithm.options), algorithm.file
    rewards = [1.0, 2.0, 4.0, np.nan]
    scored = {"sample_id": list("abcd"), "prompt_id": ["p"] * 4, "reward": rewards, "valid": [True] * 3 + [False]}
    table = made.advantages(pd.DataFrame(scored))
    assert table["sample_id"].tolist() == list("abcd"), f"{file}: advantages drops or reorders samples"
    used = table["used"].to_numpy(dtype=bool)
    assert used.any(), f"{file}: advantages uses no sample of rewards {rewards}"
    assert not used[3], f"{file}: advantages uses a sample that is not valid"
    finite = np.isfinite(table["advantage"].to_numpy(dtype=float))
    assert (finite == used).all(), f"{file}: advantages must be finite where samples are used, and NaN elsewhere"
    if made.needs.unit == "pair":
        check_pairs(table, made.needs)


def check_pairs(table: Any, needs: Any) -> None:
    """Check that exactly samples of pairs are used, that these have a reward, and that pairs are as many as planned."""
    pairs = [
        (winner, loser)
        for winner, losers in zip(table["sample_id"], table["beats"], strict=True)
        for loser in losers.split()
    ]
    reward = dict(zip(table["sample_id"], table["reward"], strict=True))
    assert all(reward[winner] > reward[loser] for winner, loser in pairs)
    assert {*itertools.chain.from_iterable(pairs)} == {*table.loc[table["used"], "sample_id"]}
    assert 0 < len(pairs) <= needs.most_units(4)
    assert table["dropped"].tolist() == [0] * 4
    assert not needs.transitions
