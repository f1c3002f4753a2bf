"""The Hugging Face Trainer as peer: the same weights, batches, schedule and decay give its curve.

Tolerance: the Trainer updates with torch.optim.AdamW (fused), whose roundings differ from the engine's in the last bits of
fp32. Losses stay within 1e-5 relative over these steps, as against torch.optim.AdamW alone (test_from_pretrained.py), the
norms of gradients within 1e-4, weights within 1e-5 absolute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pstar
from tests import toy
from tests.pstar.test_from_pretrained import KINDS, batch, from_folder, without_dropout

STEPS, WARMUP, LR, DECAY, CLIP = 6, 2, 3e-3, 0.1, 0.5
# For a classifier the Trainer (transformers 5.23) adds up the gradients of micro-batches; the engine averages them.
ACCUMULATION = {"bert": 1, "gpt2": 2, "llama": 2}


def micro_batch(kind: str, number: int) -> dict[str, torch.Tensor]:
    """Of a text the first label is -100: nothing predicts it, but the Trainer would count it as a token of the mean."""
    found = batch(kind, number)
    if kind != "bert":
        found["labels"] = found["labels"].clone()
        found["labels"][:, 0] = -100
    return found


def trainer_run(kind: str, folder: Path, output: Path) -> dict[str, Any]:
    """What the Trainer logs for each step, its final weights, and the names of the parameters that it decays."""
    import transformers

    rows = [{key: value[row] for key, value in micro_batch(kind, number).items()}
            for number in range(STEPS * ACCUMULATION[kind]) for row in range(4)]  # fmt: skip

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

        def compute_loss(self, model: nn.Module, inputs: dict, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, **more)
            losses.append(loss.item() * ACCUMULATION[kind])    # it divides by the number of micro-batches
            return loss

    losses: list[float] = []
    arguments = transformers.TrainingArguments(
        output_dir=str(output), per_device_train_batch_size=4, max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATION[kind], learning_rate=LR, weight_decay=DECAY, max_grad_norm=CLIP,
        lr_scheduler_type="linear", warmup_steps=WARMUP,
        optim="adamw_torch_fused", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False)  # fmt: skip
    model = from_folder(kind, folder)()
    trainer = InOrder(model, arguments, train_dataset=rows)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    rates, norms = ([row[key] for row in logged] for key in ("learning_rate", "grad_norm"))
    return {"losses": losses, "norms": norms, "rates": rates, "weights": dict(model.named_parameters()),
            "decayed": set(trainer.get_decay_parameter_names(model))}


def engine_run(kind: str, folder: Path, decayed: set[str]) -> dict[str, Any]:
    """The same steps with pstar, and a scheduler of transformers."""
    import transformers

    def param_groups(model: nn.Module) -> list[dict]:
        named = list(model.named_parameters())
        return [{"params": [param for name, param in named if name in decayed], "weight_decay": DECAY},
                {"params": [param for name, param in named if name not in decayed], "weight_decay": 0.0}]

    config = toy.config(near_budget="min", default_chunk_size=3_000, gradient_accumulation_steps=ACCUMULATION[kind],
                        gradient_clipping=CLIP, optimizer={"type": "AdamW", "params": {"lr": LR}})
    torch.manual_seed(42)    # as the Trainer's default; model_func draws BERT's classifier
    model, optimizer = pstar.initialize_engine(from_folder(kind, folder), 0, config, param_groups=param_groups)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATION[kind]):
            loss = model(**micro_batch(kind, step * ACCUMULATION[kind] + micro)).loss
            model.backward(loss)
            found["losses"].append(loss.item())
        found["rates"].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        found["norms"].append(optimizer.grad_norm)
    return found | {"weights": model.gather_state()[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_follows_the_trainer(kind: str, tmp_path: Path) -> None:
    folder = without_dropout(kind, tmp_path / "model")
    torch.manual_seed(42)
    theirs = trainer_run(kind, folder, tmp_path / "trainer")
    ours = engine_run(kind, folder, theirs["decayed"])
    assert len(theirs["losses"]) == STEPS * ACCUMULATION[kind] and 0 < len(theirs["decayed"]) < len(theirs["weights"])
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4) and max(ours["norms"]) > CLIP
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-9)
    for name, value in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value.detach(), rtol=0, atol=1e-5, msg=name)
