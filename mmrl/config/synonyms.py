"""Words of other trainers' configs (EasyR1, verl, TRL, OpenRLHF), and mmrl's keys of the same meaning.

An unknown key is looked up here, with and without the sections that it stands in: ``worker.rollout.n`` and ``n``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_WORDS: Mapping[str, str] = {
    "model.path":
        "model_path model_name_or_path pretrained_model_name_or_path model_name base_model pretrain "
        "actor_rollout_ref.model.path model_id",
    "model.dtype": "torch_dtype bf16 param_dtype",
    "model.freeze": "freeze_vision_tower freeze_visual_encoder freeze_vision freeze_vit freeze_vision_modules",
    "model.gradient_checkpointing":
        "enable_gradient_checkpointing gradient_checkpointing_enable activation_checkpointing",
    "model.lora": "use_peft use_lora peft_config lora_config",
    "model.quantize": "load_in_4bit use_qlora qlora bnb_4bit_quant_type quantization_config quantization_bit",
    "model.lora.rank": "lora_rank lora_r lora.r lora.rank r",
    "model.lora.alpha": "lora_alpha lora.alpha",
    "model.lora.targets": "target_modules lora_target_modules lora.target_modules",
    "model.chat_template":
        "chat_template override_chat_template custom_chat_template chat_template_path apply_chat_template",
    "reference.path": "ref_model ref_model_path ref_model_name_or_path teacher_model_name_or_path teacher_model_path",
    "reference.revision": "teacher_model_revision ref_model_revision",
    "critic.path": "critic_model_path critic_pretrain critic_pretrained_model value_model_path",
    "critic.lr": "critic.optim.lr critic_learning_rate critic_lr",
    "critic.pretrain_steps": "critic_warmup num_critic_warmup_steps freezing_actor_steps",
    "data.template_options":
        "chat_template_kwargs apply_chat_template_kwargs enable_thinking preserve_thinking reasoning_effort",
    "data.train.path":
        "train_files train_file train_path train_data train_dataset dataset_name dataset_path data_path "
        "prompt_data prompt_dataset",
    "data.train.split": "dataset_train_split train_split prompt_split",
    "data.train.limit": "train_max_samples max_train_samples max_samples",
    "data.train.prompt": "prompt_key input_key question_key problem_key prompt_column",
    "data.train.images": "image_key images_key image_column",
    "data.train.answer": "answer_key label_key ground_truth_key solution_key answer_column",
    "data.train.source": "reward_fn_key",
    "data.mix": "prompt_data_probs prompt_probs dataset_mixture",
    "data.eval": "eval_dataset",
    "data.eval.path": "val_files val_file val_path val_data eval_files eval_data test_files test_data eval.dataset",
    "data.eval.split": "dataset_test_split eval_split val_split eval.split",
    "data.eval.limit": "val_max_samples max_eval_samples",
    "data.image_root": "image_dir image_folder images_dir",
    "data.prompt_template": "format_prompt input_template prompt_format",
    "data.max_prompt_tokens": "max_prompt_length max_prompt_len prompt_length prompt_max_len",
    "data.overlong": "filter_overlong_prompts truncation",
    "sampler.name": "use_vllm rollout.name",
    "sampler.group_size":
        "n num_generations n_samples_per_prompt rollout_n num_return_sequences samples_per_prompt num_rollouts "
        "group_n num_samples_per_prompt",
    "sampler.max_new_tokens":
        "max_response_length response_length max_completion_length generate_max_len max_tokens max_response_len "
        "max_gen_len max_generate_length",
    "sampler.temperature": "temperature",
    "sampler.top_p": "top_p",
    "sampler.top_k": "top_k",
    "sampler.gpu_memory_utilization":
        "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static gpu_mem_util",
    "sampler.tensor_parallel_size":
        "tensor_model_parallel_size vllm_tensor_parallel_size tp_size tp vllm.tensor_parallel_size "
        "rollout.tensor_parallel_size",
    "sampler.pipeline_parallel_size":
        "pipeline_model_parallel_size vllm_pipeline_parallel_size pp_size pp vllm.pipeline_parallel_size "
        "rollout.pipeline_parallel_size rollout.pipeline_model_parallel_size",
    "sampler.engine": "engine_kwargs vllm_kwargs",
    "sampler.engine.enforce_eager": "enforce_eager vllm_enforce_eager",
    "sampler.engine.enable_chunked_prefill": "enable_chunked_prefill",
    "sampler.engine.enable_prefix_caching": "enable_prefix_caching",
    "sampler.engine.max_num_batched_tokens": "max_num_batched_tokens",
    "sampler.engine.max_num_seqs": "max_num_seqs",
    "sampler.partial":
        "partial_rollout partial_rollouts async_training.partial_rollout in_flight_weight_updates "
        "inflight_weight_updates interruptible_rollout",
    "sampler.partial.in_flight":
        "over_sampling_batch_size oversampling_factor max_concurrent_rollouts max_inflight_rollouts "
        "max_inflight_tasks async_train_batch_size",
    "learner.weight_decay": "weight_decay",
    "learner.lr": "lr learning_rate actor_learning_rate actor_lr",
    "learner.warmup_steps": "lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "learner.schedule": "lr_scheduler_type lr_scheduler warmup_style",
    "learner.max_grad_norm": "max_grad_norm grad_clip clip_grad max_norm gradient_clipping gradient_clip_val",
    "learner.minibatches": "global_batch_size ppo_mini_batch_size num_mini_batches steps_per_generation",
    "learner.epochs": "ppo_epochs num_iterations max_epochs",
    "learner.tokens_per_microbatch":
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
        "micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu micro_train_batch_size "
        "micro_rollout_batch_size micro_batch_size max_tokens_per_gpu use_dynamic_bsz dynamic_batching",
    "learner.sequence_parallel_size":
        "ulysses_size ulysses_sequence_parallel_size ring_attn_size sequence_parallel_size context_parallel_size "
        "cp_size sp_size context_parallel_degree",
    "learner.router_aux_loss_coef":
        "aux_loss_coef aux_loss_coeff moe_aux_loss_coef moe_aux_loss_coeff moe_router_aux_loss_coef",
    "learner.routing": "router_replay routing_replay enable_rollout_routing_replay rollout_routing_replay",
    "learner.zero_stage": "enable_full_shard reshard_after_forward fsdp",
    "learner.deepspeed": "deepspeed ds_config",
    "learner.offload":
        "enable_cpu_offload offload_params offload_optimizer adam_offload param_offload optimizer_offload "
        "cpu_offload offload_policy",
    "trainer.steps":
        "max_steps total_training_steps total_steps num_steps train_steps num_train_steps max_train_steps",
    "trainer.epochs": "total_epochs num_train_epochs num_epochs n_epochs num_episodes",
    "trainer.prompts_per_step": "rollout_batch_size train_batch_size generation_batch_size batch_size gen_batch_size",
    "trainer.staleness":
        "max_staleness max_staleness_steps staleness_threshold max_async_level async_level max_off_policy_steps "
        "max_head_offpolicyness max_trajectory_age_steps sampling_steps_ahead async_generation_ratio async_queue_size "
        "async_train async_training async_rollout fully_async one_step_off_policy "
        "trigger_parameter_sync_step weight_sync_steps update_weights_interval",
    "trainer.eval_every": "val_freq test_freq eval_steps eval_freq eval_interval eval.steps",
    "trainer.eval_samples":
        "num_generations_eval eval_n_samples_per_prompt eval.n_samples_per_prompt val_kwargs.n "
        "val_override_config.n",
    "trainer.save_every": "save_freq save_steps save_interval",
    "trainer.keep_checkpoints": "save_limit save_total_limit max_ckpt_num max_actor_ckpt_to_keep max_num",
    "trainer.save_optimizer": "save_only_model save_model_only save_contents",
    "trainer.best_metric": "metric_for_best_model best_metric_key",
    "trainer.best_is": "greater_is_better",
    "trainer.run_dir": "output_dir save_checkpoint_path default_local_dir save_path ckpt_path logging_dir",
    "trainer.seed": "seed data_seed random_seed",
    "trackers": "logger loggers report_to logging_backend project_name experiment_name run_name log_with",
    "cluster.ranks":
        "n_gpus_per_node num_gpus_per_node nnodes num_nodes num_gpus n_gpus num_processes world_size "
        "actor_num_gpus_per_node actor_num_nodes vllm_num_engines num_engines",
    "cluster.sampler_ranks":
        "rollout_num_gpus num_infer_gpus inference_gpu_ids rollout.nnodes rollout.n_gpus_per_node vllm_mode "
        "vllm_server_base_url vllm_server_host generation.colocated.resources.gpus_per_node",
    "cluster.learner_ranks": "trainer_gpu_ids num_train_gpus",
    "cluster.address": "ray_address ray_kwargs",
    "rewards":
        "reward_function reward_funcs reward_fn custom_reward_function reward_model reward_manager remote_url "
        "reward_functions",
    "rewards.0.weight": "reward_weights",
    "environment":
        "environment_factory environments env env_config multi_turn agent_loop interaction_config_path "
        "rollout.multi_turn rollout.agent agent_func_path tools tool_config_path tool_list",
    "environment.name": "env_name environment_name env_id env.env_name rollout.agent.default_agent_loop",
    "environment.max_turns":
        "max_assistant_turns max_user_turns max_turns max_tool_calling_iterations max_tool_calls "
        "multi_turn.max_assistant_turns max_iterations max_steps_per_episode env.max_steps",
    "environment.max_turn_tokens": "max_tokens_per_turn max_new_tokens_per_turn response_length_per_turn",
    "environment.max_observation_tokens": "max_tool_response_length max_obs_length max_observation_length",
    "environment.tool_prompt": "tool_format multi_turn.format",
    "environment.workers": "max_parallel_calls num_env_workers agent.num_workers",
    "algorithm.name":
        "adv_estimator advantage_estimator loss_type policy_loss_type loss_mode algo algo_name "
        "advantage.estimator",
    "algorithm.kl.coef": "beta kl_coef kl_loss_coef init_kl_coef kl_beta kl.init_coef kl_coefficient",
    "algorithm.kl.estimator": "kl_penalty kl_loss_type kl_estimator kl.estimator",
    "algorithm.kl.where": "use_kl_loss use_kl_in_reward kl.use_loss",
    "algorithm.kl.target": "kl_target target_kl",
    "algorithm.kl.horizon": "kl_horizon",
    "algorithm.clip_low": "clip_ratio clip_ratio_low epsilon eps_clip cliprange clip_range epsilon_low",
    "algorithm.clip_high": "clip_ratio_high epsilon_high",
    "algorithm.dual_clip": "clip_ratio_dual clip_ratio_c delta",
    "algorithm.aggregation": "loss_avg_mode loss_agg_mode",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "algorithm.dynamic_sampling": "online_filtering dynamic_filtering dynamic_filtering_enable filter_groups",
    "algorithm.dynamic_sampling.max_rounds": "max_try_make_batch max_num_gen_batches dynamic_sampling_max_gen_batches",
    "algorithm.reward_norm": "multi_objective_aggregation",
    "algorithm.correction": "vllm_importance_sampling_correction rollout_correction is_correction_enable "
        "use_importance_sampling_correction use_decoupled_loss use_rollout_log_probs",
}  # fmt: skip
"""Words of the same meaning, by mmrl's key."""

