"""Rows of cosmos-rl's own Cosmos-Predict2.5 path (``--wfm-mode``): FlowGRPO and DDRL, "schema B"."""

from collections.abc import Iterator
from typing import Any

from cosmos_rl_core.importers.cosmos_rl import wfm_rows as rows
from cosmos_rl_core.importers.cosmos_rl.rows import (
    CLUSTER,
    DETERMINISTIC,
    FLOAT16,
    Row,
    Upstream,
    among,
    is_true,
    named,
    number,
    refused,
    table,
    to,
    unless_none,
    when,
)
from cosmos_rl_core.importers.cosmos_rl.wfm_rows import POLICY, REWARDS, RL, SAMPLE, VIDEO

MARKS = (
    "model", "optimizer", "scheduler", "trainer", "model_parallel", "job", "checkpoint", "dataloader_train",
    "dataloader_val",
)  # fmt: skip
"""Tables of this schema; neither the other schema nor a recipe of ours has any of them."""

DEFAULTS: dict[str, Any] = {
    "checkpoint.load_path": "",
    "dataloader_train.type": "local",
    "model.dp_replicate_size": 1,
    "model.fsdp_shard_size": 8,
    "model.ema.enabled": True,
    "model.ema.rate": 0.1,
    "model.loss_scale": 10.0,
    "model.precision": "bfloat16",
    "model.resolution": "480",
    "model.state_t": 24,
    "model.conditioner[text].dropout_rate": 0.0,
    f"{RL}.num_rollout": 8,
    f"{RL}.sample_steps": 10,
    f"{RL}.train_on": [0, 1, 2, 3, 4, 5, 6, 7],
    f"{RL}.update_ref_every_iter": 16,
    f"{RL}.min_num_conditional_frames": 1,
    f"{RL}.max_num_conditional_frames": 1,
    f"{RL}.clip_ratio": 1e-4,
    f"{RL}.kl_beta": 0.01,
    f"{RL}.data_beta": 0.0,
    f"{RL}.use_same_seed": True,
    f"{RL}.guidance": 0.0,
    f"{REWARDS}.remote_reward.enabled": True,
    f"{REWARDS}.remote_reward.reward_fn": "dance_grpo",
    f"{REWARDS}.remote_reward.score_key": "overall_reward",
    f"{REWARDS}.remote_reward.reward_clip_min": -5.0,
    f"{REWARDS}.remote_reward.reward_clip_max": 5.0,
    "optimizer.lr": 1e-5,
    "optimizer.weight_decay": 1e-4,
    "optimizer.betas": [0.9, 0.99],
    "optimizer.eps": 1e-8,
    "scheduler.scheduler_type": "lambda_linear",
    "scheduler.warm_up_steps": [1000],
    "scheduler.f_start": [1e-6],
    "scheduler.f_max": [1.0],
    "scheduler.f_min": [1.0],
    "scheduler.cycle_lengths": [10_000_000_000_000],
    "trainer.max_iter": 25,
    "trainer.grad_accum_iter": 1,
    "trainer.seed": 0,
}
"""cosmos-rl's defaults of keys whose default differs here, or that several settings depend on."""


def implied(upstream: Upstream) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield settings that no key sets, because cosmos-rl fixes them in its code, each with a reason."""
    algorithm = "ddrl" if rows.trains_on_data(upstream) else "grpo"
    yield {f"{POLICY}.type": algorithm}, "ddrl if data_beta is above 0"
    yield {f"{POLICY}.ratio_mode": "unnormalised"}, "clip_ratio has the units of cosmos-rl"
    if number(upstream[f"{RL}.kl_beta"]) > 0:
        yield {f"{POLICY}.kl_mode": "unnormalised"}, "kl_beta has the units of cosmos-rl"
    yield {f"{SAMPLE}.solver": "edm"}, "cosmos-rl's sampler of this path"
    yield {"policy.model_gradient_checkpointing": True}, "cosmos-rl checkpoints activations"
    yield {"policy.diffusers.max_prompt_length": 512}, "cosmos-rl pads prompts to 512 tokens"
    sizes = ("rollout.n_generation_mini_batch", "rollout.samples_per_shard", f"{POLICY}.mini_batch")
    yield dict.fromkeys(sizes, 1), "cosmos-rl holds one sample per model instance"
    if rows.has_data(upstream):
        yield rows.media(upstream, f"{POLICY}.data"), "the clips are prompts, and data"
    if not upstream.says("trainer.callbacks[grad_clip]"):
        yield {"train.optm_grad_norm_clip": 1e9}, "only the callback grad_clip clips gradients"


_PIPELINE = "the pipeline in policy.model_name_or_path sets it"
_ENCODER = "the pipeline's own text encoder embeds prompts"
_NOISE_OF_DATA = "policy.diffusers.logit_mean and logit_std set the noise of data, unless the rollout's noise is used"
_REPORTED = "every run writes metrics.jsonl, and its report shows samples"
_STORE = "--store sets where runs are, s3:// included"
_BY_SEED = "trainer.seed draws media, the same with any number of workers"
_FRAMES = "train_policy.min_num_conditional_frames and max_... apply to data and rollouts"
_NO_VALIDATION = "held-out evaluation is [validation], which cosmos-rl's file cannot ask for"
_NO_REWARD = "it fails on every sample in cosmos-rl; use a service, or cosmos_rl_core/rewards, under [[rewards]]"
_REDUCED = "no consequence here: gradients are float32, and one call sums them over ranks"
_SUPERVISED = "supervised training of this schema stops with an error in cosmos-rl; start from a recipe of configs/sft"
_ENVIRONMENT = "the environment sets it: REMOTE_REWARD_ENQUEUE_URL, ..._FETCH_URL and ..._TOKEN"
_ARTIFACTS = "every policy is an artifact, and the same command continues where it stopped"
_ONE_SAMPLE = "set it to 1: the batch is model.fsdp_shard_size x model.dp_replicate_size"
_CALLBACKS = """
    ema_model progress_bar iteration_logger wandb wandb_10x low_prec grad_clip every_n iter_speed param_count heart_beat
    device_monitor verify_data_batch_keys manual_gc compile_tokenizer frame_loss_log every_n_sample_reg
    every_n_sample_ema dataloader_speed reward_callback
