"""What the settings of cosmos-rl's own Cosmos-Predict2.5 path (``--wfm-mode``) are here: FlowGRPO, DDRL, "schema B"."""

import math
from typing import Any

from cosmos_rl_core.importers.cosmos_rl import wfm_rows as special
from cosmos_rl_core.importers.cosmos_rl.rows import (
    CLUSTER,
    NO_FLOAT16,
    PRECISIONS,
    Meaning,
    Row,
    Upstream,
    among,
    no_effect,
    number,
    only,
    rows,
    to,
    unless_none,
    when,
)
from cosmos_rl_core.importers.cosmos_rl.wfm_rows import POLICY, REWARDS, RL, SAMPLE, has_data, trains_on_data

MARKS = (
    "model", "optimizer", "scheduler", "trainer", "model_parallel", "job", "checkpoint", "dataloader_train",
    "dataloader_val",
)  # fmt: skip
"""The tables of this schema; none of them is in the other one or in ours."""

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
"""What cosmos-rl takes for a key that a file leaves out, where ours differs or is made of several."""


def check_kind(upstream: Upstream) -> None:
    """Every file of this schema is of a diffusion model."""


def implied(upstream: Upstream) -> list[tuple[dict[str, Any], str]]:
    """Settings that no key says, because cosmos-rl has no choice there, and why."""
    unclipped = not upstream.says("trainer.callbacks[grad_clip]")
    arithmetic = {f"{POLICY}.ratio_mode": "unnormalised"}
    if number(upstream[f"{RL}.kl_beta"]) > 0:
        arithmetic[f"{POLICY}.kl_mode"] = "unnormalised"
    one_each = {"rollout.n_generation_mini_batch": 1, "rollout.samples_per_shard": 1, f"{POLICY}.mini_batch": 1}
    found = [
        ({f"{POLICY}.type": "ddrl" if trains_on_data(upstream) else "grpo"}, "ddrl where data_beta is above 0"),
        (arithmetic, "clip_ratio and kl_beta are in the units of cosmos-rl's arithmetic"),
        ({f"{SAMPLE}.solver": "edm"}, "cosmos-rl's sampler of this path"),
        ({"policy.model_gradient_checkpointing": True}, "cosmos-rl checkpoints activations"),
        ({"policy.diffusers.max_prompt_length": 512}, "cosmos-rl pads prompts to 512 tokens"),
        (one_each, "cosmos-rl holds one sample a model instance"),
    ]
    if has_data(upstream):
        found.append((special.media(upstream, f"{POLICY}.data"), "the clips are prompts, and data"))
    if unclipped:
        found.append(({"train.optm_grad_norm_clip": 1e9}, "gradients are clipped only where the callback grad_clip is"))
    return found


_SMALLER = no_effect("the pipeline in policy.model_name_or_path says it")
_ENCODER = no_effect("prompts are embedded by the pipeline's own text encoder")
_NOISE_OF_DATA = no_effect(
    "policy.diffusers.logit_mean and logit_std are the noise of data where it is not the rollout's"
)
_REPORTED = no_effect("every run writes metrics.jsonl, and its report shows samples")
_STORE = no_effect("--store says where runs are, s3:// included")
_BY_SEED = no_effect("media are drawn by trainer.seed, the same at any number of workers")


def _of_data(row: Row) -> Row:
    return when(trains_on_data, row, "data_beta = 0: there is no diffusion loss on data")


def _number_or_inf(key: str, value: Any, upstream: Upstream) -> Meaning:
    if value == math.inf:
        return Meaning("no effect here", why="no bound")
    if upstream[f"{RL}.s_churn"] == 0 and not key.endswith("s_churn"):
        return Meaning("no effect here", why="s_churn = 0 adds no noise")
    return to(f"{SAMPLE}.{key.rpartition('.')[2]}")(key, value, upstream)