_NOTES: Mapping[str, str] = {
    "model.chat_template": "a file with the template; without it the model's own is used",
    "data.template_options": "a mapping of the template's own names, such as {enable_thinking: false}",
    "learner.tokens_per_microbatch": "counted in tokens, and a matter of memory alone",
    "learner.sequence_parallel_size": "ranks that share a packed row; tokens_per_microbatch is what each of them holds",
    "learner.minibatches": "how many optimizer steps a rollout batch is divided into, not their size",
    "learner.warmup_steps": "counted in optimizer steps, not a share",
    "learner.epochs": "passes over one rollout batch",
    "trainer.prompts_per_step": "counted in prompts; each is answered sampler.group_size times",
    "trainer.epochs": "in place of trainer.steps",
    "trainer.run_dir": "everything of a run goes there",
    "cluster.ranks": "all GPUs together, with cluster.name: ray",
    "cluster.sampler_ranks": "GPUs that sample alone, with cluster.name: ray and cluster.learner_ranks",
    "cluster.learner_ranks": "GPUs that learn alone, with cluster.name: ray and cluster.sampler_ranks",
    "trainer.staleness": "a fixed lag in steps, 0 to 4, and no bound; with cluster.sampler_ranks and learner_ranks",
    "sampler.partial": "{engine_steps: N}: what is unfinished after a round goes on in the next one",
    "sampler.partial.in_flight": "in multiples of trainer.prompts_per_step",
    "trackers": "a list such as [{name: ...}]; metrics.jsonl and the console need none",
    "rewards": "a list such as [{name: ...}]; a function of a file is path/to/file.py:function",
    "algorithm.kl.where": "loss or reward",
    "data.overlong": "drop or fail; a prompt is never cut",
    "environment": "{name: path/to/file.py:Class}, or {tools: [path/to/file.py:function]}",
    "environment.max_turns": "turns of the policy, the last one included",
    "environment.max_observation_tokens": "counted in tokens of the model, images included; a longer one is not cut",
    "environment.tool_prompt": "calls are in the format of the model's own template",
    "model.freeze": "a list of parts: vision, projector",
    "sampler.name": "vllm or hf",
    "sampler.top_p": "only 1.0: the learner cannot reproduce a truncated distribution",
    "sampler.top_k": "only -1: the learner cannot reproduce a truncated distribution",
    "algorithm.dynamic_sampling.max_rounds": "rounds of replacements after a step's first prompts",
    "algorithm.reward_norm": "group: each reward is normalised before the sum",
}
"""Differences of mmrl's keys from the words."""

