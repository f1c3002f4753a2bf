"""What adapting a model changed, and what it cost: the closing table, run.json and TensorBoard.

    report = Report(model, settings, ranks)         of the base: loss on each kind of text, three continuations
    ...                                             training
    run.finish(..., **report.ending(model, activations, optimizer, train, replica))

The loss on the new kind says what was learnt, the loss on the old kinds what was forgotten. Bytes are counted from tensors,
and printed with their formulas.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from adamw8bit import LEAST, state_bytes
from adapt import load_adapted
from kept_activations import again_bytes, kept_bytes, offloaded_bytes, recomputed_flops
from torch import nn

from gpt2_chinese.data.batches import Batches
from gpt2_chinese.evaluate.loss import evaluate_model
from gpt2_chinese.run.optim import autocast
from gpt2_chinese.run.run import continuations
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

if TYPE_CHECKING:
    from adapt_settings import Settings
    from data_parallel import SmallReplica

    from gpt2_chinese.distributed.ranks import Ranks
    from gpt2_chinese.model.recomputation import Activations

Rows = list[tuple[str, str]]


class Report:
    """Measures the base in its constructor, and the adapted model at the end. All ranks make the same calls.

    Args:
        model: the base, before a method is applied.
        settings: resolved. If the run resumes a checkpoint, `before` is what that run measured.
        ranks: share the evaluations.
    """

    def __init__(self, model: nn.Module, settings: Settings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.before = settings.before
        if self.before is None:
            self.before = {"losses": {}, "texts": {}} if settings.base is None else self._measure(model)

    def facts(self) -> dict[str, Any]:
        """For a checkpoint: what the run adapts, and what was measured before."""
        return {"facts": self.settings.facts(), "before": self.before}

    def ending(
        self, model: nn.Module, activations: Activations, optimizer: torch.optim.Optimizer, train: Batches,
        replica: SmallReplica,
    ) -> dict[str, Any]:  # fmt: skip
        """Arguments of Run.finish: the closing table, content for run.json, the continuations of the base."""
        settings = self.settings
        after = {} if settings.base is None else self._losses(model)
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        sizes = {"base_parameters": settings.model.num_parameters(), **count_bytes(model, optimizer),
                 "state_bytes_formula": state_bytes(trained, settings.optim)}  # fmt: skip
        count = count_activations(model, activations, train, settings)
        about = {
            "base": settings.base_facts["path"], "method": settings.method, "bits": settings.bits, "kind": settings.kind,
            **{f"loss_before_{kind}": loss for kind, loss in self.before["losses"].items()},
            **{f"loss_after_{kind}": loss for kind, loss in after.items()}, **sizes, **count,
        }  # fmt: skip
        rows = [*self._losses_rows(after), *bytes_rows(sizes, settings.optim), *activation_rows(count), *replica.rows()]
        return {"table": rows, "about": about, "load": load_adapted, "before": self.before["texts"]}

    def _measure(self, model: nn.Module) -> dict[str, Any]:
        texts = {}
        if self.ranks.is_main:
            model.eval()
            vocabulary = Vocabulary.load(self.settings.vocab, self.settings.vocab_profile)
            texts = continuations(model, vocabulary, self.settings.seed)
            model.train()
        return {"losses": self._losses(model), "texts": texts}

    def _losses(self, model: nn.Module) -> dict[str, float]:
        """The validation loss on each kind of text, nats per token."""
        s, ranks = self.settings, self.ranks
        batches = partial(Batches, seq_len=s.seq_len, batch_size=s.batch_size, seed=s.seed, rank=ranks.rank,
                          num_ranks=ranks.num_ranks, grad_accum=s.grad_accum, device=ranks.device)  # fmt: skip
        return {kind: evaluate_model(model, batches(tokens), ranks, s.precision)["valid_loss"]
                for kind, tokens in s.kind_tokens.items()}  # fmt: skip

    def _losses_rows(self, after: dict[str, float]) -> Rows:
        """The new kind first. If the loss on an old kind rises, the model has forgotten some of it."""
        new = self.settings.kind
        rows = []
        for kind in sorted(after, key=lambda kind: kind != new):
            before, now = self.before["losses"][kind], after[kind]
            what = "learnt" if now <= before else "forgotten"
            old = "new kind" if kind == new else "old kind"
            rows.append((f"loss on {kind}", f"{before:.4f} -> {now:.4f}, {now - before:+.4f} {what} ({old})"))
        return rows


# ---- bytes


def count_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of a model in training, counted from its tensors after a step.

    Returns:
        num_parameters (a method's own included, codes are none) and trained_parameters; weight_bytes, with the codes and
        scales of quantised layers; gradient_bytes; state_bytes, the two moments of AdamW (in 8 bits codes and
        scales) without its counters of steps.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    states = [value for p in trained for key, value in optimizer.state.get(p, {}).items() if key.startswith("exp_avg")]
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in trained),
        "weight_bytes": sum(t.nbytes for t in [*model.parameters(), *model.buffers()]),
        "gradient_bytes": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "state_bytes": sum(value.nbytes for value in states),
    }


def bytes_rows(sizes: dict[str, int], optim: str = "adamw") -> Rows:
    """The rows of the table for `count_bytes`, base_parameters (how many the base has) and state_bytes_formula."""
    each = "8" if optim == "adamw" else f"2 and scales; 8 in tensors below {LEAST:,} numbers;"
    n, all_of_them = sizes["trained_parameters"], sizes["num_parameters"]
    own, full = sum(sizes[f"{name}_bytes"] for name in ("weight", "gradient", "state")), 16 * sizes["base_parameters"]
    return [
        ("trained", f"{n:,} of {all_of_them:,} parameters, {n / all_of_them:.2%}"),
        ("weights", f"{sizes['weight_bytes']:,} bytes"),
        ("gradients", f"{sizes['gradient_bytes']:,} bytes (4 a trained parameter: {4 * n:,})"),
        ("moments", f"{sizes['state_bytes']:,} bytes ({each} a trained parameter: {sizes['state_bytes_formula']:,})"),
        ("together", f"{own:,} bytes, {own / full:.0%} of training every parameter of the base in fp32 (16 each)"),
    ]


def count_activations(
    model: nn.Module, activations: Activations, train: Batches, settings: Settings
) -> dict[str, int]:
    """One more forward and backward of a micro-batch, under autograd's hooks and torch's FLOP counter; no step follows.

    Returns:
        counted bytes and FLOPs, and the same by formula. The formulas hold for fp32 without dropout, on the CPU, with every
        parameter trained; a method adds what its own layers keep, and a frozen layer does not keep its input.
    """
    inputs, targets = next(iter(train.micro_batches(1)))
    with activations.counting():
        with autocast(train.device, settings.precision):
            loss = model(inputs, targets)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    shape, tiled = (settings.model, *inputs.shape, activations.plan), settings.loss_tiles != "none"
    host = offloaded_bytes(*shape) if settings.offload_activations else 0
    return {
        "activation_bytes": activations.kept_bytes, "activation_bytes_formula": kept_bytes(*shape, tiled),
        "again_bytes": activations.again_bytes, "again_bytes_formula": again_bytes(*shape),
        "offloaded_bytes": activations.offloaded_bytes, "offloaded_bytes_formula": host,
        "recomputed_flops": activations.flops, "recomputed_flops_formula": recomputed_flops(*shape),
    }  # fmt: skip


def activation_rows(count: dict[str, int]) -> Rows:
    """The rows of the table for `count_activations`."""
    rows = [("activations", f"{count['activation_bytes']:,} bytes kept for backward "
             f"(formula, all parameters trained: {count['activation_bytes_formula']:,})")]  # fmt: skip
    for key, name, unit in (("again_bytes", "and meanwhile", "bytes of the largest recomputed segment"),
                            ("offloaded_bytes", "in host memory", "bytes of them"),
                            ("recomputed_flops", "recomputed", "FLOPs a micro-batch")):  # fmt: skip
        if count[key] or count[f"{key}_formula"]:
            rows.append((name, f"{count[key]:,} {unit} (formula: {count[f'{key}_formula']:,})"))
    return rows