_MODEL: dict[str, Row] = {
    "model.fsdp_shard_size": special.instances_row,
    "model.dp_replicate_size": special.instances_row,
    "model.loss_scale": to(f"{POLICY}.loss_scale"),
    "model.ema.enabled": to("train.ema_enable"),
    "model.ema.rate": when(
        lambda up: up["model.ema.enabled"] is True, to("train.ema_rate"), "model.ema.enabled is not true"
    ),
    "model.ema.iteration_shift": only(0, "no shift", "the average counts from the first step: set it to 0"),
    "model.resolution": special.size_row,
    "model.state_t": special.frames_row,
    **rows(_SMALLER, "model.", "net.* tokenizer.* state_ch sigma_data scaling use_rf_ckpts conditioning_strategy "
           "sigma_conditional denoise_replace_gt_frames rectified_flow_t_scaling_factor adjust_video_noise"),
    **rows(_ENCODER, "model.", "text_encoder_class text_encoder_config.*"),
    "model.conditioner[text].dropout_rate": _of_data(to(f"{POLICY}.text_dropout")),
    "model.conditioner[*].dropout_rate": only(0.0, "nothing is dropped", "only text is dropped here: set it to 0"),
    **rows(no_effect("the model's plugin knows what it conditions on"), "model.conditioner[*].",
           "name type output_key input_key"),
    "model.sde.sigma_max": to(f"{SAMPLE}.sigma_max", number),
    "model.sde.sigma_min": to(f"{SAMPLE}.sigma_min"),
    **rows(_NOISE_OF_DATA, "model.", "sde.p_mean sde.p_std high_sigma_ratio low_sigma_ratio high_sigma_strategy"),
    **rows(no_effect("train_policy.min_num_conditional_frames and max_... hold for data and rollouts"), "model.",
           "min_num_conditional_frames max_num_conditional_frames"),
    "model.precision": among(PRECISIONS, to("train.param_dtype"), NO_FLOAT16),
    "model.use_torch_compile": no_effect("launch.compile of a cluster profile says it"),
    **rows(no_effect("media come from a folder"), "model.",
           "input_data_key input_caption_key input_image_key resize_online"),
    **rows(no_effect("the diffusion loss of data has the weight that cosmos-rl gives it"), "model.",
           "loss_reduce rectified_flow_loss_weight_uniform"),
}  # fmt: skip

_RL: dict[str, Row] = {
    f"{RL}.enabled": only(True, "the algorithm says it", "supervised training of this schema stops with an error in "
                          "cosmos-rl; begin with a recipe of configs/sft"),
    f"{RL}.num_rollout": to("rollout.n_generation", why="whatever the number of GPUs"),
    f"{RL}.sample_steps": to(f"{SAMPLE}.num_steps"),
    f"{RL}.solver_option": to(f"{SAMPLE}.solver_option"),
    **rows(_number_or_inf, f"{RL}.", "s_churn s_noise s_t_min s_t_max"),
    f"{RL}.guidance": to(f"{SAMPLE}.guidance_scale", special.guidance_scale, "1 + guidance: 1 is none here"),
    **{f"{RL}.{name}": to(f"{POLICY}.{name}") for name in (
        "train_on", "on_policy", "clip_ratio", "kl_beta", "data_beta", "use_same_seed", "exp_reward",
        "min_num_conditional_frames", "max_num_conditional_frames",
    )},
    f"{RL}.update_ref_every_iter": special.reference_row,
    f"{RL}.use_rl_sigma_and_noise": _of_data(to(f"{POLICY}.use_rl_sigma_and_noise")),
    f"{RL}.data_on_first_only": _of_data(to(f"{POLICY}.data_on_first_only")),
    f"{REWARDS}.ALL_REWARD_MODELS": no_effect("advantages of all [[rewards]] are averaged"),
    f"{REWARDS}.adv_clip_min": to(f"{POLICY}.adv_clip_min"),
    f"{REWARDS}.adv_clip_max": to(f"{POLICY}.adv_clip_max"),
    f"{REWARDS}.remote_reward.enabled": special.remote_row,
    **rows(when(special.asks_service, special.remote_option_row, "remote_reward.enabled = false"),
           f"{REWARDS}.remote_reward.", "reward_fn score_key scale reward_clip_min reward_clip_max"),
    **rows(no_effect("the environment says it: REMOTE_REWARD_ENQUEUE_URL, ..._FETCH_URL and ..._TOKEN"),
           f"{REWARDS}.remote_reward.", "token enqueue_url fetch_url"),
    **{f"{REWARDS}.{name}.enabled": only(False, "not asked for", "fails on every sample in cosmos-rl, and is not here; "
                                         "take one of a service, or of cosmos_rl_core/rewards, under [[rewards]]")
       for name in ("aesthetic", "image_reward", "fake_reward")},
    **rows(no_effect("a reward that is not asked for"), f"{REWARDS}.",
           "aesthetic.model_path image_reward.model_path fake_reward.reward_fn fake_reward.scale"),
}  # fmt: skip

