"""What the settings of cosmos-rl's diffusers path are here: DiffusionNFT and supervised fine-tuning, "schema A"."""

from typing import Any

from cosmos_rl_core.config.policy import NOT_IN_LORA
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl import diffusers_rows as special
from cosmos_rl_core.importers.cosmos_rl import diffusers_run as run
from cosmos_rl_core.importers.cosmos_rl.diffusers_run import DATASET, POLICY, SAMPLE
from cosmos_rl_core.importers.cosmos_rl.rewards import REMOTE_ROWS
from cosmos_rl_core.importers.cosmos_rl.rows import (
    CLUSTER,
    LANGUAGE,
    NO_FLOAT16,
    NOT_READ,
    PRECISIONS,
    SHARDS,
    Row,
    Upstream,
    among,
    no_effect,
    only,
    refused,
    rows,
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
"""A file of this schema has some of these; a recipe of ours has none."""

DEFAULTS: dict[str, Any] = {
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
    f"{POLICY}.kl_beta": 0.0,
    f"{POLICY}.use_remote_reward": False,
    f"{DATASET}.name": "",
    f"{DATASET}.local_dir": "",
    "policy.model_gradient_checkpointing": True,
    "policy.lora.init_lora_weights": True,
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
    "validation.freq": 20,
    "validation.n_generation": 1,
    "validation.dataset.name": "",
    "validation.dataset.local_dir": "",
}
"""What cosmos-rl takes for a key that a file leaves out, where ours differs or is made of several."""


def check_kind(upstream: Upstream) -> None:
    """Raise :class:`ConfigError` if the file is of another kind of model, as cosmos-rl decides it."""
    said = upstream.says("policy.is_diffusers")
    if said and upstream["policy.is_diffusers"] is not False:
        return
    why = "policy.is_diffusers is false" if said else "policy.is_diffusers is not set, which means false"
    raise ConfigError(
        f"cosmos-rl reads this file as one of {_other_kind(upstream)}: {why}. Only diffusion models are trained here. "
        "If the model is a diffusers pipeline, set policy.is_diffusers = true; else stay with cosmos-rl"
    )


def _other_kind(upstream: Upstream) -> str:
    """What a file is for that is not of a diffusion model, as far as its tables tell."""
    model = f" ({upstream['policy.model_name_or_path']})" if upstream["policy.model_name_or_path"] else ""
    return f"a vision-language-action model{model}" if upstream.says("vla") else f"a language model{model}"


def implied(upstream: Upstream) -> list[tuple[dict[str, Any], str]]:
    """Settings that no key says, because cosmos-rl has no choice there, and why."""
    if run.is_supervised(upstream):
        return []
    found: list[tuple[dict[str, Any], str]] = [
        ({f"{POLICY}.global_std": False}, "cosmos-rl divides advantages by the deviation of the prompt's own rewards")
    ]
    if run.asks_service(upstream):
        found.append(({f"{POLICY}.unbiased_std": True}, "over n - 1 where a service scores"))
    if upstream["train.ema_enable"] is True:
        found.append(({"train.ema_first_step": 1}, "cosmos-rl counts training steps from 1"))
    if upstream["policy.diffusers.weight_copy_decay_type"] != 0:
        found.append(({f"{POLICY}.weight_copy_first_step": 1}, "cosmos-rl counts training steps from 1"))
    return found


def _nft(row: Row, why: str = "supervised training has no rollouts") -> Row:
    return when(run.is_nft, row, why)


def _sft(row: Row, why: str) -> Row:
    return when(run.is_supervised, row, why)


_UNJUDGED = (
    "supervised training is not evaluated here: held-out samples are judged by rewards, and it has none; a held-out "
    "loss needs [validation] with data = media that are not trained on"
)


def _held_out(row: Row) -> Row:
    return _nft(when(run.validates, row, "validation.enable is not true"), _UNJUDGED)


def _averaged(row: Row) -> Row:
    return when(lambda up: up["train.ema_enable"] is True, row, "train.ema_enable is not true")


def _decays(upstream: Upstream) -> bool:
    return upstream["train.optm_decay_type"] not in (None, "None", "", "none")


_BY_SEED = no_effect("prompts and media are drawn by train.seed, the same at any number of workers")
_EVERY_POLICY = "every policy is an artifact, and [validation] freq says which are exported"
_NO_UPLOAD = no_effect("nothing is uploaded: `cosmos-flows export` writes what `hf upload` takes")
_FLOAT32 = no_effect("weights, states and gradients are float32 here")
_SAME_ADAM = no_effect("one implementation of the same arithmetic")

_TRAIN: dict[str, Row] = {
    "train.epoch": run.epoch_row,
    "train.max_num_steps": unless_none(run.max_num_steps_row),
    "train.train_batch_per_replica": run.batch_row,
    "train.optm_name": when(lambda up: up["train.optm_name"] != "AdamW", taken, "AdamW is what trains here"),
    "train.optm_impl": _SAME_ADAM,
    "train.optm_lr": taken,
    "train.optm_lr.*": refused("there is one learning rate for everything"),
    "train.optm_warmup_steps": run.warmup_row,
    "train.optm_decay_type": unless_none(run.decay_type_row),
    "train.optm_decay_ratio": unless_none(when(_decays, taken, "there is no decay")),
    "train.optm_min_lr_factor": when(_decays, taken, "there is no decay"),
    "train.optm_warmup_start_factor": when(
        lambda up: up["train.optm_warmup_steps"] != 0, taken, "train.optm_warmup_steps is 0"
    ),
    **rows(taken, "train.", "optm_betas ema_enable"),
    **rows(run.summed_row, "train.", "optm_grad_norm_clip epsilon"),
    # Part of the gradient in Adam alone.
    "train.optm_weight_decay": lambda key, value, up: (
        run.summed_row if up["train.optm_name"] == "Adam" else taken
    )(key, value, up),
    "train.ema_decay": _averaged(taken),
    "train.ema_update_step_interval": _averaged(to("train.ema_update_step_interval", lambda steps: steps or 1)),
    "train.seed": unless_none(special.seed_row),
    "train.param_dtype": among(PRECISIONS, taken, NO_FLOAT16),
    **rows(_FLOAT32, "train.", "master_dtype transfer_dtype fsdp_reduce_dtype logprob_dtype"),
    "train.fsdp_offload": no_effect("put fsdp_offload = ... in a cluster profile (deployments/clusters, --cluster)"),
    "train.fsdp_reshard_after_forward": no_effect("weights that ranks share are let go of after each block's pass"),
    "train.resume": only(
        (True, False), "the same command goes on where it stopped",
        "no checkpoint of cosmos-rl is read: make a pipeline of it and name that in policy.model_name_or_path",
    ),
    "train.output_dir": no_effect("--store says where runs are"),
    "train.timestamp": no_effect("--run-id says what a run is called"),
    "train.compile": no_effect("launch.compile of a cluster profile says it"),
    "train.deterministic": no_effect("launch.deterministic says it, and is true unless set"),
    "train.non_text": no_effect("samples are never text"),
    **rows(no_effect("stages run one after the other unless train.staleness is set"), "train.",
           "sync_weight_interval coalesce_weight_sync"),
    **rows(no_effect("every finished stage and shard stays"), "train.", "save_ckpt_at_exit signal_to_handle"),
    "train.local_dataset": _BY_SEED,
    **rows(no_effect(LANGUAGE), "train.", "fp8.* fp4.* async_tp_enabled activation_offload fa_version force_use_hf"),
    "train.sequence_packing": no_effect(LANGUAGE),
    "train.ckpt.save_freq": _sft(run.save_freq_row, _EVERY_POLICY),
    "train.ckpt.max_keep": to("train.ckpt.max_keep", lambda steps: None if steps == -1 else steps),
    **rows(no_effect(_EVERY_POLICY), "train.ckpt.",
           "enable_checkpoint save_freq_in_epoch save_mode export_safetensors"),
    **rows(_NO_UPLOAD, "train.ckpt.", "upload_hf hf_repo_name upload_s3 s3_bucket s3_prefix"),
}  # fmt: skip

_ALGORITHM: dict[str, Row] = {
    f"{POLICY}.type": special.type_row,
    f"{POLICY}.trainer_type": special.trainer_row,
    f"{POLICY}.variant": no_effect("says how language models are trained"),
    f"{POLICY}.mini_batch": taken,
    **rows(_nft(taken), f"{POLICY}.", "kl_beta advantage_low advantage_high mu_iterations"),
    f"{POLICY}.batch_size_per_optimize": unless_none(_nft(run.batch_per_optimize_row)),
    f"{POLICY}.use_remote_reward": _nft(special.remote_row),
    f"{POLICY}.reward_function": no_effect("cosmos-rl's own reward functions are not here; see use_remote_reward"),
    f"{POLICY}.reward_function.*": no_effect("cosmos-rl's own reward functions are not here; see use_remote_reward"),
    f"{POLICY}.bypass_reward": only(False, "rewards are never left out", "rewards of 0 train nothing; set it to false"),
    f"{POLICY}.filter_reward_metric": no_effect("cosmos-rl does not apply it to rewards of a service"),
    **{key: when(run.asks_service, row, "use_remote_reward is not true") for key, row in REMOTE_ROWS.items()},
    **rows(no_effect("train.staleness says how old a rollout's policy may be; 0 unless set"), f"{POLICY}.",
           "allowed_outdated_steps on_policy uncentralized_training"),
    **rows(_BY_SEED, f"{POLICY}.", "dataloader_shuffle dataloader_seed dataloader_num_workers dataloader_batch_size "
           "dataloader_prefetch_factor dataloader_drop_last dataloader_broadcast"),
    f"{DATASET}.name": _nft(special.prompts_row(DATASET), "supervised training reads local_dir"),
    f"{DATASET}.split": _nft(special.prompts_row(DATASET), "supervised training reads local_dir"),
    f"{DATASET}.local_dir": _sft(special.folder_row, "prompt sets have names"),
    **rows(no_effect("neither prompt sets nor folders have any"), f"{DATASET}.", "subset revision test_size"),
    **rows(no_effect(LANGUAGE), f"{POLICY}.",
           "enable_dataset_cache data_dispatch_as_rank_in_mesh conversation_column_name system_prompt balance_dp_token "
           "enable_dp_load_balancing load_balanced_pool_size load_balanced_max_tokens_for_batch "
           "load_balanced_batching_strategy load_balanced_batches_per_optimizer_step prompt_column_name "
           "response_column_name group_reward_calculation temperature epsilon_low epsilon_high positive_nll_coef "
           "lower_bound_ratio loss_type unbiased_loss_max_tokens unbiased_advantage algo overlong_reward.* "
           "unbiased_kl_estimate off_policy_masking_delta aipo_rho max_token_len_per_mini_batch entropy_coeff "
           "outdated_rollout_fetch_batch_size max_inflight_steps min_filter_prefix_tokens max_retry_for_on_policy "
           "reference_reset_interval reset_optimizer_with_reference use_decoupled_loss behav_imp_weight_cap "
           "rollout_as_token_ids collect_rollout_logprobs use_rollout_logprobs_for_loss"),
}  # fmt: skip

_PARALLEL = "n_init_replicas tp_size cp_size ep_size dp_shard_size pp_size dp_replicate_size pp_dynamic_shape " \
    "pp_micro_batch_size pp_schedule pp_layers_per_stage"  # fmt: skip

_MODEL: dict[str, Row] = {
    "policy.is_diffusers": only(True, "all models here are diffusion models", "must be true or false"),
    "policy.model_name_or_path": special.model_row,
    "policy.model_revision": unless_none(special.revision_row),
    "policy.model_gradient_checkpointing": taken,
    **rows(no_effect(CLUSTER), "policy.parallelism.", _PARALLEL),
    "policy.parallelism.dp_shard_size": no_effect(SHARDS),
    **rows(no_effect(LANGUAGE), "policy.", "model_safetensor_path model_max_length trainable_map trainable_map.* "
           "freeze_pattern trainable_pattern enable_liger_kernel enable_liger_cross_entropy "
           "enable_liger_fused_cross_entropy aux_loss_coeff"),
    "policy.lora": taken,
    **rows(taken, "policy.lora.", "r lora_alpha"),
    "policy.lora.target_modules": unless_none(taken),
    "policy.lora.init_lora_weights": when(run.has_lora, special.init_lora_row, "there is no [policy.lora]"),
    **rows(no_effect("the algorithm says which copies of the adapters there are"), "policy.lora.",
           "lora_names primary_adapter"),
    # Meant by whoever wrote them, though cosmos-rl does not read them for diffusion models.
    **rows(taken, "policy.lora.", "lora_dropout use_rslora"),
    **rows(unless_none(special.pattern_row), "policy.lora.", "alpha_pattern alpha_pattern.* r_pattern r_pattern.*"),
    **{f"policy.lora.{name}": unless_none(refused(NOT_IN_LORA[name])) for name in ("lora_path", "modules_to_save")},
    "policy.diffusers.is_video": special.is_video_row,
    "policy.diffusers.train_frames": special.train_frames_row,
    "policy.diffusers.inference_frames": no_effect("evaluations are as long as policy.diffusers.train_frames"),
    "policy.diffusers.inference_size": taken,
    "policy.diffusers.max_prompt_length": taken,
    "policy.diffusers.weighting_scheme": _sft(special.weighting_row, "DiffusionNFT trains on the rollout's levels"),
    **rows(_sft(special.logit_row, "DiffusionNFT trains on the rollout's levels"), "policy.diffusers.",
           "logit_mean logit_std"),
    "policy.diffusers.dtype": _FLOAT32,
    "policy.diffusers.offload": no_effect("each stage loads only the parts of the model that it needs"),
    "policy.diffusers.nft_beta": _nft(to(f"{POLICY}.nft_beta")),
    "policy.diffusers.weight_copy_decay_type": _nft(special.old_decay_row),
    "policy.diffusers.timesteps_fraction": _nft(special.fraction_row),
    "policy.diffusers.timestep_fraction": _nft(special.misspelt_fraction_row),
    **rows(no_effect(NOT_READ), "policy.diffusers.", "train_flow_shift lora.* sample.global_std"),
    "policy.diffusers.tokenizer.*": no_effect("says how cosmos-rl's reward client encodes videos"),
    f"{SAMPLE}.num_steps": _nft(taken, _UNJUDGED),
    f"{SAMPLE}.eval_num_steps": _nft(taken, _UNJUDGED),
    f"{SAMPLE}.guidance_scale": _nft(special.guidance_row, _UNJUDGED),
    f"{SAMPLE}.solver": _nft(special.solver_row, "evaluations are made by the pipeline's own solver"),
    f"{SAMPLE}.deterministic_sampling": _nft(special.deterministic_row),
    f"{SAMPLE}.noise_level": _nft(special.noise_level_row),
}  # fmt: skip

_REST: dict[str, Row] = {
    "redis": no_effect("processes talk through artifacts alone"),
    "eth_ips": no_effect("processes talk through artifacts alone"),
    "mode": no_effect("stages run one after the other unless train.staleness is set"),
    "custom.*": no_effect("for scripts of the user, which are not run here"),
    **rows(no_effect(LANGUAGE), "", "distillation.* vla.*"),
    "profiler.*": no_effect("nothing is profiled; every manifest says how long its stage took"),
    "rollout.n_generation": _nft(taken),
    "rollout.n_generation_mini_batch": unless_none(_nft(taken)),
    "rollout.batch_size": no_effect("rollout.n_generation_mini_batch says how many samples are made at once"),
    "rollout.seed": unless_none(no_effect("rollouts draw from train.seed")),
    **rows(no_effect("rollouts are made by the model's own plugin"), "rollout.", "backend mode"),
    **rows(no_effect(CLUSTER), "rollout.parallelism.", _PARALLEL),
    **rows(no_effect(LANGUAGE), "rollout.",
           "enforce_eager include_stop_str_in_output gpu_memory_utilization enable_chunked_prefill max_response_length "
           "n_generation_to_batch quantization sampling_config.* vllm_use_flashinfer multi_turn_config.* "
           "async_config.* async_r2r_sync prefetch_rollout prefetch_queue_maxsize broadcast_all_params"),
    "validation.enable": _nft(special.validates_row, _UNJUDGED),
    "validation.val_before_train": _held_out(no_effect("the base is always evaluated")),
    "validation.freq": _held_out(taken),
    "validation.batch_size": unless_none(_held_out(taken)),
    "validation.n_generation": _held_out(taken),
    "validation.dataset.name": _held_out(special.prompts_row("validation.dataset")),
    "validation.dataset.split": _held_out(special.prompts_row("validation.dataset")),
    "validation.dataset.local_dir": _held_out(no_effect("prompt sets have names")),
    **rows(no_effect("neither prompt sets nor files have any"), "validation.dataset.", "subset revision test_size"),
    **rows(no_effect("evaluations are scored by the same [[rewards]]"), "validation.",
           "use_remote_reward remote_reward.* reward_function"),
    **rows(no_effect(LANGUAGE), "validation.", "temperature top_p top_k repetition_penalty max_response_length"),
    "logging.logger": special.logger_row,
    "logging.project_name": taken,
    **rows(unless_none(taken), "logging.", "group_name experiment_name"),
    "logging.multi_modal_log_interval": no_effect("the report shows samples of every evaluation"),
    **rows(no_effect(LANGUAGE), "logging.", "log_interval report_mfu"),
}  # fmt: skip

TABLE: dict[str, Row] = {**_TRAIN, **_ALGORITHM, **_MODEL, **_REST}
