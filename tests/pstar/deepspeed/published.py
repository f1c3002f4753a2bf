"""Configurations that people have published, and pstar's own keys for each, or the line that refuses it.

Only the keys and values are taken, which are facts; the source is named above each. `{disk}` is the test's own folder.
"""

from __future__ import annotations

from typing import Any

GITHUB = "https://github.com/"
EXAMPLES = GITHUB + "microsoft/DeepSpeedExamples/blob/"
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
AUTO_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
AUTO_WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}
AUTO_SIZES = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
              "train_micro_batch_size_per_gpu": "auto"}
PINNED = {"device": "cpu", "pin_memory": True}
FAR_STATES = {"optimizer": {"params": {"use_hybrid_adam": False}}}

# name -> (source, the file, pstar's keys for one process or the line that refuses it)
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | str]] = {
    "Hugging Face, ZeRO-2": (
        GITHUB + "huggingface/transformers/blob/main/tests/deepspeed/ds_config_zero2.json",
        {"fp16": FP16 | {"enabled": "auto", "initial_scale_power": 16}, "bf16": {"enabled": "auto"}, "optimizer": AUTO_ADAMW,
         "scheduler": AUTO_WARMUP, "zero_optimization": {
             "stage": 2, "offload_optimizer": PINNED, "allgather_partitions": True, "allgather_bucket_size": 2e8,
             "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True},
         **AUTO_SIZES, "steps_per_print": 2000, "wall_clock_breakdown": False},
        FAR_STATES),
    "Hugging Face, ZeRO-3 of 2021": (
        GITHUB + "huggingface/transformers/blob/61c7ec94b563/tests/deepspeed/ds_config_zero3.json",
        {"fp16": FP16 | {"initial_scale_power": 16}, "zero_optimization": {
            "stage": 3, "offload_optimizer": PINNED, "offload_param": PINNED, "overlap_comm": True,
            "contiguous_gradients": True, "sub_group_size": 1e14, "reduce_bucket_size": 0, "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_fp16_weights_on_model_save": True},
         "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
         "steps_per_print": 2000, "wall_clock_breakdown": False},
        {"fp16": {"enabled": True}, "scheduler": {
            "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
         "optimizer": {"params": {"lr": 3e-5, "betas": [0.8, 0.999], "weight_decay": 3e-7, "use_hybrid_adam": False}}}),
    "Bing BERT, batch of 64k": (
        EXAMPLES + "master/bing_bert/deepspeed_bsz64k_lamb_config_seq128.json",
        {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "steps_per_print": 100,
         "prescale_gradients": False,
         "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False,
                                                  "max_coeff": 0.3, "min_coeff": 0.01}},
         "gradient_clipping": 1.0, "wall_clock_breakdown": False, "fp16": {"enabled": True, "loss_scale": 0},
         "sparse_attention": {"mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4,
                              "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": False,
                              "num_different_global_patterns": 4}},
        "'optimizer.type' is \"Lamb\": Choose Adam or AdamW: pstar's optimizers are these two."),
    "Megatron-LM, ZeRO-Infinity": (
        EXAMPLES + "master/Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_infinity_config.json",
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "steps_per_print": 1, "zero_optimization": {
            "stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e8,
            "stage3_param_persitance_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7, "contiguous_gradients": True,
            "overlap_comm": True, "reduce_bucket_size": 90000000, "sub_group_size": 1e8,
            "offload_optimizer": {"device": "nvme", "nvme_path": "{disk}", "buffer_count": 4, "pipeline_read": False,
                                  "pipeline_write": False, "pin_memory": True},
            "offload_param": {"device": "nvme", "nvme_path": "{disk}", "max_in_cpu": 1, "pin_memory": True}},
         "gradient_clipping": 1.0, "fp16": FP16 | {"loss_scale": 1024}, "wall_clock_breakdown": True,
         "zero_allow_untested_optimizer": False,
         "aio": {"block_size": 1048576, "queue_depth": 16, "single_submit": False, "overlap_events": True,
                 "thread_count": 2}},
        {**FAR_STATES, "gradient_clipping": 1.0, "fp16": {"enabled": True, "loss_scale": 1024}, "disk_path": "{disk}",
         "far_budget": "min", "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}),
    "ChatGLM-6B, P-tuning": (
        GITHUB + "THUDM/ChatGLM-6B/blob/main/ptuning/deepspeed.json",
        {"train_micro_batch_size_per_gpu": "auto", "zero_allow_untested_optimizer": True,
         "fp16": FP16 | {"enabled": "auto", "initial_scale_power": 16},
         "zero_optimization": {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
                               "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True}},
        {}),
    "BLOOM's Megatron-DeepSpeed, bf16": (
        GITHUB + "bigscience-workshop/Megatron-DeepSpeed/blob/main/tests/ds_config_bf16.json",
        {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 16, "gradient_clipping": 1.0,
         "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "steps_per_print": 2000,
         "wall_clock_breakdown": False},
        {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 16, "gradient_accumulation_steps": 16,
         "gradient_clipping": 1.0, "bf16": {"enabled": True}}),
    "CIFAR-10": (
        EXAMPLES + "master/cifar/ds_config.json",
        {"train_batch_size": 4, "steps_per_print": 2000,
         "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
         "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
         "fp16": FP16 | {"fp16_master_weights_and_grads": True, "loss_scale_window": 500, "initial_scale_power": 15},
         "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True, "overlap_comm": True,
                               "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000,
                               "contiguous_gradients": True, "cpu_offload": True}},
        "'fp16.fp16_master_weights_and_grads' is true: pstar's masters are fp32; optimizer.params.state_bits 8 saves memory "
        "in another way."),
    "QANet, one cycle": (
        EXAMPLES + "69785c7cff23/QANet-Pytorch/ds_bsz512_1cycle.json",
        {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 32, "steps_per_print": 10,
         "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
         "scheduler": {"type": "OneCycle", "params": {
             "cycle_min_lr": 0.004, "cycle_max_lr": 0.015, "cycle_first_step_size": 1000, "cycle_second_step_size": 100,
             "cycle_first_stair_count": 100, "cycle_second_stair_count": 100, "decay_step_size": 1000,
             "decay_lr_rate": 0.01}}},
        {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 16,
         "optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.999], "weight_decay": 3e-7}},
         "scheduler": {"type": "OneCycle", "params": {
             "cycle_min_lr": 0.004, "cycle_max_lr": 0.015, "cycle_first_step_size": 1000, "cycle_second_step_size": 100,
             "cycle_first_stair_count": 100, "cycle_second_stair_count": 100, "decay_step_size": 1000,
             "decay_lr_rate": 0.01}}}),
    "SQuAD with Bing BERT": (
        EXAMPLES + "master/BingBertSquad/deepspeed_bsz24_config.json",
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 6, "steps_per_print": 10, "fp16": {"enabled": True},
         "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0, "weight_decay": 0.0,
                                                  "bias_correction": False}}},
        "'optimizer.params.bias_correction' is false: pstar's Adam always corrects the bias; take the key out, or set "
        "true."),
    "Megatron-LM, ZeRO-2": (
        EXAMPLES + "master/Megatron-LM/scripts/ds_zero2_config.json",
        {"train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_print": 1, "zero_optimization": {"stage": 2},
         "optimizer": {"type": "Adam", "params": {"lr": 0.00015}}, "gradient_clipping": 1.0, "fp16": FP16,
         "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": False},
         "wall_clock_breakdown": False},
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "optimizer": {"params": {"lr": 0.00015}},
         "gradient_clipping": 1.0, "fp16": {"enabled": True}}),
    "LLaVA, ZeRO-3 with offload": (
        GITHUB + "haotian-liu/LLaVA/blob/main/scripts/zero3_offload.json",
        {"fp16": FP16 | {"enabled": "auto", "initial_scale_power": 16}, "bf16": {"enabled": True}, "optimizer": AUTO_ADAMW,
         "scheduler": AUTO_WARMUP, "zero_optimization": {
             "stage": 3, "offload_optimizer": PINNED, "offload_param": PINNED, "overlap_comm": True,
             "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
             "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
             "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
             "gather_16bit_weights_on_model_save": True},
         **AUTO_SIZES, "steps_per_print": 1e5, "wall_clock_breakdown": False},
        {**FAR_STATES, "bf16": {"enabled": True}}),
    "PatrickStar's examples": (
        GITHUB + "Tencent/PatrickStar/blob/master/examples/ps_config.py",
        {"optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0,
                                                  "use_hybrid_adam": True}},
         "fp16": FP16 | {"initial_scale_power": 3}, "default_chunk_size": 64 * 1024 * 1024, "release_after_init": False,
         "use_fake_dist": False, "use_cpu_embedding": False,
         "client": {"mem_tracer": {"use_async_mem_monitor": True, "warmup_gpu_chunk_mem_ratio": 0.1,
                                   "overall_gpu_mem_ratio": 0.9, "overall_cpu_mem_ratio": 0.9, "margin_use_ratio": 0.8,
                                   "use_fake_dist": False, "with_static_partition": False},
                    "opts": {"with_mem_saving_comm": True, "with_mem_cache": True, "with_async_move": False}}},
        {"optimizer": {"type": "Adam", "params": {"eps": 1e-6}}, "fp16": {"enabled": True, "initial_scale_power": 3},
         "default_chunk_size": 64 * 1024 * 1024, "communication": "chunk",
         "client": {"mem_tracer": {"use_async_mem_monitor": True}}}),
}
