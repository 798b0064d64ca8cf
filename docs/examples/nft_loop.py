"""DiffusionNFT in one process: an iteration of this project as one loop to read, without its stages.

    python docs/examples/nft_loop.py configs/tiny/nft.toml 4

It trains the tiny Stable Diffusion 3 of the demo with the functions that the stages call, and draws the same prompts,
noise and orders as a run of the recipe. Stages store, check and retry each result; here nothing is written, so a kill
loses all. It reads recipes of NFT with LoRA, one reward and no guidance.
"""

import sys

import numpy as np
import pandas as pd
import torch

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.algorithms import nft
from cosmos_rl_core.interfaces.algorithms import BEHAVIOUR, CURRENT, OLD, Batch
from cosmos_rl_core.interfaces.models import stack
from cosmos_rl_core.interfaces.rewards import Sample
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.recipes.reading import check, read_values
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.training.noise_levels import DrawKey, random_times, training_noise
from cosmos_rl_core.training.optimizer import loss_share, make_optimizer, optimizer_step
from cosmos_rl_core.training.schedules import lr_factor
from cosmos_rl_core.weights.policy_weights import initial_lora, prepare

CPU = torch.device("cpu")
torch.set_num_threads(1)

# The recipe: plain values, read and checked as `cosmos-flows plan` does.
path, *overrides = sys.argv[1:] or ["configs/tiny/nft.toml"]
num_iterations = int(overrides.pop(0)) if overrides and overrides[0].isdigit() else 4
recipe = check(read_values(path, overrides), path)
policy, train, rollout, seed = recipe.policy, recipe.train, recipe.rollout, recipe.train.seed
diffusers, size, frames = policy.diffusers, policy.diffusers.inference_size, policy.diffusers.train_frames
options = train.train_policy
if not isinstance(options, nft.Options) or policy.lora is None:
    sys.exit("this loop trains an adapter (policy.lora) by train_policy.type = 'nft'; take another recipe")
unread = [
    f"{table}.{name} = {getattr(section, name)}"
    for table, section, names in (
        ("policy", policy, "init_from"),
        ("policy.lora", policy.lora, "lora_dropout"),
        ("train", train, "optm_name param_dtype staleness ema_enable"),
        ("train.train_policy", options, "mu_iterations shuffle_rewards shuffle_groups data max_num_conditional_frames"),
        ("rollout", rollout, "decode_share decode_dtype decode_tf32"),
    )
    for name in names.split()
    if getattr(section, name) != type(section).model_fields[name].default
]
if len(recipe.rewards) != 1 or diffusers.sample.guidance_scale != 1 or options.kl_beta > 0:
    unread.append("several rewards, guidance or a KL")
if unread:
    sys.exit(f"this loop does not read {', '.join(unread)}; run cosmos-flows")

# The model: a plugin that reads a directory of diffusers. Its purpose is `velocity(x_t, t, conditioning)`.
base = directories.resolve_path(policy.model_name_or_path)
adapter = plugins.load_model(directories.adapter_name(base))
model = adapter.load(base, ("text", "transformer", "vae"), CPU)

# Prompts and their embeddings, which do not change: encoded once.
dataset = options.dataset
prompts = plugins.load("datasets", dataset.name).prompts(dataset)
texts = model.encode_prompts([prompt.text for prompt in prompts], diffusers.max_prompt_length)
conditioning_of = {prompt.id: text for prompt, text in zip(prompts, texts, strict=True)}

# The policy: an adapter that trains, `current`, and a slow copy of it that makes the samples, `old`.
weights = prepare(model.transformer, policy.lora, reference=False)
shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
weights.load(CURRENT, initial_lora(shapes, policy.lora, seeds.derive(seed, "policy")))
weights.create(OLD)

# The algorithm turns rewards into advantages, and velocities into a loss. The sampler is a table of linear steps.
algorithm = nft.Algorithm(options)
(scored_by,) = recipe.rewards
reward = plugins.load("rewards", scored_by.fn.name).Reward(scored_by.fn)
kernel = kernel_of(diffusers.sample, lambda: model.schedule(diffusers.sample.num_steps, size, frames))
num_times = algorithm.needs.num_times(diffusers.sample.num_steps)
optimizer = make_optimizer(
    weights.parameters, betas=train.optm_betas, eps=train.epsilon, weight_decay=train.optm_weight_decay
)
history: list[dict[str, float]] = []
num_steps = 0

