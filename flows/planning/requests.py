"""Turns a plan, and what stands of a run, into the Request of each stage."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.config.recipe import Recipe, RewardConfig
from cosmos_rl_core.config.train import DatasetOptions, RewardedOptions, SupervisedOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease, holder_of
from cosmos_rl_core.training.schedules import ema_decay, lr_factor
from cosmos_rl_core.weights.parts import CURRENT, EMA, REFERENCE, STATE, TRAINING_ONLY
from flows.planning import costs
from flows.planning.datasets import data_of
from flows.planning.plan import Plan, run_url
from stages import contracts
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import drop, input_of
from stages.contracts import INDEX, MEDIA, TENSORS, MediaShape, OptimizerSteps, StageConfig


@dataclass(frozen=True)
class Run:
    """A plan and the store it runs in. Slots are strings: where a stage's artifacts go."""

    plan: Plan
    store_url: str

    @property
    def url(self) -> str:
        """The run's root."""
        return run_url(self.store_url, self.plan.run_id)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.plan.recipe

    @property
    def trains_on_rewards(self) -> bool:
        """Whether iterations are rollout, reward, update (True) or finetune (False)."""
        return self.recipe.train.train_policy.rewarded

    @property
    def headline_reward(self) -> str:
        """The reward that the run is judged by: the first that trains, or the first; empty without any."""
        ordered = sorted(self.recipe.rewards, key=lambda reward: reward.role != "train")
        return ordered[0].fn.label if ordered else ""

    @property
    def needs_data(self) -> bool:
        """Whether rollouts or updates read prepared media."""
        return costs.needs_data(self.recipe)

    @property
    def evaluates(self) -> bool:
        """Whether exported policies are sampled on held-out prompts and scored."""
        return self.recipe.validation is not None and bool(self.recipe.rewards)

    @property
    def validates(self) -> bool:
        """Whether the diffusion loss of policies is measured on held-out media."""
        return self.recipe.validation is not None and self.recipe.validation.data is not None

    def is_due(self, k: int) -> bool:
        """Whether policy version k is exported and, where there is something to judge it on, judged."""
        freq = self.recipe.validation.freq if self.recipe.validation else 0
        return k in (0, self.recipe.train.num_iterations) or bool(freq and k % freq == 0)

    def going_to(self, iterations: int) -> "Run":
        """The same run with another number of iterations."""
        train = self.recipe.train.model_copy(update={"num_iterations": iterations})
        recipe = self.recipe.model_copy(update={"train": train})
        return replace(self, plan=self.plan.model_copy(update={"recipe": recipe}))

    def slot(self, *names: str) -> str:
        """URL of a slot of this run."""
        return store.join(self.url, *names)

    def lease(self) -> Lease:
        """What only one process at a time has that makes or deletes artifacts of this run."""
        return Lease(self.slot("lease"))

    def holder(self, patience_s: float) -> dict[str, Any] | None:
        """``pid`` and ``host`` of the process that has the lease; None if nobody works on the run.

        One on another machine gives a sign of life within ``patience_s``.
        """
        return holder_of(self.slot("lease"), patience_s)

    def iteration(self, k: int, stage: str) -> str:
        """URL of a stage's slot in iteration k."""
        return self.slot("iterations", f"{k:04d}", stage)

    def version(self, k: int, stage: str) -> str:
        """URL of the slot of a stage that judges policy version k: its export, its held-out samples, their scores."""
        return self.slot("exports", f"{k:04d}", stage)

    @property
    def policy_slot(self) -> str:
        """Where policy version 0 is."""
        return self.slot("policy")

    def policy_after(self, k: int) -> str:
        """Where policy version k is: 0 is the policy stage's, later ones the updates'."""
        return self.policy_slot if k == 0 else self.iteration(k - 1, "update" if self.trains_on_rewards else "finetune")

    def drop_old_state(self, newest: int) -> None:
        """Delete the training state of policies, and the parts of rollouts, that the recipe no longer keeps."""
        keep, of_rollouts = self.recipe.train.ckpt.max_keep, self.recipe.rollout.keep
        if keep is not None and newest > keep:
            drop(self.policy_after(newest - keep), *TRAINING_ONLY)
        for part, keep in ((TENSORS, of_rollouts.tensors), (MEDIA, of_rollouts.media)):
            if self.trains_on_rewards and keep is not None and newest > keep:
                drop(self.iteration(newest - 1 - keep, "rollout"), part)

    def policy(self) -> Request:
        """Policy version 0."""
        config = contracts.Policy(
            model=self.plan.base, from_scratch=self.recipe.policy.from_scratch, lora=self.recipe.policy.lora
        )
        return self._request(self.policy_slot, config)

    def embed(self) -> Request:
        """Text embeddings of the training prompts and of the data's; shared by every run that asks for the same."""
        return self._embed(self.plan.embedded_prompts, self.recipe.policy.diffusers.sample.negative_prompt)

    @cached_property
    def embed_slot(self) -> str:
        """Where the text embeddings are."""
        return self.embed().slot

    def encode(self) -> Request:
        """Latents of the data's media; shared by every run that asks for the same."""
        data = data_of(self.recipe)
        assert data is not None, "only an algorithm with data has media to encode"
        return self._encode(data, self.plan.data_digest)

    @cached_property
    def encode_slot(self) -> str:
        """Where the latents of the data's media are."""
        return self.encode().slot

    def embed_held_out(self) -> Request:
        """Text embeddings of the held-out media's prompts; shared like the others."""
        return self._embed(self.plan.held_out_prompts)

    def encode_held_out(self) -> Request:
        """Latents of the held-out media; shared like the others."""
        assert self.recipe.validation is not None
        assert self.recipe.validation.data is not None, "only a recipe with validation.data has held-out media"
        return self._encode(self.recipe.validation.data, self.plan.held_out_digest)

    def _embed(self, prompts: tuple[Prompt, ...], negative_prompt: str | None = None) -> Request:
        config = contracts.Embed(
            model=self.plan.base,
            # Embeddings depend on texts alone, and are shared by runs whose prompts have other metadata.
            prompts=tuple(Prompt(id=prompt.id, text=prompt.text) for prompt in prompts),
            negative_prompt=negative_prompt,
            max_prompt_length=self.recipe.policy.diffusers.max_prompt_length,
            prefixed=self.plan.prefixed,
        )
        return self._shared(config)

    def _encode(self, data: DatasetOptions, dataset_digest: str) -> Request:
        return self._shared(
            contracts.Encode(model=self.plan.base, dataset=data, dataset_digest=dataset_digest, media=self._media)
        )

    def _shared(self, config: StageConfig) -> Request:
        # No draw depends on the seed, so it is not part of what these are.
        request = self._request("?", config, seed=0)
        slot = store.join(store.absolute(self.store_url), "dataset", request.fingerprint)
        return request.model_copy(update={"slot": slot})

    def rollout(self, k: int) -> Request:
        """Samples of iteration k from the behaviour part of policy k."""
        rollout, given_frames = self.recipe.rollout, self.recipe.train.train_policy.given_frames
        config = contracts.Rollout(
            model=self.plan.model,
            lora=self.recipe.policy.lora,
            param_dtype=self.recipe.train.param_dtype,
            prompts=self.prompts_of(k),
            n_generation=rollout.n_generation,
            media=self._media,
            sample=self.recipe.policy.diffusers.sample.rollout,
            train_on=self._needs.train_on,
            use_same_seed=self._needs.use_same_seed,
            given_frames=given_frames,
            batch_size=rollout.n_generation_mini_batch,
            samples_per_shard=rollout.samples_per_shard,
        )
        inputs = {
            "policy": (self._behaviour(k),),
            "embeddings": (input_of(self.embed_slot),),
            "data": (input_of(self.encode_slot),) if given_frames[1] > 0 else (),
        }
        return self._request(self.iteration(k, "rollout"), config, k, inputs)

    def prompts_of(self, k: int) -> tuple[Prompt, ...]:
        """Prompts of iteration k: passes over the set, each in an order of its own, whole iterations only."""
        prompts, wanted = self.plan.prompts, self.recipe.prompts_per_iteration
        epoch, place = divmod(k, len(prompts) // wanted)
        order = seeds.permutation(len(prompts), self.recipe.train.seed, "prompt order", epoch)
        return tuple(prompts[i] for i in order[place * wanted : (place + 1) * wanted])

    def rewards(self, samples: str, k: int | None) -> list[Request]:
        """One scoring of the samples in a slot for each reward, side by side."""
        return [self.reward(reward, samples, k) for reward in self.recipe.rewards]

    def reward(self, reward: RewardConfig, samples: str, k: int | None) -> Request:
        """The scores of the samples in a slot by one reward."""
        folder, _, name = samples.rpartition("/")
        # Evaluations have no latents.
        reads = reward.fn.reads(self._media.frames) if name == "rollout" else "media"
        config = contracts.Reward(
            reward=reward.fn,
            reads=reads,
            scorer=plugins.load("rewards", reward.fn.name).Reward(reward.fn).version,
            max_attempts=reward.max_attempts,
            max_failed_fraction=reward.max_failed_fraction,
        )
        prefix = "reward" if name == "rollout" else name
        inputs = {"samples": (input_of(samples, INDEX, TENSORS if reads == "latents" else MEDIA),)}
        return self._request(store.join(folder, f"{prefix}-{reward.fn.label}"), config, k, inputs)

    def update(self, k: int) -> Request:
        """Policy k to policy k + 1."""
        recipe = self.recipe
        options = recipe.train.train_policy
        assert isinstance(options, RewardedOptions)
        batch = recipe.train.train_batch_per_replica
        num_steps = options.mu_iterations * (batch // (options.batch_size_per_optimize or batch))
        trained = [reward for reward in recipe.rewards if reward.role == "train"]
        config = contracts.Update(
            model=self.plan.model,
            lora=recipe.policy.lora,
            param_dtype=recipe.train.param_dtype,
            gradient_checkpointing=recipe.policy.model_gradient_checkpointing,
            algorithm=options,
            reward_weights={reward.fn.label: reward.weight for reward in trained},
            sample=recipe.policy.diffusers.sample.rollout,
            steps=self._steps(k * num_steps, num_steps),
            keeps_ema=recipe.train.ema_enable,
            old_decay=None if self._needs.old_decay is None else self._needs.old_decay(k),
            reference=costs.reference_after(recipe, k),
            density=recipe.policy.diffusers.density,
        )
        inputs = {
            "policy": (self._state(k),),
            "rollouts": (input_of(self.iteration(k, "rollout"), INDEX, TENSORS),),
            "behaviours": (self._behaviour(k),),
            "scores": tuple(input_of(self.iteration(k, f"reward-{reward.fn.label}")) for reward in trained),
            "embeddings": (input_of(self.embed_slot),),
            "data": (input_of(self.encode_slot),) if self._needs.data_term is not None else (),
        }
        return self._request(self.iteration(k, "update"), config, k, inputs)

    def finetune(self, k: int) -> Request:
        """A range of supervised steps: policy k to policy k + 1."""
        recipe, diffusers = self.recipe, self.recipe.policy.diffusers
        options = recipe.train.train_policy
        assert isinstance(options, SupervisedOptions)
        config = contracts.Finetune(
            model=self.plan.model,
            lora=recipe.policy.lora,
            param_dtype=recipe.train.param_dtype,
            gradient_checkpointing=recipe.policy.model_gradient_checkpointing,
            algorithm=options,
            dataset_digest=self.plan.data_digest,
            media=self._media,
            density=diffusers.density,
            batch_size=recipe.train.train_batch_per_replica,
            steps=self._steps(k * options.steps_per_iteration, options.steps_per_iteration),
            keeps_ema=recipe.train.ema_enable,
        )
        inputs = {"policy": (self._state(k),), "embeddings": (input_of(self.embed_slot),)}
        return self._request(self.iteration(k, "finetune"), config, k, inputs)

    def export_slot(self, k: int) -> str:
        """Where the export of policy version k goes."""
        return self.version(k, "export")

    def export(self, k: int) -> Request:
        """Policy version k as users load it, from the average where there is one."""
        config = contracts.Export(model=self.plan.base, lora=self.recipe.policy.lora)
        return self._request(self.export_slot(k), config, k, {"policy": (self._judged(k),)})

    def validate(self, k: int) -> Request:
        """The diffusion loss of policy version k on held-out media; every run draws the same noise."""
        assert self.recipe.validation is not None
        config = contracts.Validate(
            model=self.plan.model,
            lora=self.recipe.policy.lora,
            param_dtype=self.recipe.train.param_dtype,
            batch_size=self.recipe.validation.batch_size,
        )
        inputs = {
            "policy": (self._judged(k),),
            "embeddings": (input_of(self.embed_held_out().slot),),
            "data": (input_of(self.encode_held_out().slot),),
        }
        return self._request(self.version(k, "validate"), config, k, inputs, self.recipe.validation.seed)

    def evaluate(self, k: int) -> Request:
        """Held-out samples of policy version k.

        The iteration and the run's seed are no part of it: every run sees the same noise.
        """
        validation, diffusers = self.recipe.validation, self.recipe.policy.diffusers
        assert validation is not None
        config = contracts.Evaluate(
            model=self.plan.model,
            param_dtype=self.recipe.train.param_dtype,
            prompts=self.plan.validation_prompts,
            n_generation=validation.n_generation,
            media=self._media,
            num_steps=diffusers.sample.eval_num_steps,
            guidance_scale=diffusers.sample.guidance_scale,
            negative_prompt=diffusers.sample.negative_prompt,
            max_prompt_length=diffusers.max_prompt_length,
            batch_size=validation.batch_size,
            samples_per_shard=self.recipe.rollout.samples_per_shard,
        )
        inputs = {"export": (input_of(self.export_slot(k)),)}
        return self._request(self.version(k, "evaluate"), config, inputs=inputs, seed=validation.seed)

    def report(self, iterations: int, evaluated: list[int]) -> Request:
        """The page about all of it."""
        ks = range(iterations)
        reward = self.headline_reward
        config = contracts.Report(title=self.plan.run_id, reward=reward)
        inputs: dict[str, tuple[Input, ...]] = {"updates": tuple(input_of(self.policy_after(k + 1)) for k in ks)}
        if self.trains_on_rewards:
            inputs["rollouts"] = tuple(input_of(self.iteration(k, "rollout"), INDEX, MEDIA) for k in ks)
            inputs["scores"] = tuple(input_of(self.iteration(k, f"reward-{reward}")) for k in ks)
        inputs["evaluations"] = tuple(input_of(self.version(k, "evaluate"), INDEX, MEDIA) for k in evaluated)
        if reward:
            inputs["evaluation_scores"] = tuple(input_of(self.version(k, f"evaluate-{reward}")) for k in evaluated)
        return self._request(self.slot("report"), config, None, inputs)

    @property
    def _media(self) -> MediaShape:
        diffusers = self.recipe.policy.diffusers
        return MediaShape(size=diffusers.inference_size, frames=diffusers.train_frames)

    def _judged(self, k: int) -> Input:
        """The weights of policy version k that are exported: the average where there is one."""
        return input_of(self.policy_after(k), EMA if self.recipe.train.ema_enable else CURRENT)

    def _state(self, k: int) -> Input:
        """All that training goes on from: policy version k without what was only measured on the way."""
        return input_of(self.policy_after(k), *STATE)

    @cached_property
    def _needs(self) -> Needs:
        return costs.needs_of(self.recipe)

    def _behaviour(self, k: int) -> Input:
        """The weights that generate rollout k: those of ``staleness`` versions ago."""
        version, part = max(0, k - self.recipe.train.staleness), self._needs.behaviour
        if part == REFERENCE and self._needs.reference_after(0) == "base":
            version = 0
        return input_of(self.policy_after(version), part)

    def _steps(self, first_step: int, count: int) -> OptimizerSteps:
        train, steps = self.recipe.train, range(first_step, first_step + count)
        return OptimizerSteps(
            lrs=tuple(train.optm_lr * lr_factor(train, step) for step in steps),
            ema_decays=tuple(ema_decay(train, step) for step in steps),
            betas=train.optm_betas,
            epsilon=train.epsilon,
            weight_decay=train.optm_weight_decay,
            grad_norm_clip=train.optm_grad_norm_clip,
            first_step=first_step,
            optimizer=train.optm_name,
            max_nonfinite=train.max_nonfinite_steps,
        )

    def _request(
        self,
        slot: str,
        config: StageConfig,
        k: int | None = None,
        inputs: dict[str, tuple[Input, ...]] | None = None,
        seed: int | None = None,
    ) -> Request:
        return Request(
            stage=config.name,
            version=self.plan.stage_versions.get(config.name, config.version),
            slot=slot,
            iteration=k,
            seed=self.recipe.train.seed if seed is None else seed,
            config=config,
            inputs=inputs or {},
            plugins=self.plan.plugins,
        )
