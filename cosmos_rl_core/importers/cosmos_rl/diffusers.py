"""Rows of cosmos-rl's diffusers path: DiffusionNFT and supervised fine-tuning, "schema A"."""

from collections.abc import Callable, Iterator
from typing import Any

from cosmos_rl_core.config.policy import NOT_IN_LORA
from cosmos_rl_core.importers.cosmos_rl import diffusers_rows as rows
from cosmos_rl_core.importers.cosmos_rl import lengths
from cosmos_rl_core.importers.cosmos_rl.diffusers_rows import SAMPLE
from cosmos_rl_core.importers.cosmos_rl.kinds import POLICY, is_supervised
from cosmos_rl_core.importers.cosmos_rl.lengths import DATASET
from cosmos_rl_core.importers.cosmos_rl.rewards import REMOTE, remote_row, total_bound_row
from cosmos_rl_core.importers.cosmos_rl.rows import (
    CLUSTER,
    DETERMINISTIC,
    FLOAT16,
    Row,
    Upstream,
    among,
    answer_of,
    is_true,
    named,
    number,
    refused,
    table,
    taken,
    to,
    unless_none,
    when,
)

MARKS = (
    "redis", "mode", "policy.is_diffusers", "policy.parallelism", "rollout.parallelism", "train.epoch", "vla", "custom",
    "distillation", "eth_ips", "train.output_dir", "train.compile", "train.train_policy.trainer_type",
    "policy.model_max_length", "rollout.backend", "validation.enable",
)  # fmt: skip
"""Keys of this schema. A file in it has some of them; a recipe of this project has none of them."""

TRAINING: dict[str, Any] = {
    "train.epoch": 1,
    "train.optm_lr": 1e-6,
    "train.optm_warmup_steps": 20,
    "train.epsilon": 1e-6,
    "train.optm_grad_norm_clip": 1.0,
    "train.optm_weight_decay": 0.01,
    "train.param_dtype": "bfloat16",
    "train.train_batch_per_replica": 8,
    "train.ckpt.save_freq": 20,
    "train.ckpt.max_keep": 5,
    "train.ema_decay": 0.9999,
    f"{POLICY}.type": None,
    f"{POLICY}.mini_batch": 2,
    "policy.model_gradient_checkpointing": True,
    "policy.lora.init_lora_weights": True,
    "validation.freq": 20,
}
"""cosmos-rl's defaults of training, the same for diffusion models and vision-language models."""

DEFAULTS: dict[str, Any] = TRAINING | {
    f"{POLICY}.kl_beta": 0.0,
    f"{POLICY}.use_remote_reward": False,
    f"{DATASET}.name": "",
    f"{DATASET}.local_dir": "",
    "policy.diffusers.is_video": False,
    "policy.diffusers.inference_size": [1024, 1024],
    "policy.diffusers.train_frames": 41,
    "policy.diffusers.timesteps_fraction": 1.0,
    "policy.diffusers.weight_copy_decay_type": 0,
    f"{SAMPLE}.num_steps": 40,
    f"{SAMPLE}.eval_num_steps": 40,
    f"{SAMPLE}.guidance_scale": 4.5,
    f"{SAMPLE}.solver": "dpm2",
    "rollout.n_generation": 16,
    "validation.n_generation": 1,
    "validation.dataset.name": "",
    "validation.dataset.local_dir": "",
}
"""cosmos-rl's defaults of keys whose default differs here, or that several settings depend on."""


