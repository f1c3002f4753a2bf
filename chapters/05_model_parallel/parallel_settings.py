"""The flags that chapter 05 adds, and the checks of divisibility."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2_chinese.errors import UserError
from gpt2_chinese.files import check_output_file
from gpt2_chinese.settings import ParallelSettings, flag


@dataclass
class Settings(ParallelSettings):
    without = {"recompute": "--activation-checkpointing"}
    tp: int = flag(1, "Ranks that share each layer (tensor parallel).")
    pp: int | None = flag(None, "Ranks over which layers are split (pipeline); the rest of --nproc is data parallel.",
                          shown="all that --tp leaves of --nproc")  # fmt: skip
    schedule: str = flag("1f1b", "Order of the pipeline's micro-batches, --grad-accum of them: see schedules.py.",
                         ("naive", "gpipe", "1f1b", "interleaved"))  # fmt: skip
    virtual_stages: int | None = flag(None, "Stages of a rank, with interleaved.", shown="2 with interleaved, else 1")
    sequence_parallel: bool = flag(False, "Split norms and dropout by positions; needs --tp above 1.")
    activation_checkpointing: bool = flag(False, "Keep each layer's input, recompute the rest in backward.")
    backend: str = flag("own", "own (tensor.py, pipeline.py) or torch (DTensor, torch.distributed.pipelining).",
                        ("own", "torch"))  # fmt: skip
    timeline: str | None = flag(None, "Chrome trace of a few steps of the pipeline (and a PNG next to it).", shown="none")

    @property
    def num_replicas(self) -> int:
        """Data parallel ranks: what --tp and --pp leave."""
        return self.nproc // (self.tp * self.pp)

    def can_share(self, nproc: int) -> bool:
        """True when --tp and --pp (by default all the rest) divide so many processes, the layers and the batch."""
        pp = self.pp or max(1, nproc // max(1, self.tp))
        replicas, rest = divmod(nproc, max(1, self.tp * pp))
        stages = pp * (self.virtual_stages or (2 if self.schedule == "interleaved" else 1))
        even = rest == 0 == self.model.n_layer % stages
        return replicas > 0 and even and self.batch_size % (replicas * max(1, self.grad_accum)) == 0

    def validate(self) -> None:
        for name in ("tp", "pp", "virtual_stages"):
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.pp is None:
            _divides("--tp", self.tp, "--nproc", self.nproc)
            self.pp = max(1, self.nproc // self.tp)
        _divides(f"--tp {self.tp} times --pp {self.pp} =", self.tp * self.pp, "--nproc", self.nproc)
        if self.virtual_stages is None:
            self.virtual_stages = 2 if self.schedule == "interleaved" else 1
        super().validate()
        if self.loss_tiles != "none" and self.tp > 1:
            raise UserError(f"--loss-tiles {self.loss_tiles} needs --tp 1: the ranks of --tp {self.tp} divide the logits")
        if self.loss_tiles != "none" and self.backend == "torch" and self.pp > 1:
            raise UserError(f"--loss-tiles {self.loss_tiles} needs --backend own: torch's pipeline makes whole logits")
        if self.schedule == "interleaved":
            _divides("--pp", self.pp, "interleaved: --grad-accum", self.grad_accum)
        elif self.virtual_stages > 1:
            raise UserError(f"--virtual-stages {self.virtual_stages} needs --schedule interleaved, not {self.schedule}")
        if self.schedule == "interleaved" and self.pp == 1:
            raise UserError("--schedule interleaved with --pp 1: a pipeline of one rank has nothing to interleave")
        model = self.model
        for what, number in (("n_head", model.n_head), ("the MLP's width", model.inner), ("--vocab", self.vocab_size)):
            _divides("--tp", self.tp, what, number)
        stages = self.pp * self.virtual_stages
        which = "--pp" if self.virtual_stages == 1 else f"--pp {self.pp} times --virtual-stages {self.virtual_stages} ="
        _divides(which, stages, "n_layer", self.model.n_layer)
        if self.sequence_parallel and self.tp == 1:
            raise UserError("--sequence-parallel with --tp 1: the positions are shared by the ranks of --tp, which is one")
        if self.sequence_parallel:
            _divides("--tp", self.tp, "--sequence-parallel: --seq-len", self.seq_len)
        if self.backend == "torch" and self.timeline:
            raise UserError("--timeline needs --backend own: torch's schedules do not report when they compute")
        if self.timeline is not None:
            check_output_file(self.timeline, "--timeline", in_new_folder=True)
        if self.backend == "torch" and self.schedule == "naive" and self.pp > 1:
            raise UserError("--schedule naive needs --backend own: torch.distributed.pipelining has the other three")

    def about(self) -> list[tuple[str, str]]:
        virtual = f", {self.virtual_stages} stages a rank" if self.virtual_stages > 1 else ""
        sequence = " with sequence parallel" if self.sequence_parallel else ""
        return [("split", f"tensor {self.tp}{sequence} x pipeline {self.pp} ({self.schedule}{virtual}) x data "
                          f"{self.num_replicas}, by {self.backend}")]  # fmt: skip


def _divides(which: str, divisor: int, what: str, number: int) -> None:
    """Raises UserError unless `divisor` divides `number`."""
    if number % divisor:
        raise UserError(f"{what} {number} is not divisible by {which} {divisor}")