for k in range(num_iterations):
    # 1. Rollout: noise to latents by `old`, then to pixels.
    per_pass = len(prompts) // recipe.prompts_per_iteration
    order = seeds.permutation(len(prompts), seed, "prompt order", k // per_pass)
    chosen = order[k % per_pass * recipe.prompts_per_iteration :][: recipe.prompts_per_iteration]
    samples = [
        {"sample_id": f"i{k:04d}-{prompts[i].id}-{member:03d}", "prompt_id": prompts[i].id, "text": prompts[i].text,
         "seed": seeds.sample_seed(seed, k, prompts[i].id, member)}
        for i in chosen for member in range(rollout.n_generation)
    ]  # fmt: skip
    latents, pixels = [], []
    for start in range(0, len(samples), rollout.n_generation_mini_batch):
        some = samples[start : start + rollout.n_generation_mini_batch]
        conditioning = stack([conditioning_of[one["prompt_id"]] for one in some], CPU)
        shape = model.latent_shape(size, frames)
        noise = torch.from_numpy(np.stack([seeds.normal(shape, one["seed"], "initial noise", 0) for one in some]))
        with weights.use(OLD):
            made = sample(lambda x_t, t, known=conditioning: model.velocity(x_t, t, known), noise, kernel).latents
        latents.append(made)
        pixels.append(model.decode(made).numpy())
    x_0, pictures = torch.cat(latents), np.concatenate(pixels)

    # 2. Rewards, and advantages within the samples of each prompt.
    shown = [
        Sample(one["sample_id"], one["prompt_id"], one["text"], picture)
        for one, picture in zip(samples, pictures, strict=True)
    ]
    found = [scores[scored_by.fn.label] for scores in reward.score(shown) if not isinstance(scores, Exception)]
    if len(found) != len(samples):
        sys.exit(f"{scored_by.fn.label} failed for {len(samples) - len(found)} samples; a failure is never a number")
    rewards = scored_by.weight * np.array(found)
    advantages = algorithm.advantages(pd.DataFrame(samples).assign(reward=rewards, valid=True))["advantage"].to_numpy()

    # 3. Update: optimizer steps over shuffled samples, each at several noise levels with noise of its own.
    order = seeds.permutation(len(samples), seed, "update order", k, 0)
    per_step = options.batch_size_per_optimize or len(order)
    losses: list[float] = []
    for start in range(0, len(order), per_step):
        step, loss = order[start : start + per_step], 0.0
        for begin in range(0, len(step), options.mini_batch):
            rows = step[begin : begin + options.mini_batch]
            keys = [DrawKey(seed, k, 0, f"0/{samples[row]['sample_id']}") for row in rows]
            conditioning = stack([conditioning_of[samples[row]["prompt_id"]] for row in rows], CPU)
            for place in range(num_times):
                batch = Batch(
                    x_0=x_0[rows],
                    noise=torch.stack([training_noise(tuple(x_0.shape[1:]), key, place) for key in keys]),
                    t=torch.tensor([random_times(kernel.levels, num_times, key)[place] for key in keys]),
                    advantages=torch.tensor(advantages[rows], dtype=torch.float32),
                )

                def velocity(part: str, batch: Batch = batch, known=conditioning) -> torch.Tensor:
                    with weights.use(OLD if part == BEHAVIOUR else part):
                        return model.velocity(batch.x_t, batch.t, known)

                share = loss_share(algorithm.loss(velocity, batch).per_sample, len(step), num_times)
                share.backward()
                loss += float(share.detach())
        lr, limit = train.optm_lr * lr_factor(train, num_steps), train.optm_grad_norm_clip
        optimizer_step(optimizer, weights.parameters, lr=lr, max_norm=limit, group=None)
        num_steps += 1
        losses.append(loss)

    # 4. The slow copy follows.
    weights.lerp_(OLD, options.old_decay(k))
    history.append({"reward": float(rewards.mean()), "loss": float(np.mean(losses))})
    print(f"iteration {k}: reward {history[-1]['reward']:.3f}, loss {history[-1]['loss']:.4f}", flush=True)
