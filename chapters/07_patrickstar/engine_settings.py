"""The flags that chapter 07 adds, and the check, before any process is launched, that the memory budgets suffice."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2_chinese.errors import UserError, notice
from gpt2_chinese.files import check_output_file
from gpt2_chinese.settings import ParallelSettings, dashed, flag

# Configuration key -> the setting with the same meaning. The optimizer's other keys have no flag and are passed on as given.
SAME_AS = {
    "near_budget": "near_budget",
    "far_budget": "far_budget",
    "default_chunk_size": "chunk_size",
    "ownership": "ownership",
    "communication": "communication",
    "eviction_policy": "policy",
    "near_memory": "near_memory",
    "disk_path": "disk_path",
    "prefetch": "prefetch",
    "offload_activations": "offload_activations",
    "overlap_update": "overlap_update",
    "speculative_update": "speculative_update",
    "speculative_log": "speculative_log",
    "near_states": "near_states",
    "far_states": "far_states",
    "compile": "compile",
    "profile": "profile",
    "gradient_clipping": "clip_grad_norm",
    "gradient_accumulation_steps": "grad_accum",
}


# Flags of --backend pstar, which chunks.py does not support.
PSTAR_ONLY = ("far_budget", "ownership", "communication", "policy", "near_memory", "disk_path", "prefetch", "near_states",
              "far_states", "state_bits", "overlap_update", "speculative_update", "speculative_log", "offload_activations",
              "activation_checkpointing", "compile", "profile", "config")


@dataclass
class Settings(ParallelSettings):
    without = {"recompute": "--activation-checkpointing", "check_sync": ""}    # ranks replicate no weights
    nproc: int = flag(2, "Processes on this machine.", shown="one per GPU, 2 without a GPU; with --backend own 1")
    backend: str = flag("pstar", "own (chunks.py: one process, fp32) or pstar.", choices=("own", "pstar"))
    near_budget: str = flag("auto", "Device memory for chunks: 64MiB, 25% of all model data, min (the least that works), or "
                            "auto: on a GPU 40% of what is free, else 25%, or min if a quarter is too little.")
    far_budget: str = flag("auto", "Host memory for chunks: 2GiB, 80% of all model data, or auto, no bound.")
    chunk_size: str = flag("auto", "Elements in a chunk, or auto: the size that wastes least within the near budget.")
    ownership: str = flag("whole", "Each rank owns whole chunks, or a shard of every chunk. node: a shard, and every node "
                          "has all chunks: for slow networks.", choices=("whole", "sharded", "node"))
    communication: str = flag("group", "Gather p whole chunks at once, or one at a time.", choices=("group", "chunk"))
    policy: str = flag("next_use", "Which chunk to evict when near is full.", choices=("next_use", "lru", "fifo"))
    near_memory: str = flag("auto", "Device memory for chunks and activations, as 12GiB; chunks get what activations leave.")
    disk_path: str | None = flag(None, "A folder on a local disk for chunks beyond --far-budget.", shown="none")
    prefetch: int = flag(2, "Moments of the traced step to look ahead; 0 copies each chunk when it is needed.")
    near_states: str = flag("margin", "Optimizer states on the device: as many as fit in addition to all parameters, or "
                            "fill it; then backward copies parameters too.", choices=("margin", "fill"))
    far_states: str = flag("auto", "Where optimizer states that are far are updated: by the host, or streamed through the "
                           "device; auto: the faster one, measured.", choices=("auto", "host", "stream"))
    state_bits: int = flag(32, "Bits of each of Adam's moments: 32, or 8: 6 bytes a parameter less, slightly different "
                           "losses.", choices=(8, 32))
    overlap_update: bool = flag(False, "Update parameters whose states are far while the next forward runs.")
    speculative_update: bool = flag(False, "Update parameters whose states are far already during backward; undo the update "
                                    "if the step is then clipped or skipped.")
    speculative_log: str = flag("auto", "Host memory for what these updates overwrite: 2GiB, 25% of all model data, or "
                                "auto, a quarter of a process's share.")
    offload_activations: bool = flag(False, "Keep activations in host memory until backward needs them.")
    activation_checkpointing: bool = flag(False, "Keep only the input of each block, recompute the rest in backward.")
    compile: str = flag("none", "Compile each block of the model with torch.compile, between the engine's hooks.",
                        choices=("none", "block"))
    profile: str | None = flag(None, "A file for a profile of the first steps, which `pstar trace` draws.", shown="none")
    config: str | None = flag(None, "A JSON file with pstar's configuration keys, in place of flags with the same meaning.",
                              shown="none")

    @property
    def reads_codes(self) -> bool:
        return self.backend == "pstar"

    def engine_config(self) -> dict[str, Any]:
        """These settings as pstar's configuration (with DeepSpeed's keys where DeepSpeed has them)."""
        same = {key: getattr(self, name) for key, name in SAME_AS.items()}
        if self.profile is not None:
            same["profile"] = str(Path(self.profile).absolute())
        if str(self.chunk_size) != "auto":
            same["default_chunk_size"] = int(self.chunk_size)
        params = {"lr": self.lr, "betas": [0.9, 0.95], "eps": 1e-8, "state_bits": self.state_bits}
        params |= getattr(self, "_optimizer_params", {})
        optimizer = {"type": getattr(self, "_optimizer_type", "AdamW"), "params": params}
        fp16 = getattr(self, "_loss_scaling", {}) | {"enabled": self.precision == "fp16"}
        return {"optimizer": optimizer, "bf16": {"enabled": self.precision == "bf16"}, "fp16": fp16} | same

    def read_config(self) -> None:
        """Takes over the settings of --config. A setting that is also given by a flag is an error that names both."""
        import pstar

        try:
            config = pstar.load_config(self.config)
        except pstar.PstarError as error:
            raise UserError(f"--config {error}") from error
        if "scheduler" in config.given:
            raise UserError(f"--config {self.config} has a 'scheduler', but this chapter has its own: take it out, and give "
                            "--lr, --warmup-steps and --max-steps")
        for note in config.notes:
            notice(f"--config: {note}")
        config = self._share_batch(config)
        given = config.given
        for key, name in SAME_AS.items():
            if key in given:
                self._take(name, key, getattr(config, key))
        if "optimizer" in given:
            self._optimizer_type = config.optimizer.type
            self._optimizer_params = {
                key: value for key, value in vars(config.optimizer.params).items()
                if key in ("betas", "eps", "use_hybrid_adam") and f"optimizer.params.{key}" in given
            }
            for name in ("lr", "weight_decay", "state_bits"):
                if f"optimizer.params.{name}" in given:
                    self._take(name, f"optimizer.params.{name}", getattr(config.optimizer.params, name))
        if "bf16" in given or "fp16" in given:
            self._take("precision", "bf16" if "bf16" in given else "fp16", config.precision)
            self._loss_scaling = {key: value for key, value in vars(config.fp16).items() if f"fp16.{key}" in given}

    def _share_batch(self, config: Any) -> Any:
        """DeepSpeed's train_batch_size is --batch-size, and decides --grad-accum by DeepSpeed's rule."""
        import pstar

        micro = config.train_micro_batch_size_per_gpu
        if config.train_batch_size is None and micro is None:
            return config
        try:
            config = config.for_ranks(int(os.environ.get("WORLD_SIZE", self.nproc)))
        except pstar.ConfigError as error:
            raise UserError(f"--config {self.config}: {error}; or another --nproc") from error
        self._take("batch_size", "train_batch_size", config.train_batch_size)
        self._micro_batch = micro
        return config

    def _take(self, name: str, key: str, value: Any) -> None:
        if any(word == dashed(name) or word.startswith(dashed(name) + "=") for word in self.argv):
            raise UserError(f"{dashed(name)} and '{key}' in --config {self.config} set the same thing: give one of them")
        as_text = isinstance(getattr(self, name), str) and not isinstance(value, list)
        setattr(self, name, str(value) if as_text else value)

    def validate(self) -> None:
        if self.backend == "own":
            self._validate_own()
        super().validate()
        micro = getattr(self, "_micro_batch", None)
        if micro is not None and self.batch_size != micro * self.grad_accum * self.nproc:  # one per GPU
            raise UserError(f"--config {self.config}: train_batch_size {self.batch_size} is not "
                            f"train_micro_batch_size_per_gpu {micro} x {self.grad_accum} micro-steps x --nproc "
                            f"{self.nproc}: give another --nproc")
        is_number = self.chunk_size.isdecimal() and len(self.chunk_size) < 19 and int(self.chunk_size) > 0
        if self.chunk_size != "auto" and not is_number:
            raise UserError(f"--chunk-size {self.chunk_size} is not a number of elements: give a whole number, or auto")
        if self.prefetch < 0:
            raise UserError(f"--prefetch {self.prefetch}: give 0 (off) or how many moments to look ahead")
        if self.profile is not None:
            self._check_profile(Path(self.profile))

    def _check_profile(self, file: Path) -> None:
        if "\0" not in str(file) and not file.absolute().parent.is_dir():
            raise UserError(f"--profile {self.profile}: there is no folder {file.parent}; make it first")
        check_output_file(file, "--profile")

    def prepare(self) -> None:
        if self.backend == "own" and not self.is_given("nproc"):
            self.nproc = 1
        if self.config is not None and self.backend == "pstar":
            self.read_config()

    def _validate_own(self) -> None:
        if self.nproc > 1:
            raise UserError(f"--nproc {self.nproc} needs --backend pstar: --backend own (chunks.py) is one process")
        if self.precision not in (None, "fp32"):
            raise UserError(f"--precision {self.precision} needs --backend pstar: --backend own (chunks.py) is for fp32")
        for name in PSTAR_ONLY:
            if (value := getattr(self, name)) != (usual := self.flags()[name].default):
                given = dashed(name) if isinstance(usual, bool) else f"{dashed(name)} {value}"
                raise UserError(f"{given} needs --backend pstar: --backend own (chunks.py) does not support it")
        self.precision = "fp32"

    def check_resolved(self) -> None:
        """Adds the check that needs the model's shapes: whether its largest module fits into the near budget.

        On a GPU `auto` stays: the engine knows what is free there. Elsewhere, and in chunks.py, it is a quarter, so that
        chunks move.
        """
        import pstar
        from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
        from pstar.memory.segments import grow_segments

        if self.device != "cpu":
            grow_segments()  # here, because launch() starts CUDA, which reads the setting once

        def plan() -> None:
            device = None if self.device == "auto" else self.device
            found = pstar.plan_engine(lambda: GPT2LMHeadModel(self.model), self.engine_config(), self.nproc, device)
            self.chunk_elems, self.near_bytes = found.layout.chunk_elems, found.near_budget  # for chunks.py

        try:
            if self.near_budget == "auto" and (self.device == "cpu" or self.backend == "own"):
                self.near_budget = "25%"
                try:
                    return plan()
                except pstar.BudgetError:  # a small model with a large vocabulary: the embedding alone is larger
                    self.near_budget = "min"
            plan()
        except pstar.PstarError as error:
            budgets = f"--near-budget {self.near_budget}, --far-budget {self.far_budget}: "
            if (key := str(error).partition(" ")[0]) in SAME_AS:
                raise UserError(f"{dashed(SAME_AS[key])}{str(error).removeprefix(key)}") from error
            raise UserError(f"{'' if str(error).startswith('--') else budgets}{error}") from error