_ABSENT: Mapping[str, str] = {
    "gamma lam lambd gae_lambda":
        "discounts are options of algorithms that have them: algorithm.gamma, algorithm.lam",
    "cliprange_value value_clip vf_clip": "an option of algorithms with a critic: algorithm.value_clip",
    "vf_coef value_loss_coef": "the critic has weights and an optimizer of its own: critic.lr",
    "padding_free use_remove_padding packing_samples pad_to_multiple_of": "rows are always packed, without padding",
    "shuffle shuffle_dataset": "training rows are always shuffled, by trainer.seed",
    "ref sync_ref_model disable_kl": "the reference is the initial policy; algorithm.kl.coef: 0 loads none",
    "val_before_train eval_on_start": "there is always an evaluation before the first step, if there is data.eval",
    "video_key videos": "videos are not read; take some frames as images",
    "load_checkpoint_path resume_mode resume_from_path resume_from_checkpoint find_last_checkpoint "
    "load_checkpoint":
        "the same command goes on by itself; another checkpoint is named with --resume PATH",
    "logging_steps log_completions num_completions_to_print":
        "every step is logged, and every completion is in RUN/rollouts",
    "val_batch_size per_device_eval_batch_size": "the sampler batches by itself",
    "scale_rewards advantage_norm no_std_norm importance_sampling_level":
        "that is the algorithm's own: choose it by algorithm.name; `mmrl plugins` lists them, and the page of plugins "
        "says what each divides by and clips",
    "reward_type":
        "a function of one rollout or of several is told apart by its parameters; rewards[].style names a convention",
    "skip_special_tokens": "a reward sees the text without special tokens, and the token ids beside it",
    "num_cpus": "rewards[].workers: processes of a reward",
    "max_model_len max_model_length vllm_max_model_length max_seq_len max_seq_length":
        "data.max_prompt_tokens and sampler.max_new_tokens together; mmrl sets vLLM's own from them",
    "min_p repetition_penalty presence_penalty frequency_penalty ignore_eos":
        "what is sampled is the policy's own distribution at sampler.temperature, else log-probs would not fit it",
    "tokenizer_path tokenizer_name tokenizer_name_or_path": "the tokenizer is the one in model.path",
    "video_fps video_max_pixels video_min_pixels": "videos are not read; take some frames as images",
    "use_torch_compile torch_compile use_liger_kernel use_liger": "mmrl decides what is compiled",
    "betas adam_beta1 adam_beta2 adam_epsilon optim strategy": "the optimizer is AdamW with betas 0.9 and 0.999",
    "hybrid_engine colocate colocate_all colocate_all_models colocated generation.colocated.enabled":
        "ranks sample and learn in turns with cluster.ranks, and apart with cluster.sampler_ranks and "
        "cluster.learner_ranks",
    "rollout.mode async_engine": "the sampler's steps are counted, so that a run repeats; trainer.staleness is its lag",
    "val_generations_to_log": "trainer.tracked_rollouts: those of each evaluation that trackers get",
    "val_only": "`mmrl eval` evaluates alone",
    "ray_timeline": "`mmrl train --profile` writes a trace",
    "disable_log_stats disable_tqdm": "mmrl decides it",
}  # fmt: skip
"""Words without a key of mmrl's, and the reasons."""