_TRAINING: dict[str, Row] = {
    "optimizer.optim_type": only(("fusedadam", "adamw"), "AdamW both", "choose fusedadam or adamw"),
    "optimizer.lr": special.peak_row,
    "optimizer.weight_decay": to("train.optm_weight_decay"),
    "optimizer.betas": to("train.optm_betas"),
    "optimizer.eps": to("train.epsilon"),
    **rows(no_effect("weights are float32 here"), "optimizer.", "master_weights capturable"),
    "scheduler.scheduler_type": special.scheduler_row,
    "scheduler.warm_up_steps": special.warmup_row,
    "scheduler.f_start": special.start_row,
    "scheduler.f_max": special.f_max_row,
    "scheduler.f_min": special.decay_row,
    "scheduler.cycle_lengths": no_effect("the length of a decay, where f_min says that there is one"),
    "scheduler.verbosity_interval": _REPORTED,
    "trainer.max_iter": to("train.num_iterations"),
    "trainer.grad_accum_iter": special.instances_row,
    "trainer.seed": to("train.seed"),
    "trainer.callbacks[grad_clip].args.clip_norm": to("train.optm_grad_norm_clip", number),
    "trainer.callbacks[grad_clip].args.force_finite": special.force_finite_row,
    "trainer.callbacks[grad_clip].name": no_effect("names the callback"),
    "trainer.callbacks[wandb].name": special.wandb_row,
    "trainer.callbacks[wandb_10x].name": special.wandb_row,
    **{f"trainer.callbacks[{name}].*": _REPORTED for name in (
        "ema_model", "progress_bar", "iteration_logger", "wandb", "wandb_10x", "low_prec", "grad_clip", "every_n",
        "iter_speed", "param_count", "heart_beat", "device_monitor", "verify_data_batch_keys", "manual_gc",
        "compile_tokenizer", "frame_loss_log", "every_n_sample_reg", "every_n_sample_ema", "dataloader_speed",
        "reward_callback",
    )},
    "trainer.callbacks": no_effect("an empty list"),
    "trainer.run_validation": special.validates_row,
    **rows(no_effect("held-out evaluation is [validation], which cosmos-rl's file cannot ask for"), "trainer.",
           "validation_iter max_val_iter"),
    "trainer.use_s3": _STORE,
    "trainer.distributed_parallelism": no_effect(CLUSTER),
    "trainer.logging_iter": _REPORTED,
    "trainer.timeout_period": no_effect("launch.stall_timeout_s says it"),
    **rows(no_effect("launch.deterministic says it, and is true unless set"), "trainer.", "cudnn.*"),
    **rows(no_effect("of no consequence here: gradients are float32, and summed over ranks in one call"), "trainer.",
           "ddp.* grad_scaler_args.* grad_scaler_args memory_format straggler_detection.* profiling.*"),
}  # fmt: skip

_REST: dict[str, Row] = {
    "model_parallel.*": no_effect(CLUSTER),
    "job.project": to("logging.project_name"),
    "job.group": to("logging.group_name"),
    "job.name": to("logging.experiment_name"),
    "job.wandb_mode": no_effect("wandb's own WANDB_MODE says it"),
    "job.timestamp": unless_none(no_effect("--run-id says what a run is called")),
    "checkpoint.load_path": special.model_row,
    "checkpoint.model_id": unless_none(special.model_id_row),
    **rows(no_effect("every policy is an artifact, and the same command goes on where it stopped"), "checkpoint.",
           "type dcp_async_mode_enabled save_iter load_training_state only_load_scheduler_state strict_resume "
           "keys_not_to_resume load_ema_to_reg dcp_allow_mismatched_size jit.* verbose broadcast_via_filesystem"),
    **rows(_STORE, "checkpoint.", "save_to_object_store.* load_from_object_store.*"),
    "dataloader_train.type": special.dataset_row,
    "dataloader_train.video_dataloader.dataset_dir": special.folder_row,
    "dataloader_train.video_dataloader.num_frames": special.frames_row,
    "dataloader_train.video_dataloader.video_size": special.size_row,
    "dataloader_train.video_dataloader.batch_size": only(1, "one sample a model instance", "set it to 1: the batch is "
                                                         "model.fsdp_shard_size x model.dp_replicate_size"),
    "dataloader_train.video_dataloader.ratio": no_effect("there is one dataset"),
    **rows(_ENCODER, "dataloader_train.video_dataloader.", "offline_text_embedding text_encoder_type"),
    **rows(_BY_SEED, "dataloader_train.video_dataloader.",
           "num_workers pin_memory use_cache cache_size concat_size cache_augment_fn.* cache_replay_name webdataset "
           "shuffle drop_last prefetch_factor type"),
    "dataloader_train.video_dataloader.dataloader.dataset.num_video_frames": special.frames_row,
    "dataloader_train.video_dataloader.dataloader.dataset.resolution": special.size_row,
    "dataloader_train.video_dataloader.dataloader.*": no_effect("of made-up clips only size and length are read"),
    "dataloader_train.image_dataloader.ratio": only(0, "no images", "images cannot be mixed with videos: set it to 0"),
    "dataloader_train.image_dataloader.*": no_effect("no images are mixed with videos"),
    "dataloader_val.*": no_effect("held-out evaluation is [validation], which cosmos-rl's file cannot ask for"),
}  # fmt: skip

TABLE: dict[str, Row] = {**_MODEL, **_RL, **_TRAINING, **_REST}
