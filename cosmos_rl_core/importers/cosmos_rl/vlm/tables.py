"""Rows of vision-language models: supervised fine-tuning on conversations, in the schema of the diffusers path."""

from collections.abc import Iterator
from typing import Any

from cosmos_rl_core.importers.cosmos_rl import chats, diffusers, lengths
from cosmos_rl_core.importers.cosmos_rl.kinds import POLICY, has_chats
from cosmos_rl_core.importers.cosmos_rl.rows import Row, Upstream, refused, table, taken, to, unless_none, when
from cosmos_rl_core.importers.cosmos_rl.vlm import media, rows

DEFAULTS: dict[str, Any] = diffusers.TRAINING | {
    f"{POLICY}.conversation_column_name": "conversations",
    f"{POLICY}.dataset.name": "",
    "policy.model_max_length": 4096,
}
"""cosmos-rl's defaults of keys whose default differs here, or that several settings depend on."""


def implied(upstream: Upstream) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield settings that no key sets, because cosmos-rl and the scripts fix them in code, each with a reason."""
    yield {"policy.trains": list(rows.PARTS)}, "cosmos-rl trains every part of the model"
    if chats.format_of(upstream) == "llava":
        why = "the script reads the first question and answer of a row only; here all turns are read, and have labels"
        yield {f"{POLICY}.turns": "all"}, why
    if found := media.settings(upstream):
        unknown = None in found.values()
        why = f"the script's share of a conversation for a video: {media.SHARE} of policy.model_max_length"
        yield found, media.UNKNOWN if unknown else why
    if found := media.tokens(upstream):
        yield found, media.TOKENS_OF_CLIPS


def _names_dataset(upstream: Upstream) -> bool:
    return not has_chats(upstream)


_BY_ROWS = (
    "a pass has a row of train.train_policy.row_length tokens, and the loss is the mean over all labels of a step; in "
    "cosmos-rl the mean over micro-batches of their means"
)
_TEXT = "the loss is measured; validation.max_new_tokens generates answers"
_OLD = "cosmos-rl does not read it any more: [validation] replaced it"
_REWARDS = "for training with rewards"
_NO_ROLLOUTS = "supervised training has no rollouts"
_ELSEWHERE = "[custom.dataset] names the dataset"

_SHARED = (
    "redis eth_ips mode profiler.*",
    """train:
        epoch max_num_steps train_batch_per_replica optm_betas ema_enable optm_lr.* optm_name optm_impl
        optm_warmup_steps optm_warmup_start_factor optm_decay_type optm_decay_ratio optm_min_lr_factor ema_decay
        ema_update_step_interval seed param_dtype master_dtype transfer_dtype fsdp_reduce_dtype logprob_dtype
        fsdp_offload fsdp_reshard_after_forward resume output_dir timestamp deterministic sync_weight_interval
        coalesce_weight_sync save_ckpt_at_exit signal_to_handle local_dataset""",
    """train.ckpt:
        max_keep enable_checkpoint save_mode export_safetensors upload_hf hf_repo_name upload_s3 s3_bucket s3_prefix""",
    """train.train_policy:
        dataloader_shuffle dataloader_seed dataloader_num_workers dataloader_batch_size dataloader_prefetch_factor
        dataloader_drop_last dataloader_broadcast""",
    "policy: model_name_or_path model_revision model_gradient_checkpointing lora",
    """policy.lora:
        r lora_alpha use_rslora target_modules init_lora_weights alpha_pattern alpha_pattern.* r_pattern
        r_pattern.* lora_names primary_adapter lora_path modules_to_save""",
    """policy.parallelism:
        n_init_replicas tp_size cp_size ep_size dp_shard_size pp_size dp_replicate_size pp_dynamic_shape
        pp_micro_batch_size pp_schedule pp_layers_per_stage""",
    "logging: logger project_name group_name experiment_name multi_modal_log_interval",
)
"""Keys that mean the same for diffusion models."""

_OWN = table({
    f"{POLICY}: type trainer_type": rows.type_row,
    f"{POLICY}.mini_batch": _BY_ROWS,
    f"{POLICY}.balance_dp_token": taken,
    f"{POLICY}.enable_dataset_cache": "tokens are always kept, and shared by runs",
    f"{POLICY}.data_dispatch_as_rank_in_mesh": "train.seed draws conversations, the same for any number of ranks",
    f"{POLICY}.enable_dp_load_balancing":
        rows.unless_on("conversations are always packed; train_batch_per_replica sets how many a step has"),
    f"{POLICY}: load_balanced_pool_size load_balanced_max_tokens_for_batch load_balanced_batching_strategy "
    "load_balanced_batches_per_optimizer_step": "enable_dp_load_balancing is not true",
    f"{POLICY}.conversation_column_name": rows.option_row,
    f"{POLICY}.system_prompt": when(_names_dataset, rows.option_row, "the script does not read it"),
    f"{POLICY}.dataset.name": when(_names_dataset, rows.named_row, _ELSEWHERE),
    f"{POLICY}.dataset.split": when(_names_dataset, rows.split_row, _ELSEWHERE),
    f"{POLICY}: dataset.subset dataset.revision": "a folder of save_to_disk has one subset and one revision",
    f"{POLICY}: dataset.test_size": "held-out data are files of their own: [validation.datasets.NAME]",
    f"{POLICY}: dataset.local_dir": "cosmos-rl reads it for diffusion models",
    "custom.dataset: annotation_path path": rows.place_row,
    "custom.dataset: media_path system_prompt": rows.option_row,
    **{f"custom.vision.{name}": unless_none(media.row) for name in media.KEYS},
    "custom.vision.min_frames": unless_none(rows.in_even_numbers(round_up=True)),
    "custom.vision.max_frames": unless_none(rows.in_even_numbers(round_up=False)),
    "custom.vision.total_pixels": "the script replaces it by a share of policy.model_max_length",
    "custom.*": rows.unread_row,
    "train.optm_lr": rows.lr_row,
    "train: epsilon optm_grad_norm_clip optm_weight_decay": taken,
    "train.compile": "vision-language models are not compiled here",
    "train: fp8.enable_fp8 fp4.enable_fp4": rows.unless_on("products are in float32 or bfloat16"),
    "train: fp8.* fp4.*": "it is off",
    "train.sequence_packing": "conversations are always packed",
    "train.activation_offload": "policy.model_gradient_checkpointing saves the memory of activations",
    "train.async_tp_enabled": "no matrix is shared among ranks during a product",
    "train.fa_version": "attention is PyTorch's own",
    "train.force_use_hf": "models always come from transformers",
    "train.non_text": "conversations are texts with media",
    "train: enable_validation validation_step validation_batch_per_replica": _OLD,
    "train.ckpt.save_freq": lengths.save_freq_row,
    "train.ckpt.save_freq_in_epoch": rows.epochs_between_saves_row,
    "policy.is_diffusers": "it is false",
    "policy.lora.lora_dropout": "VLMs are trained without dropout",
    "policy.model_max_length": to(f"{POLICY}.model_max_length"),
    "policy.model_safetensor_path": unless_none(refused("set policy.model_name_or_path to the folder of the model")),
    "policy: trainable_map freeze_pattern trainable_pattern": rows.freezes_row,
    "policy: trainable_map.*": rows.freezes_row,
    "policy: enable_liger_kernel enable_liger_cross_entropy enable_liger_fused_cross_entropy":
        "another implementation of the same arithmetic",
    "policy.aux_loss_coeff": "for mixtures of experts",
    "policy.parallelism.cp_rotate_method": "cosmos-rl does not read it",
    "validation.enable": rows.validates_row,
    "validation.freq": when(lengths.validates, lengths.validation_freq_row, "it is disabled"),
    "validation: dataset.name dataset.split dataset.subset dataset.revision dataset.test_size dataset.local_dir":
        "set [validation.datasets.NAME]",
    "validation.batch_size": "held-out conversations are computed one at a time",
    "validation: n_generation temperature top_p top_k repetition_penalty max_response_length reward_function "
    "reward_function.*": _TEXT,
    "logging: log_interval": "every step is in metrics.jsonl",
    "logging: report_mfu": "`cosmos-flows cost` has the time of every stage",
    "distillation.*": "it is off",
})  # fmt: skip
_OTHERS = {
    "policy.diffusers": "for diffusion models",
    "rollout": _NO_ROLLOUTS,
    POLICY: _REWARDS,
    "validation": _REWARDS,
    "vla": "for vision-language-action models",
}
"""Reasons why keys of other kinds of training have no effect, by the beginnings of the keys."""


def _other(key: str) -> Row:
    return next(why for start, why in _OTHERS.items() if key.startswith(f"{start}."))


_MINE = {key: diffusers.TABLE[key] for key in table(dict.fromkeys(_SHARED, ""))} | _OWN
TABLE: dict[str, Row] = _MINE | {key: _other(key) for key in diffusers.TABLE if key not in _MINE}
