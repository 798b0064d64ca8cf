"""The rollouts of its origin that a fork trains on: which ones exist, and the settings that they allow."""

from collections.abc import Iterator, Sequence
from typing import Any

from flows.planning import kinds, requests, stored
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.run import Run
from flows.terminal.numbers import ranges
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of, is_dropped, named_manifest, one_look
from stages.contracts import MEDIA, TENSORS

_NAMES = {
    "prompts": "prompts, their order or their number an iteration (train.train_policy.dataset, train.seed, rollout)",
    "n_generation": "samples a prompt (rollout.n_generation)",
    "media": "size or frames (policy.diffusers.inference_size, train_frames)",
    "sample": "sampler (policy.diffusers.sample)",
    "given_frames": "given frames (train.train_policy.max_num_conditional_frames)",
}
"""Settings of a rollout that a fork must have too, in words."""


def rollouts(run: AnyRun, origin: AnyRun) -> dict[str, Manifest]:
    """Return the rollouts of its origin that a run trains on, by their slots in the run."""
    if not run.trains_on_rewards:
        return {}
    found = {k: _rollout(origin, k) for k in range(run.plan.first, run.recipe.train.num_iterations)}
    return {run.slots.iteration(k, "rollout"): made for k, made in found.items() if made is not None}


def count(origin: AnyRun, first: int) -> int:
    """Return the first iteration, from ``first`` on, without a rollout; in a run without rewards, without a policy."""
    last = origin.recipe.train.num_iterations
    missing = _rollout if origin.trains_on_rewards else _trained
    return next((k for k in range(first, last) if missing(origin, k) is None), last)


def makers(run: AnyRun, ks: Sequence[int]) -> Iterator[tuple[Manifest, tuple[str, ...]]]:
    """Yield the policies that made stored rollouts, each once, with the parts that made them."""
    assert isinstance(run, Run)
    seen: set[str] = set()
    for k in ks if run.trains_on_rewards else ():
        source = stored.made_by(run, k)
        if source.manifest not in seen:
            seen.add(source.manifest)
            yield named_manifest(source), source.parts


def mistakes(origin: AnyRun, plan: AnyPlan) -> list[str]:
    """Return reasons why a plan cannot train on the rollouts of a run; empty if it can."""
    if kinds.of(origin.plan) is not None:
        return [f"{origin.plan.run_id} has no rollouts; change its settings with `fork --at 0`"]
    assert isinstance(origin, Run)
    if plan.first < origin.plan.first:
        return [f"{origin.plan.run_id} began with policy {origin.plan.first}; earlier iterations are of another recipe"]
    run = Run(plan, origin.store_url)  # pyright: ignore[reportArgumentType]
    if plan.recipe.validation is None:
        return ["the recipe has no [validation], so nothing would be compared; expected held-out prompts or media"]
    if (origin.recipe.policy.lora is None) != (run.recipe.policy.lora is None):
        return ["policy.lora: one run trains an adapter, the other all weights; change only settings of the adapter"]
    with one_look():
        if not run.trains_on_rewards:
            return [*_lacking_data(run)]
        return [*_unlike(origin, run), *_lacking_data(run)]


def _unlike(origin: Run, run: Run) -> Iterator[str]:
    ks = range(run.plan.first, run.recipe.train.num_iterations)
    if missing := [k for k in ks if _rollout(origin, k) is None]:
        there = [k for k in range(origin.recipe.train.num_iterations) if _rollout(origin, k) is not None]
        yield f"{origin.plan.run_id} has no rollout of iterations {ranges(missing)}; it has {ranges(there) or 'none'}"
        return
    made = {k: found for k in ks if (found := _rollout(origin, k)) is not None}
    if gone := [k for k, found in made.items() if is_dropped(found, TENSORS)]:
        yield f"the tensors of rollouts {ranges(gone)} were deleted (rollout.keep.tensors); name other iterations"
    wanted = {k: requests.sampling(run, k).identity() for k in made}
    for name in _NAMES:
        if any(wanted[k].get(name) != found.config.get(name) for k, found in made.items()):
            yield f"the rollouts were made with other settings: {_NAMES[name]}; generate anew with `fork`"
    recorded = {k: found.config.get("train_on", []) for k, found in made.items()}
    others = [k for k, steps in recorded.items() if steps != [*run.needs.steps_at(k)]]
    if run.needs.transitions and others:
        name, steps = run.recipe.train.train_policy.type, [*run.needs.steps_at(others[0])]
        yield f"{name} trains on recorded steps {steps}, the rollouts have {recorded[others[0]] or 'none'}"
    new = {reward.fn.label for reward in run.scored if reward not in origin.scored}
    reading = [r.fn.label for r in run.scored if r.fn.label in new and r.fn.reads(run.plan.media.frames) == "media"]
    if reading and (gone := [k for k, found in made.items() if is_dropped(found, MEDIA)]):
        yield f"the media of rollouts {ranges(gone)} were deleted (rollout.keep.media); {', '.join(reading)} reads them"
    if _trained_by(run.plan) != _trained_by(origin.plan):
        yield from _foreign(origin, run, made)


def _foreign(origin: Run, run: Run, made: dict[int, Manifest]) -> Iterator[str]:
    """Yield reasons why trained policies may not differ from the policies that made the rollouts, as they will."""
    later = [*made][1:]
    changed = origin.recipe.policy.lora != run.recipe.policy.lora
    if (changed or later) and (refusal := stored.needs_its_own(run)):
        yield refusal
    sources = {k: made[k].inputs["policy"][0] for k in (made if changed else later)}
    lost = [k for k, source in sources.items() if any(_is_gone(named_manifest(source), p) for p in source.parts)]
    if lost:
        yield (
            f"the weights that made rollouts {ranges(lost)} were deleted (train.ckpt.max_keep), so nobody can tell "
            f"how far a policy is from them; name iterations before {lost[0]}"
        )


def _lacking_data(run: Run) -> Iterator[str]:
    """Yield which prepared data is missing: nothing is made on the way to an answer about stored rollouts."""
    name = run.recipe.train.train_policy.type
    if lacking := [one for one in run.prepared.data.encodes if current_of(one.slot)[1] is None]:
        found = f"{len(lacking)} of {len(run.prepared.data.encodes)} sets of latents are not there"
        yield f"{name} reads encoded data: {found}; encode them first with `cosmos-flows preprocess`"


def _trained_by(plan: AnyPlan) -> dict[str, Any]:
    """Return the settings that decide the policies."""
    recipe = {name: value for name, value in plan.identity()["recipe"].items() if name != "validation"}
    return recipe | {"rewards": [one for one in recipe.get("rewards", ()) if one.get("role") != "monitor"]}


def _trained(run: AnyRun, k: int) -> Manifest | None:
    return current_of(run.slots.policy(k + 1))[1]


def _rollout(run: AnyRun, k: int) -> Manifest | None:
    return current_of(run.slots.iteration(k, "rollout"))[1]


def _is_gone(made: Manifest, part: str) -> bool:
    return made.has_part(part) and is_dropped(made, part)
