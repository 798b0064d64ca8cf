"""A plain resident loop of DiffusionNFT, as public scripts have it: what this project is compared with.

One process holds everything: the stock pipeline of diffusers, adapters of peft, a scorer, an optimizer. The recipe and
the draws (prompts, noise, noise levels, order) come from a run of this project, so that its first step is the same.
No file is written and nothing is checked: a kill loses all.

``python -m tests.benchmarks.naive_loop configs/tiny/nft.toml --iterations 2`` prints a line of JSON an iteration.
Without ``--iterations`` each line of standard input begins one.
"""

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import Tensor

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.algorithms._base import Batch, algorithm_of
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.training.noise_levels import DrawKey, random_times, training_noise
from cosmos_rl_core.weights.lora import peft_settings
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, REFERENCE
from cosmos_rl_core.weights.policy_weights import initial_lora
from flows.planning.plan import Settings, plan_of
from tests.benchmarks.peak import peak_bytes

Variant = Literal["three", "two", "merged"]
"""``three``: a forward pass each of old, reference and current, whatever the loss weighs. ``two``: none of the
reference, for recipes without a KL. ``merged``: like ``two``, and the old copy is a model with its adapter merged."""
CURRENT_ADAPTER, OLD_ADAPTER = "default", "old"


class NaiveLoop:
    """The models and the optimizer of a run, and its iterations."""

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str] = (),
        variant: Variant = "three",
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.device = device
        self.plan, self.variant, self.k = plan_of(Settings(recipe, overrides=overrides)), variant, 0
        self.train, self.rollout_config = self.plan.recipe.train, self.plan.recipe.rollout
        self.diffusers, reward = self.plan.recipe.policy.diffusers, self.plan.recipe.rewards[0]
        path = directories.resolve_path(self.plan.model.path)
        self.pipe: Any = StableDiffusion3Pipeline.from_pretrained(path, dtype=torch.float32).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.scorer, self.reward = plugins.load("rewards", reward.fn.name).Reward(reward.fn), reward
        self.texts = {prompt.id: self.encode(prompt.text) for prompt in self.plan.prompts}

        self.transformer = self.pipe.transformer.requires_grad_(False).eval()
        self.merged = copy.deepcopy(self.transformer) if variant == "merged" else None
        lora = self.plan.recipe.policy.lora
        assert lora is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            for adapter in (OLD_ADAPTER, CURRENT_ADAPTER):
                settings: Any = peft_settings(lora, lora.target_modules)
                self.transformer.add_adapter(LoraConfig(**settings), adapter_name=adapter)
        self.current, self.old = self.tensors(CURRENT_ADAPTER), self.tensors(OLD_ADAPTER)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.current.items()}
        for name, tensor in initial_lora(shapes, lora, seeds.derive(self.train.seed, "policy")).items():
            self.current[name].data.copy_(tensor)
        self.copy_to_old(decay=0.0)
        self.use(CURRENT)
        self.algorithm = algorithm_of(self.train.train_policy)
        self.optimizer = torch.optim.AdamW(
            [self.current[name] for name in sorted(self.current)],
            lr=self.train.optm_lr,
            betas=self.train.optm_betas,
            eps=self.train.epsilon,
            weight_decay=self.train.optm_weight_decay,
        )
        self.warm_up()

    def tensors(self, adapter: str) -> dict[str, Any]:
        """The parameters of an adapter, by names without it."""
        named = dict(self.transformer.named_parameters())
        return {name.replace(f".{adapter}.", "."): p for name, p in named.items() if f".{adapter}." in name}

    @torch.no_grad()
    def encode(self, text: str) -> tuple[Tensor, Tensor]:
        """Text embeddings, once for the whole run."""
        options: Any = {"do_classifier_free_guidance": False, "device": self.device}
        options["max_sequence_length"] = self.diffusers.max_prompt_length
        embeds, _, pooled, _ = self.pipe.encode_prompt(text, text, text, **options)
        return embeds, pooled

    def condition(self, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Text embeddings of samples, batched."""
        embeds, pooled = zip(*(self.texts[sample["prompt"].id] for sample in samples), strict=True)
        return torch.cat(embeds), torch.cat(pooled)

    def warm_up(self) -> None:
        """Pay once for what happens once, such as the scorer's session; nothing moves."""
        samples = self.rollout(self.plan.prompts[:1], self.rollout_config.n_generation_mini_batch)
        self.score(samples)
        self.losses([sample | {"advantage": 0.0} for sample in samples], place=0).sum().backward()
        self.optimizer.zero_grad()

    def iteration(self) -> dict[str, Any]:
        """Do one, and return the seconds of its parts."""
        turns = [time.perf_counter()]
        samples = self.rollout(self.plan.prompts_of(self.k), self.rollout_config.n_generation)
        turns.append(time.perf_counter())
        self.score(samples)
        turns.append(time.perf_counter())
        steps = list(self.update(samples))
        turns.append(time.perf_counter())
        self.k += 1
        seconds = np.diff(turns).tolist()
        found = dict(zip(("rollout_s", "reward_s", "update_s"), seconds, strict=True)) | {"iteration_s": sum(seconds)}
        found |= {"samples": len(samples), "reward": float(np.mean([sample["reward"] for sample in samples]))}
        return found | {"loss": [s[0] for s in steps], "grad_norm": [s[1] for s in steps], "peak_bytes": peak_bytes()}

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt], members: int) -> list[dict[str, Any]]:
        """Samples by the old copy and the stock pipeline: latents and pixels."""
        height, width = self.diffusers.inference_size
        factor, channels = self.pipe.vae_scale_factor, self.transformer.config.in_channels
        every: list[dict[str, Any]] = [
            {
                "id": f"i{self.k:04d}-{p.id}-{m:03d}",
                "prompt": p,
                "seed": seeds.sample_seed(self.train.seed, self.k, p.id, m),
            }
            for p in prompts
            for m in range(members)
        ]
        self.pipe.transformer = self.use(BEHAVIOUR)
        for samples in _batches(every, self.rollout_config.n_generation_mini_batch):
            shape = channels, height // factor, width // factor
            noise = np.stack([seeds.normal(shape, sample["seed"], "initial noise", 0) for sample in samples])
            embeds, pooled = self.condition(samples)
            with computes_in(self.train.param_dtype, self.device):
                latents = self.pipe(
                    prompt_embeds=embeds,
                    pooled_prompt_embeds=pooled,
                    latents=torch.from_numpy(noise).to(self.device),
                    num_inference_steps=self.diffusers.sample.num_steps,
                    guidance_scale=self.diffusers.sample.guidance_scale,
                    height=height,
                    width=width,
                    output_type="latent",
                ).images.float()
            vae = self.pipe.vae
            images = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
            pictures = self.pipe.image_processor.postprocess(images, output_type="pil")
            for sample, own, picture in zip(samples, latents, pictures, strict=True):
                sample |= {"latents": own, "pixels": np.asarray(picture)[None]}
        return every

    def score(self, samples: Sequence[dict[str, Any]]) -> None:
        """Add rewards and advantages to the samples."""
        asked = [Sample(s["id"], s["prompt"].id, s["prompt"].text, pixels=s["pixels"]) for s in samples]
        for sample, scores in zip(samples, self.scorer.score(asked), strict=True):
            sample["reward"] = self.reward.weight * scores[self.reward.fn.label]
        rows = [{"sample_id": s["id"], "prompt_id": s["prompt"].id, "reward": s["reward"]} for s in samples]
        table = self.algorithm.advantages(pd.DataFrame(rows).assign(valid=True))
        for sample, advantage in zip(samples, table["advantage"], strict=True):
            sample["advantage"] = float(advantage)

    def update(self, samples: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
        """Take one optimizer step after the other, and yield loss and gradient norm of each."""
        options: Any = self.train.train_policy
        order = [samples[i] for i in seeds.permutation(len(samples), self.train.seed, "update order", self.k, 0)]
        num_times = self.algorithm.needs.num_times(self.diffusers.sample.num_steps)
        for step in _batches(order, options.batch_size_per_optimize):
            loss = 0.0
            for micro in _batches(step, options.mini_batch):
                for place in range(num_times):
                    share = self.losses(micro, place).sum() / (len(step) * num_times)
                    share.backward()
                    loss += float(share.detach())
            norm = torch.nn.utils.clip_grad_norm_(self.current.values(), self.train.optm_grad_norm_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield loss, float(norm)
        assert self.algorithm.needs.old_decay is not None
        self.copy_to_old(self.algorithm.needs.old_decay(self.k))

    def losses(self, samples: Sequence[dict[str, Any]], place: int) -> Tensor:
        """Loss of each sample at the ``place``-th of its noise levels, ``[B]``."""
        scheduler = self.pipe.scheduler
        keys = [DrawKey(self.train.seed, self.k, 0, f"0/{sample['id']}") for sample in samples]
        x_0 = torch.stack([sample["latents"] for sample in samples])
        noise = torch.stack([training_noise(tuple(x_0.shape[1:]), key, place) for key in keys])
        t = torch.tensor([random_times(tuple(scheduler.sigmas.tolist()), place + 1, key)[place] for key in keys])
        advantages = torch.tensor([sample["advantage"] for sample in samples])
        batch = Batch(x_0, noise.to(self.device), t.to(self.device), advantages.to(self.device))
        embeds, pooled = self.condition(samples)

        def velocity(part: str) -> Tensor:
            model = self.use(part)
            grad = nullcontext() if part == CURRENT else torch.no_grad()
            with grad, computes_in(self.train.param_dtype, self.device):
                return model(
                    hidden_states=batch.x_t,
                    timestep=batch.t * scheduler.config.num_train_timesteps,
                    encoder_hidden_states=embeds,
                    pooled_projections=pooled,
                    return_dict=False,
                )[0].float()

        if self.variant == "three" and REFERENCE not in self.algorithm.needs.roles:
            velocity(REFERENCE)
        return self.algorithm.loss(velocity, batch).per_sample

    def use(self, part: str) -> Any:
        """The transformer with the weights of a part."""
        if part == BEHAVIOUR and self.merged is not None:
            return self.merged
        if part == REFERENCE:
            self.transformer.disable_adapters()
            return self.transformer
        self.transformer.enable_adapters()
        self.transformer.set_adapter(OLD_ADAPTER if part == BEHAVIOUR else CURRENT_ADAPTER)
        return self.transformer

    @torch.no_grad()
    def copy_to_old(self, decay: float) -> None:
        """Move the old copy towards the trained adapter, and merge it again."""
        for name, parameter in self.old.items():
            parameter.mul_(decay).add_(self.current[name], alpha=1 - decay)
        if self.merged is None:
            return
        for name, module in self.transformer.named_modules():
            # Of peft: a layer with adapters.
            if isinstance(module, Linear):
                base: Any = module.get_base_layer()
                self.merged.get_submodule(name).weight.copy_(base.weight + module.get_delta_weight(OLD_ADAPTER))


def _batches(items: list[dict[str, Any]], size: int | None) -> list[list[dict[str, Any]]]:
    size = size or len(items)
    return [items[start : start + size] for start in range(0, len(items), size)]


def main(argv: list[str]) -> int:
    """Run iterations and print what each took; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.naive_loop", description=main.__doc__)
    parser.add_argument("recipe", help="a recipe of NFT on a Stable Diffusion 3 with LoRA")
    parser.add_argument("--variant", choices=get_args(Variant), default="three")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="section.key=value")
    parser.add_argument("--iterations", type=int, help="default: one for each line of standard input")
    settings = parser.parse_args(argv)
    torch.set_num_threads(1)
    loop = NaiveLoop(settings.recipe, settings.overrides, settings.variant)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin if settings.iterations is None else range(settings.iterations):
        print(json.dumps(loop.iteration()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