_ASIDE: Mapping[str, str] = {
    "critic value value_model reward_critic":
        "a critic has the section critic (path, lr, pretrain_steps, ...), for an algorithm that asks for one",
    "ref reference ref_model reference_model":
        "the reference is the initial policy, the model at reference.path, or a list of {path, sources, weight}, on "
        "the learner's ranks and with its settings",
    "reward_model rm reward_manager": "a model that scores is a reward: see rewards",
    "val_kwargs val_override_config eval_kwargs validation":
        "an evaluation is greedy, or has trainer.eval_samples completions at sampler.temperature",
    "teacher teacher_model": "a teacher is the model at reference.path",
}  # fmt: skip
"""Sections of configs that are not about the policy's training, and what answers any of their keys."""


@dataclass(frozen=True, slots=True)
class Synonym:
    """mmrl's answer to a word of others.

    Attributes:
        key: mmrl's dotted key; empty if it has none.
        note: The difference; without a key, the reason why there is none.
    """

    key: str
    note: str = ""


def _table() -> dict[str, Synonym]:
    table = {word: Synonym("", note) for words, note in _ABSENT.items() for word in words.split()}
    table |= {word: Synonym(key, _NOTES.get(key, "")) for key, words in _WORDS.items() for word in words.split()}
    return table


