"""initialize_engine: makes an engine and its optimizer from a model and a configuration."""

import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pstar.checkpoint.export import export_weights, import_weights
from pstar.checkpoint.sharded import Writer, copy_sharded, load_sharded, save_sharded
from pstar.checkpoint.state import check_names, gather_state, load_state, warn_of_new_parameters, write
from pstar.chunks import Hooks, Offload, assemble
from pstar.chunks.gradients import KINDS
from pstar.chunks.interrupts import check, wait_for_operations, whole
from pstar.chunks.modes import outside_modes
from pstar.chunks.peak_watch import PeakWatch
from pstar.chunks.stages import Stages
from pstar.comm.collectives import Collectives, check_initialized, launchers_local_rank
from pstar.comm.same_start import check_same
from pstar.config import Config, load_config
from pstar.errors import BudgetError, ConfigError, StateError
from pstar.kernels import prepare
from pstar.layout.budget import Costs, default_near_bytes, frozen_bytes, model_data_bytes
from pstar.layout.layout import CODE_BLOCK, Layout
from pstar.memory.accelerator import free_bytes, is_accelerator, near_device
from pstar.memory.block_store import BlockStore
from pstar.memory.disk import DiskTier
from pstar.memory.links import Links
from pstar.memory.pages import free_host_bytes, is_out_of_host_memory
from pstar.memory.pinned import Registration, far_page_bytes, registration_for
from pstar.memory.segments import Reserved, grow_segments
from pstar.memory.tier import DISK, FAR, NEAR, SAVE_HOST_MEMORY, Ledger, Tier, format_bytes, keep_freed_memory
from pstar.modules.compiled_blocks import compile_blocks, find_blocks
from pstar.modules.host_embedding import compute_embeddings_far
from pstar.modules.inputs import cast_inputs, shape_of
from pstar.modules.lazy_init import Recipe, build, storage_key, swap
from pstar.modules.module_calls import refuse_copy, replace_calls
from pstar.modules.not_finite import FirstNotFinite
from pstar.modules.scope import mode_of
from pstar.modules.sixteen_bits import explain_mixed_dtypes, keep_statistics_wide
from pstar.numerics.loss_scaler import scaler_for
from pstar.numerics.precision import PARAM
from pstar.optim.chunked_adam import ChunkedAdam
from pstar.optim.lr_schedule import follow_schedule
from pstar.optim.unmanaged import OutsideParams
from pstar.planner.plan import Plan, check_compiler, packing_of
from pstar.planner.speeds import NO_CHOICE, choose_far_states
from pstar.profile.recording import Profile
from pstar.schedule.schedule import Schedule

HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay")
"""The keys of optimizer.params that every parameter group has."""