def implied(upstream: Upstream) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield settings that no key sets, because cosmos-rl fixes them in its code, each with a reason."""
    if is_supervised(upstream):
        if rows.is_sd3(upstream):
            yield {"policy.diffusers.posterior": "sample"}, "cosmos-rl draws SD3's latents from the VAE's posterior"
        if lengths.validates(upstream):
            yield {"validation.n_generation": 1}, "cosmos-rl validates supervised training with one sample a prompt"
        return
    yield {f"{POLICY}.global_std": False}, "cosmos-rl divides by each prompt's deviation"
    if rows.asks_service(upstream):
        yield {f"{POLICY}.unbiased_std": True}, "over n - 1 if a service scores"
    clock = "cosmos-rl counts training steps from 1"
    if _averages(upstream):
        yield {"train.ema_first_step": 1}, clock
    if upstream["policy.diffusers.weight_copy_decay_type"] != 0:
        yield {f"{POLICY}.weight_copy_first_step": 1}, clock


_averages = is_true("train.ema_enable")


def _decays(upstream: Upstream) -> bool:
    return upstream["train.optm_decay_type"] not in (None, "None", "", "none")


_AT_A_TIME = "stages run one after the other unless train.staleness is set"
_EVERY_POLICY = "every policy is an artifact; validation.freq and train.ckpt.export_every set which are exported"
_BY_SEED = "train.seed draws prompts and media, the same with any number of workers"
_NO_REWARD_FUNCTION = "cosmos-rl's own reward functions do not exist here; see use_remote_reward"
_NO_SUBSETS = "prompt sets and folders have none"
_NO_CHECKPOINT = "cosmos-rl's checkpoints cannot be read: make a pipeline of it and set policy.model_name_or_path"
_NO_UPLOAD = "nothing is uploaded: `cosmos-flows export` writes a folder for `hf upload`"
_STALENESS = "train.staleness sets the age of a rollout's policy; default 0"
_FLOAT32 = "weights, states and gradients are float32"
_PARALLEL = (
    "n_init_replicas tp_size cp_size ep_size dp_shard_size pp_size dp_replicate_size pp_dynamic_shape "
    "pp_micro_batch_size pp_schedule pp_layers_per_stage"
)

_SEED = to("train.seed", lambda seed: 42 if number(seed) < 0 else seed, "negative ones are 42")
_INTERVAL = to("train.ema_update_step_interval", lambda steps: steps or 1)
_OLD_DECAY = to(f"{POLICY}.weight_copy_decay_type", {0: "none", 1: "linear", 2: "delayed"}.get)
_BASE_FIRST = refused("the adapters start from the base model: choose true or gaussian")
_INIT = among((True, "gaussian"), taken, _BASE_FIRST)

_ALWAYS = table({
    "redis eth_ips": "processes exchange artifacts only",
    "mode": _AT_A_TIME,
    "custom.*": "for scripts of the user, which are not run here",
    "profiler.*": "there is no profiler; every manifest records the time of its stage",
    "train.epoch": lengths.epoch_row,
    "train.max_num_steps": unless_none(lengths.max_num_steps_row),
    "train.train_batch_per_replica": lengths.batch_row,
    "train: optm_lr optm_betas ema_enable": taken,
    "train.optm_lr.*": refused("there is one learning rate for all parameters"),
    "train.optm_name": among(("AdamW",), "AdamW is the default", taken),
    "train.optm_impl": "one implementation of the same arithmetic",
    "train: optm_grad_norm_clip epsilon": rows.summed_row,
    "train.optm_weight_decay": rows.weight_decay_row,
    "train.optm_warmup_steps": lengths.warmup_row,
    "train.optm_warmup_start_factor": when(lambda file: file["train.optm_warmup_steps"] != 0, taken, "no warm-up"),
    "train.optm_decay_type": unless_none(lengths.decay_type_row),
    "train.optm_decay_ratio": unless_none(when(_decays, taken, "there is no decay")),
    "train.optm_min_lr_factor": when(_decays, taken, "there is no decay"),
    "train.ema_decay": when(_averages, taken, "train.ema_enable is not true"),
    "train.ema_update_step_interval": when(_averages, _INTERVAL, "train.ema_enable is not true"),
    "train.seed": unless_none(_SEED),
    "train.param_dtype": among(("bfloat16", "float32"), taken, refused(FLOAT16)),
    "train: master_dtype transfer_dtype fsdp_reduce_dtype logprob_dtype": _FLOAT32,
    "train.fsdp_offload": "put fsdp_offload = ... in a cluster profile (deployments/clusters, --cluster)",
    "train.fsdp_reshard_after_forward": "shared weights are freed after each block's pass",
    "train.resume": among((True, False), "the same command continues where it stopped", refused(_NO_CHECKPOINT)),
    "train.output_dir": "--store sets where runs are",
    "train.timestamp": "--run-id sets the run's name",
    "train.compile": "launch.compile of a cluster profile sets it",
    "train.deterministic": DETERMINISTIC,
    "train.non_text": "samples are never text",
    "train: sync_weight_interval coalesce_weight_sync": _AT_A_TIME,
    "train: save_ckpt_at_exit signal_to_handle": "every finished stage and shard is kept",
    "train.local_dataset": _BY_SEED,
    "train.ckpt.max_keep": among((-1,), "every policy is kept", taken),
    "train.ckpt: enable_checkpoint save_freq_in_epoch save_mode export_safetensors": _EVERY_POLICY,
    "train.ckpt: upload_hf hf_repo_name upload_s3 s3_bucket s3_prefix": _NO_UPLOAD,
    f"{POLICY}: type trainer_type": rows.type_row,
    f"{POLICY}.mini_batch": taken,
    f"{POLICY}: reward_function reward_function.*": _NO_REWARD_FUNCTION,
    f"{POLICY}.bypass_reward": among((False,), "rewards are never left out", refused("set it to false")),
    f"{POLICY}.filter_reward_metric": "cosmos-rl does not apply it to rewards of a service",
    f"{POLICY}: allowed_outdated_steps on_policy uncentralized_training": _STALENESS,
    f"{POLICY}: dataloader_shuffle dataloader_seed dataloader_num_workers dataloader_batch_size "
    "dataloader_prefetch_factor dataloader_drop_last dataloader_broadcast": _BY_SEED,
    f"{POLICY}: dataset.subset dataset.revision dataset.test_size": _NO_SUBSETS,
    "policy.is_diffusers": among((True,), "all models here are diffusion models", refused("must be true or false")),
    "policy.model_name_or_path": rows.model_row,
    "policy.model_revision": unless_none(rows.model_row),
    "policy.model_gradient_checkpointing": taken,
    "policy.lora": taken,
    f"policy.parallelism: {_PARALLEL}": CLUSTER,
    # cosmos-rl does not read lora_dropout, use_rslora and the patterns for diffusion models; here they have effect.
    "policy.lora: r lora_alpha lora_dropout use_rslora": taken,
    "policy.lora.target_modules": unless_none(taken),
    "policy.lora.init_lora_weights": when(lambda file: file.says("policy.lora"), _INIT, "there is no [policy.lora]"),
    "policy.lora: alpha_pattern alpha_pattern.* r_pattern r_pattern.*": unless_none(rows.pattern_row),
    "policy.lora: lora_names primary_adapter": "the algorithm decides which copies of the adapters exist",
    "policy.lora.lora_path": unless_none(refused(NOT_IN_LORA["lora_path"])),
    "policy.lora.modules_to_save": unless_none(refused(NOT_IN_LORA["modules_to_save"])),
    "policy.diffusers.is_video": rows.is_video_row,
    "policy.diffusers.train_frames": rows.train_frames_row,
    "policy.diffusers.inference_frames": "evaluations are as long as policy.diffusers.train_frames",
    "policy.diffusers: inference_size max_prompt_length": taken,
    "policy.diffusers.dtype": _FLOAT32,
    "policy.diffusers.offload": "each stage loads only the parts of the model that it needs",
    "policy.diffusers: train_flow_shift lora.* sample.global_std": "cosmos-rl does not read it for diffusion models",
    "policy.diffusers.tokenizer.*": "sets how cosmos-rl's reward client encodes videos",
    "rollout.batch_size": "rollout.n_generation_mini_batch sets the samples of a forward pass",
    "rollout.seed": unless_none("rollouts draw from train.seed"),
    "rollout: backend mode": "the model's own plugin makes rollouts",
    f"rollout.parallelism: {_PARALLEL}": CLUSTER,
    "validation: dataset.subset dataset.revision dataset.test_size": _NO_SUBSETS,
    "validation: use_remote_reward remote_reward.* reward_function": "the same [[rewards]] score evaluations",
    "logging.logger": rows.logger_row,
    "logging.project_name": taken,
    "logging: group_name experiment_name": unless_none(taken),
    "logging.multi_modal_log_interval": "the report shows samples of every evaluation",
})  # fmt: skip

_ROLLOUTS = table({
    f"{POLICY}: kl_beta advantage_low advantage_high mu_iterations": taken,
    f"{POLICY}.batch_size_per_optimize": unless_none(rows.batch_per_optimize_row),
    f"{POLICY}.use_remote_reward": remote_row,
    "policy.diffusers.nft_beta": named(POLICY),
    "policy.diffusers.weight_copy_decay_type": among((0, 1, 2), _OLD_DECAY, refused("must be 0, 1 or 2")),
    "policy.diffusers.timesteps_fraction": named(POLICY),
    "policy.diffusers.timestep_fraction": rows.misspelt_fraction_row,
    f"{SAMPLE}: solver deterministic_sampling": rows.solver_row,
    f"{SAMPLE}.noise_level": rows.noise_level_row,
    "rollout: n_generation": taken,
    "rollout: n_generation_mini_batch": unless_none(taken),
})  # fmt: skip
_EVALUATIONS = table({
    "validation.val_before_train": "the base model is always evaluated",
    "validation: freq n_generation": taken,
    "validation.batch_size": unless_none(taken),
    "validation: dataset.name dataset.split": rows.prompts_row("validation.dataset"),
    "validation.dataset.local_dir": "prompt sets have names",
})  # fmt: skip
_VALIDATIONS = table({
    "validation.val_before_train": "the base model is always evaluated",
    "validation.freq": lengths.validation_freq_row,
    "validation.n_generation": "cosmos-rl validates supervised training with one sample a prompt",
    "validation.batch_size": unless_none(taken),
    "validation.dataset.local_dir": rows.prompt_list_row,
    "validation: dataset.name dataset.split": "supervised training reads validation.dataset.local_dir",
    f"{SAMPLE}.num_steps": rows.num_steps_row,
    f"{SAMPLE}.guidance_scale": rows.validation_guidance_row,
    f"{SAMPLE}.eval_num_steps": "cosmos-rl validates supervised training with num_steps",
})  # fmt: skip
"""Settings of supervised training."""
_SAMPLES = table({
    f"{SAMPLE}: num_steps eval_num_steps": taken,
    f"{SAMPLE}: guidance_scale": rows.guidance_row,
})  # fmt: skip
_PROMPTS = table({f"{DATASET}: name split": rows.prompts_row(DATASET)})
_REMOTE = table({
    f"{REMOTE}.reward_fns": "an empty list",
    f"{REMOTE}.reward_fns[*]: name weight score_key clip_min clip_max": remote_row,
    f"{REMOTE}.scale": remote_row,
    f"{REMOTE}: reward_clip_min reward_clip_max": total_bound_row,
    f"{REMOTE}.batch_size": "the plugin's batch_size sets the number of samples of a request",
})  # fmt: skip
_LEVELS = table({
    "policy.diffusers.weighting_scheme": rows.weighting_row,
    "policy.diffusers: logit_mean logit_std": rows.logit_row,
})  # fmt: skip

_LANGUAGE = (
    "train.train_policy.variant distillation.* vla.*",
    """train: fp8.* fp4.* async_tp_enabled activation_offload fa_version force_use_hf sequence_packing""",
    """train.train_policy:
        enable_dataset_cache data_dispatch_as_rank_in_mesh conversation_column_name system_prompt balance_dp_token
        enable_dp_load_balancing load_balanced_pool_size load_balanced_max_tokens_for_batch
        load_balanced_batching_strategy load_balanced_batches_per_optimizer_step prompt_column_name
        response_column_name group_reward_calculation temperature epsilon_low epsilon_high positive_nll_coef
        lower_bound_ratio loss_type unbiased_loss_max_tokens unbiased_advantage algo overlong_reward.*
        unbiased_kl_estimate off_policy_masking_delta aipo_rho max_token_len_per_mini_batch entropy_coeff
        outdated_rollout_fetch_batch_size max_inflight_steps min_filter_prefix_tokens max_retry_for_on_policy
        reference_reset_interval reset_optimizer_with_reference use_decoupled_loss behav_imp_weight_cap
        rollout_as_token_ids collect_rollout_logprobs use_rollout_logprobs_for_loss""",
    """policy:
        model_safetensor_path model_max_length trainable_map trainable_map.* freeze_pattern trainable_pattern
        enable_liger_kernel enable_liger_cross_entropy enable_liger_fused_cross_entropy aux_loss_coeff""",
    """rollout:
        enforce_eager include_stop_str_in_output gpu_memory_utilization enable_chunked_prefill max_response_length
        n_generation_to_batch quantization sampling_config.* vllm_use_flashinfer multi_turn_config.* async_config.*
        async_r2r_sync prefetch_rollout prefetch_queue_maxsize broadcast_all_params""",
    "validation: temperature top_p top_k repetition_penalty max_response_length",
    "logging: log_interval report_mfu",
)
"""Settings of language models."""


def _only(condition: Callable[[Upstream], bool], some: dict[str, Row], why: str) -> dict[str, Row]:
    return {key: when(condition, row, why) for key, row in some.items()}


def _either(of_nft: dict[str, Row], supervised: dict[str, Row]) -> dict[str, Row]:
    """Return a row for each key of ``of_nft``; for supervised training it is the row of the other table, if any."""
    other = "supervised training has no rollouts"

    def row(key: str) -> Row:
        ours, theirs = supervised.get(key, other), of_nft[key]
        return lambda name, value, file: answer_of(ours if is_supervised(file) else theirs, name, value, file)

    return {key: row(key) for key in of_nft}


_DISABLED = "it is disabled"
_WITH_REWARDS = _SAMPLES | _only(lengths.validates, _EVALUATIONS, _DISABLED)
TABLE: dict[str, Row] = {
    **_ALWAYS,
    **table(dict.fromkeys(_LANGUAGE, "for language models")),
    **_only(lengths.is_nft, _ROLLOUTS, "supervised training has no rollouts"),
    "validation.enable": rows.validates_row,
    **_either(_WITH_REWARDS, _only(lengths.validates, _VALIDATIONS, _DISABLED)),
    **_only(rows.asks_service, _REMOTE, "use_remote_reward is not true"),
    **_only(is_supervised, _LEVELS, "DiffusionNFT trains on the rollout's levels"),
    "train.ckpt.save_freq": when(is_supervised, lengths.save_freq_row, _EVERY_POLICY),
    f"{DATASET}.local_dir": when(is_supervised, rows.folder_row, "prompt sets have names"),
    **_only(lengths.is_nft, _PROMPTS, "supervised training reads local_dir"),
}