"""

TABLE: dict[str, Row] = table({
    "model: fsdp_shard_size dp_replicate_size": rows.instances_row,
    "model.loss_scale": named(POLICY),
    "model.ema.enabled": to("train.ema_enable"),
    "model.ema.rate": when(is_true("model.ema.enabled"), to("train.ema_rate"), "model.ema.enabled is not true"),
    "model.ema.iteration_shift": among((0,), "no shift", refused("set it to 0: it counts from the first step")),
    "model.resolution": rows.size_row,
    "model.state_t": rows.frames_row,
    "model: net.* tokenizer.* state_ch sigma_data scaling use_rf_ckpts conditioning_strategy sigma_conditional "
    "denoise_replace_gt_frames rectified_flow_t_scaling_factor adjust_video_noise": _PIPELINE,
    "model: text_encoder_class text_encoder_config.*": _ENCODER,
    "model.conditioner[*].dropout_rate": among(
        (0.0,), "nothing is dropped", refused("set it to 0: only text is dropped here")
    ),
    "model.conditioner[*]: name type output_key input_key": "the model's plugin defines its conditioning",
    "model.sde.sigma_max": to(f"{SAMPLE}.sigma_max", number),
    "model.sde.sigma_min": named(SAMPLE),
    "model: sde.p_mean sde.p_std high_sigma_ratio low_sigma_ratio high_sigma_strategy": _NOISE_OF_DATA,
    "model: min_num_conditional_frames max_num_conditional_frames": _FRAMES,
    "model.precision": among(("bfloat16", "float32"), to("train.param_dtype"), refused(FLOAT16)),
    "model.use_torch_compile": "launch.compile of a cluster profile sets it",
    "model: input_data_key input_caption_key input_image_key resize_online": "media come from a folder",
    "model: loss_reduce rectified_flow_loss_weight_uniform": "the diffusion loss of data has cosmos-rl's weight",

    f"{RL}.enabled": among((True,), "train_policy.type sets it", refused(_SUPERVISED)),
    f"{RL}.num_rollout": to("rollout.n_generation", why="with any number of GPUs"),
    f"{RL}.sample_steps": to(f"{SAMPLE}.num_steps"),
    f"{RL}.solver_option": named(SAMPLE),
    f"{RL}: s_churn s_noise s_t_min s_t_max": rows.noise_row,
    f"{RL}.guidance": to(f"{SAMPLE}.guidance_scale", rows.guidance_scale, "1 + guidance: 1 is none here"),
    f"{RL}: train_on on_policy clip_ratio kl_beta data_beta use_same_seed exp_reward min_num_conditional_frames "
    "max_num_conditional_frames": named(POLICY),
    f"{RL}.update_ref_every_iter": rows.reference_row,
    f"{REWARDS}.ALL_REWARD_MODELS": "the advantages of all [[rewards]] are averaged",
    f"{REWARDS}: adv_clip_min adv_clip_max": named(POLICY),
    f"{REWARDS}.remote_reward: enabled reward_fn score_key scale reward_clip_min reward_clip_max": rows.remote_row,
    f"{REWARDS}.remote_reward: token enqueue_url fetch_url": _ENVIRONMENT,
    f"{REWARDS}: aesthetic.enabled image_reward.enabled fake_reward.enabled": among(
        (False,), "not used", refused(_NO_REWARD)
    ),
    f"{REWARDS}: aesthetic.model_path image_reward.model_path fake_reward.reward_fn fake_reward.scale": "not used",

    "optimizer.optim_type": among(("fusedadam", "adamw"), "both are AdamW", refused("choose fusedadam or adamw")),
    "optimizer.lr": rows.lr_row,
    "optimizer.weight_decay": to("train.optm_weight_decay"),
    "optimizer.betas": to("train.optm_betas"),
    "optimizer.eps": to("train.epsilon"),
    "optimizer: master_weights capturable": "weights are float32 here",
    "scheduler.scheduler_type": among(
        tuple(rows.DECAYS), "warm_up_steps and f_min set it", refused(f"known: {', '.join(rows.DECAYS)}")
    ),
    "scheduler: warm_up_steps f_start f_max f_min cycle_lengths": rows.schedule_row,
    "scheduler.verbosity_interval": _REPORTED,

    "trainer.max_iter": to("train.num_iterations"),
    "trainer.grad_accum_iter": rows.instances_row,
    "trainer.seed": to("train.seed"),
    "trainer.callbacks[grad_clip].args.clip_norm": to("train.optm_grad_norm_clip", number),
    "trainer.callbacks[grad_clip].args.force_finite": rows.force_finite_row,
    "trainer: callbacks[wandb].name callbacks[wandb_10x].name": rows.wandb_row,
    **{f"trainer.callbacks[{name}].*": _REPORTED for name in _CALLBACKS.split()},
    "trainer.callbacks": "an empty list",
    "trainer.run_validation": among(
        (False,), "there is no [validation] unless you add one",
        refused("cosmos-rl stops with an error at it; add [validation] to the translated recipe"),
    ),
    "trainer: validation_iter max_val_iter": _NO_VALIDATION,
    "trainer.use_s3": _STORE,
    "trainer.distributed_parallelism": CLUSTER,
    "trainer.logging_iter": _REPORTED,
    "trainer.timeout_period": "launch.stall_timeout_s sets it",
    "trainer.cudnn.*": DETERMINISTIC,
    "trainer: ddp.* grad_scaler_args.* grad_scaler_args memory_format straggler_detection.* profiling.*": _REDUCED,

    "model_parallel.*": CLUSTER,
    "job.project": to("logging.project_name"),
    "job.group": to("logging.group_name"),
    "job.name": to("logging.experiment_name"),
    "job.wandb_mode": "wandb's own WANDB_MODE sets it",
    "job.timestamp": unless_none("--run-id sets the run's name"),
    "checkpoint.load_path": rows.model_row,
    "checkpoint.model_id": unless_none(rows.model_row),
    "checkpoint: type dcp_async_mode_enabled save_iter load_training_state only_load_scheduler_state strict_resume "
    "keys_not_to_resume load_ema_to_reg dcp_allow_mismatched_size jit.* verbose broadcast_via_filesystem": _ARTIFACTS,
    "checkpoint: save_to_object_store.* load_from_object_store.*": _STORE,
    "dataloader_train.type": rows.dataset_row,
    f"{VIDEO}.dataset_dir": rows.dataset_row,
    f"{VIDEO}: num_frames dataloader.dataset.num_video_frames": rows.frames_row,
    f"{VIDEO}: video_size dataloader.dataset.resolution": rows.size_row,
    f"{VIDEO}.batch_size": among((1,), "one sample per model instance", refused(_ONE_SAMPLE)),
    f"{VIDEO}.ratio": "there is one dataset",
    f"{VIDEO}: offline_text_embedding text_encoder_type": _ENCODER,
    f"{VIDEO}: num_workers pin_memory use_cache cache_size concat_size cache_augment_fn.* cache_replay_name webdataset "
    "shuffle drop_last prefetch_factor type": _BY_SEED,
    f"{VIDEO}.dataloader.*": "only size and length of made-up clips are read",
    "dataloader_train.image_dataloader.ratio": among(
        (0,), "no images", refused("set it to 0: images cannot join videos")
    ),
    "dataloader_train.image_dataloader.*": "no images join videos",
    "dataloader_val.*": _NO_VALIDATION,
}) | {
    key: when(rows.trains_on_data, row, "data_beta = 0: there is no diffusion loss on data")
    for key, row in {
        "model.conditioner[text].dropout_rate": to(f"{POLICY}.text_dropout"),
        f"{RL}.use_rl_sigma_and_noise": named(POLICY),
        f"{RL}.data_on_first_only": named(POLICY),
    }.items()
}  # fmt: skip
