"""The block of the engine's page for Hugging Face's Trainer gives the bits of the same Trainer on plain PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import pstar
from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy
from tests.docs.pages import example
from tests.docs.two_processes import assert_two_processes_follow_one

VOCAB, LENGTH, BATCH, EPOCHS = 97, 12, 4, 3
BATCHES_AN_EPOCH = 5    # odd: the last update of each epoch has one micro-step
SIZES = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}


def make_gpt2() -> nn.Module:
    """Its forward takes num_items_in_batch, and divides the sum of the losses by it."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, **SIZES))


def make_bert() -> nn.Module:
    """The Trainer divides its loss by the number of micro-steps, if the model does not accept num_items_in_batch."""
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=3, **SIZES))


def texts(model_func: Callable[[], nn.Module], num_batches: int = BATCHES_AN_EPOCH) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, VOCAB, (BATCH * num_batches, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row if model_func is make_gpt2 else row[0] % 3} for row in rows]


class PlainTrainer(transformers.Trainer):
    """Clips with the engine's order of the sum."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return clip_grad_norm_(list(model.parameters()), 1.0)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Trainer computes on the CPU, prints nothing and logs each loss."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    arguments = transformers.TrainingArguments
    more = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "log_level": "error"}
    monkeypatch.setattr(transformers, "TrainingArguments", lambda *words, **settings: arguments(*words, **settings, **more))


def losses(trainer: transformers.Trainer, name: str = "loss") -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def train_by_block(model_func: Callable[[], nn.Module], code: str) -> transformers.Trainer:
    if model_func is make_bert:
        code = code.replace("engine._is", "engine.accepts_loss_kwargs = False\nengine._is")
    names: dict[str, Any] = {"transformers": transformers, "pstar": pstar, "dataset": texts(model_func),
                             "make_model": lambda: model_func().train()}
    torch.manual_seed(0)
    exec(compile(code, "page", "exec"), names)
    return names["trainer"]


@pytest.mark.parametrize("model_func", [make_gpt2, make_bert])
def test_the_block_gives_the_bits_of_the_trainer_on_plain_pytorch(quiet: None, tmp_path: Path, model_func: Callable) -> None:
    found = train_by_block(model_func, example("trainer"))
    torch.manual_seed(0)
    plain = model_func()
    arguments = transformers.TrainingArguments(
        "plain", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2,
        max_grad_norm=1.0, lr_scheduler_type="cosine", save_strategy="no")
    optimizer = toy.adamw(plain.parameters(), lr=1e-3, weight_decay=0.01)
    if model_func is make_bert:
        plain.accepts_loss_kwargs = False
    trainer = PlainTrainer(plain, arguments, train_dataset=texts(model_func), optimizers=(optimizer, None))
    trainer.train()

    assert len(losses(trainer)) == EPOCHS * 3 and losses(found) == losses(trainer)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(weights[name], param) for name, param in plain.named_parameters())
    assert found.evaluate(texts(model_func))["eval_loss"] == trainer.evaluate(texts(model_func))["eval_loss"]


def test_the_block_resumes_with_the_same_bits_and_loads_the_best_checkpoint(quiet: None, tmp_path: Path) -> None:
    """The model has dropout: the Trainer saves the state of the random generators. Best is the highest loss, the first."""
    best = 'load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True'
    code = example("trainer").replace('save_strategy="epoch"', f'save_strategy="epoch", eval_strategy="epoch", {best}')
    code = code.replace("=dataset,", "=dataset, eval_dataset=dataset,")
    whole = train_by_block(make_gpt2, code)
    for step in (6, 9):
        shutil.rmtree(tmp_path / f"out/checkpoint-{step}")
    resumed = train_by_block(make_gpt2, code.replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)"))

    assert losses(resumed) == losses(whole) and losses(resumed, "eval_loss") == losses(whole, "eval_loss")
    assert resumed.state.best_model_checkpoint.endswith("checkpoint-3")
    assert resumed.evaluate()["eval_loss"] == losses(whole, "eval_loss")[0]


def accelerate_losses(accelerator: accelerate.Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer,
                      num_batches: int = BATCHES_AN_EPOCH, batch: int = BATCH) -> list[float]:
    """The means over the processes; batch: rows of each process."""
    rows = [row["input_ids"] for row in texts(make_gpt2, num_batches)]
    loader = torch.utils.data.DataLoader(rows, batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()).mean().item())
    return found


def engine_for_accelerate(model_func: Callable[[], nn.Module], rank: int = 0) -> tuple[pstar.Engine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    settings = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    keys = {"near_budget": "40%", "gradient_accumulation_steps": 2, "optimizer": settings}
    engine, optimizer = pstar.initialize_engine(model_func, rank, keys)
    engine._is_accelerate_prepared = True
    return engine, optimizer


def test_a_loop_of_accelerate_gives_the_bits_of_plain_pytorch(quiet: None) -> None:
    torch.manual_seed(0)
    plain = make_gpt2().train()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    expected = accelerate_losses(accelerator, plain, toy.adamw(plain.parameters(), lr=1e-3, weight_decay=0.01))
    assert accelerate_losses(accelerator, *engine_for_accelerate(lambda: make_gpt2().train())) == expected


def make_without_dropout() -> nn.Module:
    model = make_gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.0
    return model.train()


TRAINER = """
import json, os, shutil
import torch, transformers
from transformers.trainer_utils import get_last_checkpoint
import pstar
from tests.docs.test_trainer_example import BATCHES_AN_EPOCH, make_gpt2, make_without_dropout as make_model, texts
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
dataset = texts(make_gpt2, 2 * BATCHES_AN_EPOCH)
torch.manual_seed(0)
{block}
if os.environ.get("RANK", "0") == "0":
    shutil.rmtree(get_last_checkpoint("out"))
if "RANK" in os.environ:
    torch.distributed.barrier()
torch.manual_seed(0)
{resumed}
if os.environ.get("RANK", "0") == "0":
    print("losses", json.dumps([row["loss"] for row in trainer.state.log_history if "loss" in row]))
"""

ACCELERATE = """
import json
import accelerate
from safetensors.torch import save_file
from tests.docs.test_trainer_example import accelerate_losses, engine_for_accelerate, make_without_dropout
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
engine, optimizer = engine_for_accelerate(make_without_dropout, accelerator.local_process_index)
losses = accelerate_losses(accelerator, engine, optimizer, 6, {batch})
weights, _ = engine.gather_state()
if accelerator.is_main_process:
    save_file(weights, "model.safetensors")
    print("losses", json.dumps(losses))
"""


@pytest.mark.deep
def test_two_processes_of_the_trainer_follow_one_at_the_same_global_batch(tmp_path: Path) -> None:
    """Both resume. The logged losses are rank 0's."""
    quiet = "max_grad_norm=0, use_cpu=True, logging_steps=1, report_to='none',"
    block = example("trainer").replace("max_grad_norm=0,", quiet).replace("save_model()", "save_model('.')")
    program = TRAINER.format(block=block, resumed=block.replace("train()", "train(resume_from_checkpoint=True)"))
    assert_two_processes_follow_one(program, program.replace("train_batch_size=4", "train_batch_size=8"), tmp_path)


@pytest.mark.deep
def test_two_processes_of_a_loop_of_accelerate_follow_one_at_the_same_global_batch(tmp_path: Path) -> None:
    """Three batches an epoch: the last update of each has one micro-step."""
    for_two, for_one = (ACCELERATE.format(batch=batch) for batch in (BATCH, 2 * BATCH))
    assert_two_processes_follow_one(for_two, for_one, tmp_path)
