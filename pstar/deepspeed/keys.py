"""The keys of DeepSpeed's JSON and of PatrickStar's that pstar does not have, and what becomes of each: data, no code.

A row is the key's dotted name, what becomes of it, and one sentence that says so. The row of an object covers the keys in it
that have no row. With `on` a row is for these values only; of several rows of a key the first one that fits is taken.

    taken        pstar has it with the same meaning
    translated   another key of pstar, or something that pstar does anyway, has its effect
    ignored      no number and no byte of the model data depends on it
    refused      nothing here is like it, and without it the run would compute other numbers, or need other memory

Names and defaults are those of DeepSpeed 0.19.8 (https://www.deepspeed.ai/docs/config-json/), older ones included, and of
PatrickStar 0.4.6 (examples/ps_config.py in https://github.com/Tencent/PatrickStar).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TAKEN, TRANSLATED, IGNORED, REFUSED = "taken", "translated", "ignored", "refused"
FATES = (TAKEN, TRANSLATED, IGNORED, REFUSED)
VALUE = object()
"""In `into`: the value that the file gives the key."""
AUTO = "auto"
"""Hugging Face's Trainer writes the value of one of its arguments in place of it."""


@dataclass(frozen=True)
class Key:
    """A row of the table."""

    name: str
    fate: str
    sentence: str
    on: tuple = ()
    """The values that the row is for; () for all."""
    into: Mapping[str, Any] = field(default_factory=dict)
    """Keys of pstar and their values, for a translated key."""


BATCH = "pstar accumulates over as many micro-steps as the rule of DeepSpeed says; your DataLoader makes the batches."
STAGE = "Every stage becomes pstar's one: parameters, gradients and states are divided among the processes."
CPU_STATES = "Optimizer states are in host memory and the CPU updates them: optimizer.params.use_hybrid_adam is false."
CPU_PARAMS = "Parameters are in host memory except those that near_budget has room for."
DISK = "Becomes disk_path, with far_budget min: host memory holds the least that works, the disk the rest."
SIZES = "Sizes of DeepSpeed's buffers: here default_chunk_size, near_budget and prefetch decide."
COMM = "How DeepSpeed orders its messages: pstar gathers and reduces chunks, in the background."
FILES = "How DeepSpeed writes checkpoints: model.save_checkpoint and model.export_weights write pstar's."
LOGS = "What DeepSpeed logs: model.step_scalars() and optimizer.grad_norm give numbers, the key profile a timeline."
PINNED = "pstar locks the pages of far memory whenever near is a GPU."
AIO = "How DeepSpeed reads and writes its disk."
ACTIVATIONS = "Recomputation is decided by the model's code, here as in DeepSpeed."
DTYPE = "pstar reduces gradients in their own dtype and accumulates them in fp32: no other one can be chosen."
MASTERS = "pstar's masters are fp32; optimizer.params.state_bits 8 saves memory in another way."
ADAM = "pstar has one Adam, in the place of all of DeepSpeed's."
QUANTISED = "pstar sends whole numbers of bf16, fp16 or fp32 between processes, no codes."
DATA = "pstar makes no batches: your DataLoader does."
PARALLEL = "pstar divides data among processes, not layers, heads, experts or sequences."
COMPRESSED = "pstar changes no weight except by Adam."
TRACER = "PatrickStar's shares of memory: here near_budget, near_memory and far_budget give bytes."
OFF = "Switched off in the file."