_TABLE = _table()


_SECTIONS = {word: note for words, note in _ASIDE.items() for word in words.split()}


def words() -> Mapping[str, Synonym]:
    """Every word of others that is known, with mmrl's answer."""
    return _TABLE


def synonym(key: str) -> Synonym | None:
    """mmrl's answer to a dotted key of others, by the longest end of it that is known; None if none is.

    A single word says nothing within a section that is about something else, such as a critic's ``optim.lr``.
    """
    parts = key.lower().replace("-", "_").split(".")
    aside = next((_SECTIONS[part] for part in parts[:-1] if part in _SECTIONS), "")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    found = next((_TABLE[end] for end in ends if end in _TABLE and not (aside and "." not in end)), None)
    if aside and found is None:
        return Synonym("", aside)
    whole = _SECTIONS.get(parts[0]) if len(parts) == 1 else None
    if found is None and whole:
        return Synonym("", whole)
    return found if found is not None else next((_TABLE[part] for part in parts[:1] if part in _TABLE), None)


def spelled(name: str) -> str:
    """A plugin's name as such names are spelled here: ``Reinforce++`` and ``reinforce_plus_plus`` alike."""
    return re.sub(r"\+\+|_?plus_?plus", "_pp", name.lower()).replace("-", "_").replace("__", "_").strip("_")