class Engine(torch.nn.Module):
    """A module whose model data are in chunks. Called like the module; made by initialize_engine.

    Attributes:
        module: the model. Its parameters are placeholders without memory while their chunk is not in near.
        layout, ledger, near, far: places in chunks, moved bytes, and the tiers (see memory_table).
        reserved: the bytes that torch's allocator holds near, on a GPU.
        far_states: host or stream; if the configuration says auto, the chosen one.
        lr_scheduler: the configuration's schedule, stepped after every update that is not skipped; None without one.
    """

    def __init__(self, module: torch.nn.Module, plan: Plan, collectives: Collectives, device: torch.device,
                 registration: Registration | None = None):
        super().__init__()
        prepare(device)    # a missing compiler is named here, not in the first backward
        self.module, self._plan = module, plan
        config, params = plan.config, dict(module.named_parameters())
        self.near = Tier(NEAR, device, plan.near_budget)
        self.far = Tier(FAR, torch.device("cpu"), plan.far_budget, registration)
        self.reserved = Reserved(device, plan.near_memory)
        self.disk = None
        if config.disk_path is not None:
            self.disk = DiskTier(Path(config.disk_path), plan.disk_budget, collectives.rank)
        profile, path = _start_profile(plan, collectives, device)
        self._watch = None
        if plan.near_memory is not None or profile is not None:
            self._watch = PeakWatch(self.near, self.far, collectives, profile)
        links = Links(config.prefetch > 0, config.simulated_link or None, device, config.speculative_update)
        self._far_choice = choose_far_states(plan, links, collectives, device)
        in_chunks = {name: param for name, param in params.items() if mode_of(param) is None}
        self._chunks = assemble(plan, in_chunks, self.near, self.far, self.disk, links, collectives, self._watch, profile,
                                self.far_states == "stream")
        self._outside = OutsideParams({name: param for name, param in params.items() if name not in in_chunks},
                                      plan.precision, plan.accumulates, collectives, device)
        offload = Offload(self.far, self.ledger, device, plan.activation_room) if config.offload_activations else None
        self._hooks = Hooks(module, self._chunks, offload, plan.stays_near, find_blocks(module, config.compile))
        self._stages = Stages(config.gradient_accumulation_steps, self._chunks, self._hooks, profile, path)
        self._optimizer: ChunkedAdam | None = None
        self._first_not_finite = FirstNotFinite(module)

    def _take_over(self, param_groups: list[dict], recipe: Recipe | None) -> ChunkedAdam:
        """Makes the optimizer, fills the chunks with the initial weights, and installs the hooks."""
        settings = self.config.optimizer
        defaults = {key: value for key, value in vars(settings.params).items() if key in HYPER_PARAMETERS}
        self._optimizer = ChunkedAdam(
            param_groups, dict(self.module.named_parameters()), self._chunks, self._outside, self._stages,
            self._plan.precision, scaler_for(self.config.fp16), settings.type == "AdamW", self.config.gradient_clipping,
            defaults, self.disk is not None, self.config.overlap_update)
        if recipe is None:
            for name, param in self._chunks.params.items():
                write(self._optimizer, PARAM, name, param.data)
        else:
            self._materialise(recipe)
        self._outside.adopt()
        self._chunks.parameters.release_all()
        if self._plan.precision.name != "fp32":
            keep_statistics_wide(self.module)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(self.device)
        self._chunks.collectives.copy_from_rank_0(self.module.buffers())
        self._hooks.install()
        self._optimizer.watch_gradients()
        compile_blocks(self._hooks.blocks)
        replace_calls(self, set(map(id, self._chunks.params.values())))
        self.ledger.reset()
        self.lr_scheduler = follow_schedule(self._optimizer, self.config)
        self._optimizer.register_step_post_hook(check)    # the schedule has followed
        return self._optimizer

    def _materialise(self, recipe: Recipe) -> None:
        """Lazy start: makes each parameter, writes this rank's part into its chunk, and frees the parameter."""
        wanted: dict[int, list[tuple[str, torch.Tensor]]] = {}
        kept = [*self._outside.params.values(), *self.module.buffers()]
        for name, tensor in [*self._chunks.params.items(), *(("", tensor) for tensor in kept)]:
            if tensor.device.type == "meta":
                wanted.setdefault(storage_key(tensor), []).append((name, tensor))

        def take(tensors: list[tuple[str, torch.Tensor]], memory: torch.Tensor) -> bool:
            for name, tensor in tensors:
                made = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                if name:
                    write(self._optimizer, PARAM, name, made)
                    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
                if isinstance(tensor, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
                made.__dict__.update(tensor.__dict__)
                swap(tensor, made)    # keeps the object: the model may refer to it elsewhere
            return all(name for name, _ in tensors)

        recipe.replay(wanted, take)
        for name, param in self._chunks.params.items():    # real parameters, which model_func did not make itself
            if param.numel() and all(name != other for tensors in wanted.values() for other, _ in tensors):
                write(self._optimizer, PARAM, name, param.data)

    @whole
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. With gradients and in train mode it is part of a training step, else not in the trace."""
        wait_for_operations(self._chunks.collectives.num_ranks)
        training = torch.is_grad_enabled() and self.training
        if self._plan.stays_near:
            self._chunks.lend_all()
        if training:
            self._hooks.check_frozen()
            self._outside.check_frozen()
            self._begin_forward(args, kwargs)
        args, kwargs = cast_inputs(args, kwargs, self._plan.param_dtype)
        watched = self._first_not_finite.watching(self._optimizer.scaler.skipped_in_a_row if training else 0)
        evaluates = nullcontext() if training else self.schedule.paused()
        with self._explained(), evaluates, self._hooks.lender.forward(training), watched:
            return self._stages.watch_backward(self.module(*args, **kwargs))

    @torch.compiler.disable    # torch.compile(engine) is for the module's code
    def _begin_forward(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begins a micro-step, and with the first one a step."""
        self._stages.forget_failed_backward()
        shapes, schedule = self._signature(args, kwargs), self.schedule
        if not schedule.in_step:
            schedule.begin_step(shapes)
            self.ledger.begin_step()
            self._stages.begin_step(schedule.num_steps)
            if schedule.recording:
                warn_of_new_parameters(self.module, self._optimizer)
        self._chunks.begin_forward(shapes)
        schedule.touch(("inputs", shapes))
        self._stages.begin("forward")
        if self._watch is not None and schedule.recording:
            self._watch.start()

    def _signature(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The key of the step's trace: the shapes of its inputs, with several ranks the shapes of all of them.

        Ranks whose batches differ in length must record and evict the same way, or they would gather different chunks. So
        they exchange their shapes; if room does not depend on lengths, shapes are left out (None).
        """
        collectives = self._chunks.collectives
        if collectives.num_ranks > 1 and self._plan.near_memory is None:
            return None
        shapes = tuple(shape_of(value) for value in (*args, *kwargs.items()))
        if collectives.num_ranks == 1:
            return shapes
        with outside_modes():
            return tuple(collectives.from_all(shapes))

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    @contextmanager
    @whole
    def _explained(self) -> Iterator[None]:
        """Ends the step after an error inside; turns torch's out-of-memory error into a BudgetError that says what to do."""
        try:
            yield
            check()
        except torch.OutOfMemoryError as error:
            self._stop_watching()
            self._hooks.abandon()
            raise BudgetError(f"{self.device}: out of memory with {format_bytes(self.near.used_bytes)} of chunks in near: "
                              "give a smaller near_budget or near_memory, a smaller micro-batch, activation checkpointing "
                              f"or offload_activations ({str(error).splitlines()[0]})") from error
        except BaseException as error:
            self._stop_watching()
            self._hooks.abandon()
            if isinstance(error, RuntimeError | MemoryError) and is_out_of_host_memory(error):
                raise BudgetError(f"host memory is full, with {format_bytes(self.far.used_bytes)} of chunks in far: "
                                  f"{SAVE_HOST_MEMORY}, a smaller micro-batch or activation checkpointing "
                                  f"({str(error).splitlines()[0]})") from error
            if why := explain_mixed_dtypes(self.module, self._plan.param_dtype, error):
                raise ConfigError(why) from error
            raise

    @whole
    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of loss / gradient_accumulation_steps; after the last micro-step they are averaged over the ranks.

        In fp16 they are multiplied by the loss scale, until the optimizer divides them by it. In fp32 and bf16 a program may
        call loss.backward() instead, and itself divide the loss by the number of micro-steps, as in plain PyTorch.
        """
        if not self.schedule.in_step:
            raise StateError("model.backward(loss) without a training forward before it: call model(...) in train mode and "
                             "outside of torch.no_grad()")
        steps = self.config.gradient_accumulation_steps
        loss = loss / steps if steps > 1 else loss
        scale = self._optimizer.loss_scale
        with self._explained(), self._stages.backward():
            (loss.float() * scale if scale != 1 else loss).backward()

    # ---------------------------------------------------------------- state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_copy(protocol)

    def gather_state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(weights, moments) by plain names on rank 0, empty dicts elsewhere; see state.py. Every rank calls it."""
        return gather_state(self._checked_optimizer())

    def load_state(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor] | None = None) -> None:
        """Loads gathered tensors, with any number of ranks and any chunk size."""
        load_state(self._checked_optimizer(), weights, moments)
        self._resume_schedule()

    def save_checkpoint(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Writes the folder `path`, complete or not at all; every rank calls it and writes its part (sharded.py).

        extra: JSON content that load_checkpoint returns: scheduler.state_dict(). Raises CheckpointError on all ranks.
        """
        save_sharded(self._checked_optimizer(), Path(path), extra or {}, dict(self._persistent_buffers()))

    def copy_checkpoint(self, extra: dict[str, Any] | None = None) -> Writer:
        """Copies the state into host memory, and returns a function that writes the copy; see sharded.py, copy_sharded."""
        return copy_sharded(self._checked_optimizer(), extra or {}, dict(self._persistent_buffers()))

    def load_checkpoint(self, path: str | Path, verify: bool = True) -> dict[str, Any]:
        """Resumes from a checkpoint of any ranks, chunk size, ownership, precision; returns `extra`. Raises CheckpointError.

        verify: compare the files with their checksums first."""
        extra = load_sharded(self._checked_optimizer(), Path(path), dict(self._persistent_buffers()), verify)
        self._resume_schedule()
        return extra

    def _checked_optimizer(self) -> ChunkedAdam:
        """The optimizer, to read or write values by name. Raises StateError if the names are no longer the module's."""
        check_names(self.module, self._optimizer)
        return self._optimizer

    def _resume_schedule(self) -> None:
        if self.lr_scheduler is not None:    # the loaded moments know how many updates there were
            self.lr_scheduler.go_to(max(self._optimizer.steps.values(), default=0))

    def _persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that are in a state_dict of the module: running statistics, for example."""
        for name, child in self.module.named_modules():
            for key, buffer in child.named_buffers(name, recurse=False):
                if key.rpartition(".")[2] not in child._non_persistent_buffers_set:
                    yield key, buffer

    def export_weights(self, path: str | Path) -> None:
        """Writes the fp32 weights as one safetensors file, a group of chunks at a time; every rank calls it."""
        export_weights(self._checked_optimizer(), Path(path))

    def import_weights(self, path: str | Path) -> None:
        """Loads the weights of a safetensors file; every rank calls it. The moments stay. Raises CheckpointError."""
        import_weights(self._checked_optimizer(), Path(path))

    # ---------------------------------------------------------------- reports

    @property
    def config(self) -> Config:
        return self._plan.config

    @property
    def device(self) -> torch.device:
        return self.near.device

    @property
    def layout(self) -> Layout:
        return self._plan.layout

    @property
    def costs(self) -> Costs:
        """Bytes a parameter of each kind of model data."""
        return self._plan.costs

    @property
    def ledger(self) -> Ledger:
        return self._store.ledger

    @property
    def far_states(self) -> str:
        """Where groups with states in far are updated: host or stream."""
        return self._far_choice[0]

    @property
    def schedule(self) -> Schedule:
        return self._chunks.schedule

    @property
    def _store(self) -> BlockStore:
        return self._chunks.store

    @property
    def _links(self) -> Links:
        return self._store.links

    @property
    def model_data_bytes(self) -> int:
        """Bytes of model data on this rank now, each block counted once, padding included."""
        return self._store.model_bytes()

    def memory_plan(self) -> list[tuple[str, str]]:
        """(name, value) rows of text: the chunks and the budgets, as they are before the first step."""
        layout, ranks, budgets = self.layout, self._chunks.collectives, []
        for tier in (self.near, self.far):
            bound = "no bound" if tier.budget_bytes is None else format_bytes(tier.budget_bytes)
            budgets.append(f"{tier.name} {bound}")
        whole, frozen = model_data_bytes(layout, self.costs), frozen_bytes(layout, self.costs)
        scales = f", and {self.costs.scales} for each block of 8-bit states" if self.costs.scales else ""
        each = f"{self.costs.param} bytes a parameter"
        if any(group.coded for group in layout.frozen):
            each = (f"matrices in {self.costs.frozen_bits}-bit codes except near ({self.costs.block_bytes} bytes for "
                    f"{CODE_BLOCK} weights), all else {each}")
        share = [("frozen", f"{format_bytes(frozen)} of it, {each}, without gradients and optimizer states, in "
                            f"{len(layout.frozen)} of the groups")] if frozen else []
        kept, held = len(self._outside.params), format_bytes(self._outside.num_bytes)
        where = "the host" if self.far_states == "host" else "near, streamed"
        why = self._far_choice[1]
        states = [("far states", f"updated by {where} ({why})")] if why not in NO_CHOICE else []
        outside = [("outside chunks", f"{kept} parameters, {held} on each process")] if kept else []
        return [
            ("chunks", f"{layout.chunk_elems:,} elements each (larger parameters apart), in {len(layout.groups)} groups of "
                       f"{layout.num_ranks} {'' if self.config.ownership == 'whole' else 'pieces of one '}(one a rank"
                       f"{', gathered one by one' if self.config.communication == 'chunk' else ''}), "
                       f"{layout.utilisation:.1%} used"),
            ("model data", f"{format_bytes(whole)} in all, {self.costs.total} bytes a "
                           f"{'trained ' if frozen else ''}parameter{scales}"),
            *share,
            ("budgets", f"{', '.join(budgets)} ({self.near.device.type}) on each of {ranks.num_ranks} process(es)"
                        f"{ranks.where}; eviction by {self.schedule.policy}"),
            *states,
            *outside,
        ]

    def memory_table(self) -> list[tuple[str, str]]:
        """(name, value) rows of text: this rank's peaks of the tiers, and the bytes that the last step moved."""
        num_near = sum(tier == NEAR for tier in self._chunks.tiers.states_tier)
        rows = self.memory_plan()
        for tier in filter(None, (self.near, self.far, self.disk)):
            rows.append((tier.name, f"{format_bytes(tier.used_bytes)} now, {format_bytes(tier.peak_bytes)} at most"))
        if (log := self._chunks.log) is not None:
            early, used, budget = self._optimizer.speculation, log.tier.peak_bytes, log.tier.budget_bytes
            rows.append(("update log", f"{format_bytes(used)} at most of {format_bytes(budget)}: {early.begun} updates "
                                       f"began during backward, {early.undone} were undone"))
        rows += self.reserved.rows()
        rows.append(("Adam", f"{num_near} groups updated near, {len(self.layout.trained) - num_near} far"))
        rows += [(kind, f"{format_bytes(self.ledger.step_bytes[kind])} a step") for kind in self.ledger.kinds
                 if self.disk is not None or DISK not in kind]
        return rows

    def step_scalars(self) -> dict[str, float]:
        """This rank's numbers of the last step for a metrics log: bytes, and seconds in which it only waited, for other
        ranks (wait_s) and for copies between tiers (copy_wait_s).

        In fp16 also the loss scale of the NEXT step, and the number of steps skipped so far. With speculative_update also
        the updates that began during backward so far, and those of them that were undone. On a GPU also the most bytes that
        torch's allocator has reserved (see pstar.memory.segments).
        """
        moved = {f"{kind.replace(' ', '_')}_bytes": self.ledger.step_bytes[kind] for kind in self.ledger.kinds}
        scaling = {"loss_scale": self._optimizer.loss_scale, "skipped_steps": self._optimizer.skipped_steps}
        scaling = scaling if self._plan.precision.name == "fp16" else {}
        if (early := self._optimizer.speculation) is not None:
            scaling = scaling | {"early_updates": early.begun, "undone_updates": early.undone}
        reserved = self.reserved.look()
        scaling |= {} if reserved is None else {"near_reserved_bytes": reserved}
        return {"near_bytes": self.near.used_bytes, "near_peak_bytes": self.near.peak_bytes,
                "far_bytes": self.far.used_bytes, "disk_bytes": self.disk.used_bytes if self.disk else 0,
                "wait_s": self.ledger.step_waited_s, "copy_wait_s": self.ledger.step_copy_waited_s} | moved | scaling


def _start_profile(plan: Plan, collectives: Collectives, device: torch.device) -> tuple[Profile | None, Path | None]:
    """(the configured profile, this rank's file); (None, None) if the configuration has none."""
    if plan.config.profile is None:
        return None, None
    path, rank = Path(plan.config.profile), collectives.rank
    budgets = {NEAR: plan.near_memory or plan.near_budget, FAR: plan.far_budget}
    profile = Profile(rank, {"budgets": budgets, "device": str(device), "num_ranks": collectives.num_ranks,
                             "model_data_bytes": model_data_bytes(plan.layout, plan.costs),
                             "policy": plan.config.eviction_policy,
                             "budget_includes_non_model": plan.near_memory is not None})
    return profile, path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _check_host_memory(plan: Plan, collectives: Collectives) -> None:
    """Raises BudgetError on all ranks if the ranks of a machine need more host memory for far than it has left. The system
    would end one of them without a word, and only when its pages are written."""
    mine = socket.gethostname(), plan.least_far + (plan.log_budget or 0), free_host_bytes()
    what = "far" if plan.log_budget is None else "far and the log of speculative_update"
    every = collectives.from_all(mine) if collectives.num_ranks > 1 else [mine]
    for host in sorted({name for name, _, _ in every}):
        needs = [need for name, need, _ in every if name == host]
        free = min((free for name, _, free in every if name == host and free is not None), default=None)
        if free is not None and sum(needs) > free:
            raise BudgetError(f"host memory: {len(needs)} process(es) on {host} need {format_bytes(sum(needs))} for {what}, "
                              f"{format_bytes(free)} are free: {SAVE_HOST_MEMORY}")


def initialize_engine(model_func: Callable[[], torch.nn.Module], local_rank: int | None = None,
                      config: "dict | str | Path | Config | None" = None, *,
                      param_groups: Callable[[torch.nn.Module], list[dict]] | None = None,
                      group: Any = None, device: "torch.device | str | None" = None) -> tuple[Engine, ChunkedAdam]:
    """Builds the model, moves it into chunks, and returns (model, optimizer).

    The loop: optimizer.zero_grad(); loss = model(batch); model.backward(loss); optimizer.step().

    Args:
        model_func: makes the model; every rank must make the same one, but may draw other initial values.
        local_rank: number of this process on its machine, and of its GPU; default: the launcher's LOCAL_RANK, else 0.
        config: a dict, a JSON file, a Config, or None for all defaults.
        param_groups: from the module to parameter groups as torch.optim takes them; default: one group of all.
        group: process group; default: the default group if torch.distributed is initialised, else one process.
        device: near's device; default: this process's GPU if there is one, else host memory.

    Raises ConfigError if the configuration cannot be run, BudgetError if a budget cannot hold what must be in it at once.
    """
    config = load_config(config)
    if isinstance(model_func, torch.nn.Module) or not callable(model_func):
        raise ConfigError(f"model_func is a {type(model_func).__name__}: give a function that makes the model, "
                          "lambda: model where it is made already")
    check_initialized(group)
    if device is None:
        device = near_device(launchers_local_rank() if local_rank is None else local_rank)
    device = torch.device(device)
    check_compiler(config.compile, device)
    if device.type == "cpu":
        keep_freed_memory(False)    # while it starts
    else:
        grow_segments()
    module, recipe = build(model_func)
    if config.use_cpu_embedding and not compute_embeddings_far(module, device):
        warnings.warn("use_cpu_embedding: every embedding of this model shares its table with another module (a tied head), "
                      "which needs it near: all are computed near", stacklevel=2)
    collectives = Collectives(group, Ledger(), replicate=config.ownership == "node")
    config = config.for_ranks(collectives.num_ranks)
    check_same(module, config, collectives)
    if collectives.rank == 0:
        for note in config.notes:
            print(f"pstar: {note}", file=sys.stderr)
    default_near = default_near_bytes(collectives.from_all(free_bytes(device))) if is_accelerator(device) else None
    plan = Plan(module, config, collectives.num_pieces, default_near, packing_of(device), far_page_bytes(device))
    if plan.costs.in_codes and not any(group.coded for group in plan.layout.frozen):
        warnings.warn(f"frozen_bits is {config.frozen_bits}, but no matrix of this model is frozen: set requires_grad to "
                      "False in model_func, before the engine starts", stacklevel=2)
    _check_host_memory(plan, collectives)
    engine = Engine(module, plan, collectives, device, registration_for(device))
    groups = param_groups(module) if param_groups else [{"params": list(module.parameters())}]
    optimizer = engine._take_over(groups, recipe)
    if device.type == "cpu" and not config.offload_activations and keep_freed_memory():    # else memory matters more
        for tier in (engine.near, engine.far) if engine.disk is None else (engine.near,):    # direct I/O needs whole pages
            tier.use_heap(KINDS)
    return engine, optimizer