KEYS = (
    # ---- batches
    Key("train_batch_size", TAKEN, BATCH),
    Key("train_micro_batch_size_per_gpu", TAKEN, BATCH),
    Key("dataloader_drop_last", IGNORED, DATA),
    # ---- optimizer and schedule
    Key("optimizer.type", TRANSLATED, "DeepSpeed reads the name of an optimizer in any case.", ("adam", "ADAM"),
        {"optimizer.type": "Adam"}),
    Key("optimizer.type", TRANSLATED, "DeepSpeed reads the name of an optimizer in any case.", ("adamw", "ADAMW", "Adamw"),
        {"optimizer.type": "AdamW"}),
    Key("optimizer.type", REFUSED, "Choose Adam or AdamW: pstar's optimizers are these two.", tuple(
        spelt for name in ("Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD",
                           "Adagrad") for spelt in (name, name.lower()))),
    Key("optimizer.legacy_fusion", IGNORED, ADAM),
    Key("optimizer.params.adam_w_mode", TRANSLATED, "Decides optimizer.type: DeepSpeed's Adam decouples weight decay unless "
        "this is false, so it is AdamW here."),
    Key("optimizer.params.bias_correction", IGNORED, "pstar's Adam always corrects the bias.", (True,)),
    Key("optimizer.params.bias_correction", REFUSED, "pstar's Adam always corrects the bias; take the key out, or set true.",
        (False,)),
    Key("optimizer.params.amsgrad", IGNORED, OFF, (False,)),
    Key("optimizer.params.amsgrad", REFUSED, "pstar's Adam keeps no maximum of the moment; take the key out.", (True,)),
    Key("optimizer.params.max_grad_norm", REFUSED, "Write it as gradient_clipping; DeepSpeed refuses it here, too."),
    Key("optimizer.params.torch_adam", IGNORED, ADAM),
    Key("optimizer.params.foreach", IGNORED, ADAM),
    Key("optimizer.params.fused", IGNORED, ADAM),
    Key("optimizer.params.set_grad_none", IGNORED, ADAM),
    Key("optimizer.params.fp32_optimizer_states", IGNORED, ADAM, (True,)),
    Key("optimizer.params.fp32_optimizer_states", REFUSED, MASTERS, (False,)),
    Key("scheduler.type", TAKEN, "model.lr_scheduler follows DeepSpeed's formula; the engine steps it after every "
        "update; your loop must not."),
    Key("scheduler.params", TAKEN, "The names and defaults of DeepSpeed's schedules."),
    # ---- precision
    Key("bfloat16.enabled", TRANSLATED, "The old name of bf16.", into={"bf16.enabled": VALUE}),
    Key("bf16.check_overflow", IGNORED, "pstar skips a step with a gradient that is not finite, in every precision."),
    Key("bf16.immediate_grad_update", IGNORED, COMM),
    Key("bf16.bf16_master_weights_and_grads", IGNORED, OFF, (False,)),
    Key("bf16.bf16_master_weights_and_grads", REFUSED, MASTERS),
    Key("bf16.bf16_optimizer_states", IGNORED, OFF, (False,)),
    Key("bf16.bf16_optimizer_states", REFUSED, MASTERS),
    Key("fp16.auto_cast", IGNORED, "pstar always casts floating-point inputs to the dtype of the model."),
    Key("fp16.opt_level", IGNORED, "A leftover of Apex, which DeepSpeed does not read."),
    Key("fp16.fp16_master_weights_and_grads", IGNORED, OFF, (False,)),
    Key("fp16.fp16_master_weights_and_grads", REFUSED, MASTERS),
    Key("amp.enabled", REFUSED, "Write bf16.enabled or fp16.enabled: pstar computes all of a model in one dtype.", (True,)),
    Key("amp", IGNORED, OFF),
    Key("torch_autocast.enabled", REFUSED, "Write bf16.enabled or fp16.enabled: pstar computes all of a model in one dtype.",
        (True,)),
    Key("torch_autocast", IGNORED, OFF),
    Key("communication_data_type", REFUSED, DTYPE),
    Key("seq_parallel_communication_data_type", IGNORED, PARALLEL),
    Key("fp32_allreduce", IGNORED, OFF, (False,)),
    Key("fp32_allreduce", REFUSED, DTYPE),
    Key("data_types.grad_accum_dtype", TAKEN, DTYPE, ("fp32",)),
    Key("data_types.grad_accum_dtype", REFUSED, DTYPE),
    Key("data_types", REFUSED, DTYPE),
    # ---- ZeRO
    Key("zero_optimization", TRANSLATED, STAGE, (True, False)),
    Key("zero_optimization.stage", TRANSLATED, STAGE, (0, 1, 2, 3)),
    Key("zero_optimization.stage", REFUSED, "Give a stage from 0 to 3."),
    Key("zero_optimization.offload_optimizer.device", IGNORED, OFF, ("none", None)),
    Key("zero_optimization.offload_optimizer.device", TRANSLATED, CPU_STATES, ("cpu", "nvme"),
        {"optimizer.params.use_hybrid_adam": False}),
    Key("zero_optimization.offload_optimizer.device", REFUSED, "Give none, cpu or nvme."),
    Key("zero_optimization.offload_optimizer.nvme_path", TRANSLATED, DISK),
    Key("zero_optimization.offload_optimizer.pin_memory", IGNORED, PINNED),
    Key("zero_optimization.offload_optimizer.ratio", IGNORED, "All states are offloaded.", (1, 1.0)),
    Key("zero_optimization.offload_optimizer.ratio", TRANSLATED, "Some states stay near: as many as near_budget has room "
        "for, optimizer.params.use_hybrid_adam is true.", into={"optimizer.params.use_hybrid_adam": True}),
    Key("zero_optimization.offload_optimizer.super_offload", IGNORED, OFF, (False,)),
    Key("zero_optimization.offload_optimizer.super_offload", TRANSLATED, "Becomes speculative_update: updates begin during "
        "backward, and are undone if the step is clipped or skipped.", (True,), {"speculative_update": True}),
    Key("zero_optimization.offload_optimizer.cpuadam_cores_perc", IGNORED, ADAM),
    Key("zero_optimization.offload_optimizer", IGNORED, SIZES),
    Key("zero_optimization.offload_param.device", IGNORED, OFF, ("none", None)),
    Key("zero_optimization.offload_param.device", TRANSLATED, CPU_PARAMS, ("cpu", "nvme")),
    Key("zero_optimization.offload_param.device", REFUSED, "Give none, cpu or nvme."),
    Key("zero_optimization.offload_param.nvme_path", TRANSLATED, DISK),
    Key("zero_optimization.offload_param.pin_memory", IGNORED, PINNED),
    Key("zero_optimization.offload_param", IGNORED, SIZES),
    Key("zero_optimization.cpu_offload", IGNORED, OFF, (False,)),
    Key("zero_optimization.cpu_offload", TRANSLATED, CPU_STATES, (True,), {"optimizer.params.use_hybrid_adam": False}),
    Key("zero_optimization.cpu_offload_params", IGNORED, OFF, (False,)),
    Key("zero_optimization.cpu_offload_params", TRANSLATED, CPU_PARAMS),
    Key("zero_optimization.cpu_offload_param", IGNORED, OFF, (False,)),
    Key("zero_optimization.cpu_offload_param", TRANSLATED, CPU_PARAMS),
    Key("zero_optimization.cpu_offload_use_pin_memory", IGNORED, PINNED),
    *(Key(f"zero_optimization.{name}", IGNORED, SIZES) for name in (
        "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
        "prefetch_bucket_size", "stage3_param_persistence_threshold", "param_persistence_threshold",
        "stage3_param_persitance_threshold", "stage3_model_persistence_threshold", "model_persistence_threshold",
        "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance", "max_reuse_distance",
        "stage3_module_granularity_threshold", "module_granularity_threshold", "stage3_gather_bucket_size")),
    *(Key(f"zero_optimization.{name}", IGNORED, COMM) for name in (
        "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients",
        "use_multi_rank_bucket_allreduce", "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "allgather_sequential", "zero_hpz_partition_size", "mics_hierarchical_params_gather",
        "ignore_unused_parameters", "memory_efficient_linear", "override_module_apply", "leaf_module", "legacy_stage1",
        "parameter_alignment", "compute_grad_norm", "log_trace_cache_warnings", "enable_sanity_checks")),
    *(Key(f"zero_optimization.{name}", IGNORED, FILES) for name in (
        "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "load_from_fp32_weights", "elastic_checkpoint",
        "pipeline_loading_checkpoint")),
    *(Key(f"zero_optimization.{name}", fate, OFF if on else QUANTISED, on) for name in (
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
      for fate, on in ((IGNORED, (False,)), (REFUSED, ()))),
    Key("zero_optimization.mics_shard_size", IGNORED, OFF, (-1, 0)),
    Key("zero_optimization.mics_shard_size", REFUSED,
        "pstar divides model data among all processes, with ownership: node among those of each node; take the key out."),
    Key("zero_optimization.zenflow", REFUSED, "pstar's Adam updates every parameter in every step, no selection of them."),
    Key("zero_optimization.save_muon_momentum_buffer_in_memory", IGNORED, ADAM),
    Key("zero_allow_untested_optimizer", IGNORED, ADAM),
    Key("zero_allow_untrusted_optimizer", IGNORED, ADAM),
    Key("zero_force_ds_cpu_optimizer", IGNORED, ADAM),
    Key("aio", IGNORED, AIO),
    # ---- communication
    Key("prescale_gradients", IGNORED, OFF, (False,)),
    Key("prescale_gradients", IGNORED, "Gradients are averaged either way, with one rounding more or less."),
    Key("gradient_predivide_factor", IGNORED, "Gradients are averaged either way, with one rounding more or less."),
    Key("gradient_allreduce_op", TAKEN, "pstar averages the gradients of the processes.", ("mean",)),
    Key("gradient_allreduce_op", REFUSED, "pstar averages the gradients of the processes and cannot add them."),
    Key("sparse_gradients", IGNORED, COMM),
    Key("disable_allgather", IGNORED, COMM),
    Key("managed_gradient_accumulation", IGNORED, BATCH),
    Key("use_data_before_expert_parallelism", IGNORED, PARALLEL),
    # ---- activations
    Key("activation_checkpointing.cpu_checkpointing", IGNORED, OFF, (False,)),
    Key("activation_checkpointing.cpu_checkpointing", TRANSLATED, "Becomes offload_activations.", (True,),
        {"offload_activations": True}),
    Key("activation_checkpointing", IGNORED, ACTIVATIONS),
    # ---- reports and files
    *(Key(name, IGNORED, LOGS) for name in (
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard", "wandb", "csv_monitor",
        "comet", "comms_logger", "flops_profiler", "log_level", "timers", "monitor_config", "disable_python_gc",
        "vocabulary_size")),
    Key("checkpoint", IGNORED, FILES),
    Key("datastates_ckpt", IGNORED, FILES),
    Key("nebula", IGNORED, FILES),
    # ---- methods of DeepSpeed that pstar lacks
    *(row for name, why in (
        ("autotuning", "pstar plan predicts chunk size and budgets; nothing is tried out at the start."),
        ("elasticity", "The number of processes decides the batch only by the rule of train_batch_size."),
        ("curriculum_learning", DATA), ("data_efficiency", DATA),
        ("progressive_layer_drop", "The model decides which layers run."),
        ("eigenvalue", COMPRESSED), ("quantize_training", COMPRESSED),
        ("hybrid_engine", "pstar trains; it has no engine for generation."))
      for row in (Key(f"{name}.enabled", REFUSED, why, (True,)), Key(name, IGNORED, OFF))),
    Key("sparse_attention", REFUSED, "The model decides its attention; DeepSpeed's sparse one is not here."),
    Key("compression_training", REFUSED, COMPRESSED),
    Key("weight_quantization", REFUSED, COMPRESSED),
    Key("compile.deepcompile", REFUSED, "pstar brings parameters near before modules; DeepCompile has none.", (True,)),
    Key("compile", IGNORED, "DeepSpeed compiles when the program asks it to; pstar's key is \"compile\": \"block\"."),
    Key("tensor_parallel.autotp_size", IGNORED, OFF, (0, 1)),
    Key("tensor_parallel", REFUSED, PARALLEL),
    Key("expert_parallel", REFUSED, PARALLEL),
    Key("sequence_parallel_size", IGNORED, OFF, (1,)),
    Key("sequence_parallel_size", REFUSED, PARALLEL),
    Key("pipeline", IGNORED, PARALLEL),
    # ---- PatrickStar's
    Key("use_fake_dist", IGNORED, OFF, (False,)),
    Key("use_fake_dist", REFUSED, "pstar plan predicts several processes; none is pretended."),
    *(Key(f"client.mem_tracer.{name}", IGNORED, TRACER) for name in (
        "warmup_gpu_chunk_mem_ratio", "overall_gpu_mem_ratio", "overall_cpu_mem_ratio", "margin_use_ratio")),
    Key("client.mem_tracer.use_fake_dist", IGNORED, OFF, (False,)),
    Key("client.mem_tracer.use_fake_dist", REFUSED, "pstar plan predicts several processes; none is pretended."),
    Key("client.mem_tracer.with_static_partition", IGNORED, "Chunks are always evicted by the trace."),
    Key("client.opts.with_mem_saving_comm", TRANSLATED, "Becomes communication: one chunk at a time.", (True,),
        {"communication": "chunk"}),
    Key("client.opts.with_mem_saving_comm", IGNORED, OFF, (False,)),
    Key("client.opts.with_mem_cache", IGNORED, "The buffers of chunks are always used again."),
    Key("client.opts.with_async_move", IGNORED, "Copies are always made in the background; prefetch 0 makes them at need."),
)

PATRICKSTAR = ("use_fake_dist", "client", "release_after_init", "use_cpu_embedding", "default_chunk_size")
"""Objects and keys at the top level that are PatrickStar's, not DeepSpeed's."""
DEEPSPEED = frozenset(key.name.partition(".")[0] for key in KEYS) - {*PATRICKSTAR, "optimizer", "fp16", "bf16", "compile"}
"""Keys at the top level by which a file is known to be DeepSpeed's."""
