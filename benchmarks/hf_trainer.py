"""The Trainer of Hugging Face transformers and pstar train the same GPT-2 from the same weights, batch by batch.

bash benchmarks/hf_trainer.sh          # four minutes; --help lists the flags

A folder of save_pretrained is read by from_pretrained in every process. Same batches, linear schedule, weight decay and
clipping, fp32, no dropout, one thread of torch. The Trainer updates with torch's fused AdamW, pstar with its own kernel, in
the least near memory and in 40 % of the model data. Each turn is a fresh process; the contenders work in turns, in an order
that rotates. Seconds are the median over all steps but the first two of a turn, of all rounds; memory is the kernel's peak
of the process (VmHWM) less what it held with the libraries loaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from command_line import at_least, parser_of
from facts import bullets, processor, versions, when_and_how
from process_memory import status
from processes import started
from turns import in_turns

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
LR, DECAY, CLIP, WARMUP, SKIPPED, GOAL = 1e-3, 0.1, 1.0, 2, 2, 1e-5
# (flag, default, least, meaning)
NUMBERS = (("layers", 4, 1, "layers"), ("width", 384, 64, "width of a layer, 64 a head"), ("vocab", 8192, 2, "tokens"),
           ("rows", 4, 1, "rows of a batch"), ("length", 128, 2, "tokens of a row"),
           ("steps", 8, SKIPPED + 1, "steps of a turn"), ("rounds", 5, 1, "turns of each"))  # fmt: skip
CONTENDERS = {"transformers.Trainer": None, "pstar, near_budget 40%": "40%", "pstar, near_budget min": "min"}


class Work(NamedTuple):
    """What every contender does.

    Attributes:
        folder: the pretrained model.
        steps, rows, length: of a turn, of a batch, of a row.
        vocab: number of tokens.
    """

    folder: str
    steps: int
    rows: int
    length: int
    vocab: int


class Turn(NamedTuple):
    """What a process found: a loss and the seconds of each step, and the bytes of its peak."""

    losses: list[float]
    seconds: list[float]
    peak: int


def batch(work: Work, step: int) -> dict[str, Any]:
    """The ids of a step, (rows, length); nothing predicts a row's first token, so the Trainer must not count it."""
    import torch

    ids = torch.randint(0, work.vocab, (work.rows, work.length), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels}


def with_trainer(work: Work) -> tuple[list[float], list[float]]:
    """(losses, seconds) of the Trainer."""
    import torch
    import transformers

    rows = [{key: value[row] for key, value in batch(work, step).items()} for step in range(work.steps)
            for row in range(work.rows)]  # fmt: skip
    losses: list[float] = []
    ends: list[float] = []

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

        def compute_loss(self, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(*given, **more)
            losses.append(loss.item())
            return loss

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            ends.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends[-1] += time.perf_counter()

    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output_dir=output, per_device_train_batch_size=work.rows, max_steps=work.steps, learning_rate=LR,
            weight_decay=DECAY, max_grad_norm=CLIP, lr_scheduler_type="linear", warmup_steps=WARMUP,
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False)  # fmt: skip
        model = transformers.GPT2LMHeadModel.from_pretrained(work.folder)
        InOrder(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return losses, ends


def with_pstar(work: Work, near_budget: str) -> tuple[list[float], list[float]]:
    """(losses, seconds) of the engine, with the Trainer's groups: no decay of biases and norms."""
    import transformers

    import pstar

    def param_groups(model: Any) -> list[dict]:
        matrices = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() <= 1]
        return [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]

    config = {"near_budget": near_budget, "gradient_clipping": CLIP, "optimizer": {"type": "AdamW", "params": {"lr": LR}}}
    model, optimizer = pstar.initialize_engine(
        lambda: transformers.GPT2LMHeadModel.from_pretrained(work.folder).train(), 0, config, param_groups=param_groups)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, work.steps)
    losses, seconds = [], []
    for step in range(work.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(**batch(work, step)).loss
        model.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


def turn(contender: str, work: Work, pipe: Connection) -> None:
    """Does the work in this process and sends a Turn."""
    import torch
    import transformers

    import pstar  # noqa: F401

    torch.set_num_threads(1)    # two would wait for each other on a busy machine
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.Trainer, transformers.GPT2LMHeadModel  # noqa: B018  (loads what both need before memory is measured)
    before = status("VmRSS")
    near = CONTENDERS[contender]
    losses, seconds = with_trainer(work) if near is None else with_pstar(work, near)
    pipe.send(Turn(losses, seconds, status("VmHWM") - before))


def one_turn(contender: str, work: Work) -> Turn:
    process, pipe = started(multiprocessing.get_context("spawn"), turn, contender, work)
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"error: {contender} ended without a result; its output is above") from None
    finally:
        process.join()


def make_model(folder: Path, layers: int, width: int, work: Work) -> int:
    """Writes a GPT-2 without dropout into the folder; returns its number of parameters."""
    import torch
    import transformers

    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=work.vocab, n_layer=layers, n_embd=width // 64 * 64, n_head=width // 64, n_positions=work.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None))  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model.num_parameters()


def table(found: dict[str, list[Turn]]) -> list[str]:
    """A row for each contender; the gap is the largest relative difference of a loss from the first contender's."""
    peer = next(iter(found.values()))[0].losses
    rows = ["| who trains | seconds a step | peak memory (MiB) | gap of the losses |", "|---|---:|---:|---:|"]
    for name, turns in found.items():
        seconds = statistics.median(second for each in turns for second in each.seconds[SKIPPED:])
        gap = max(abs(loss / expected - 1) for each in turns for loss, expected in zip(each.losses, peer, strict=True))
        peak = statistics.median(each.peak for each in turns) / 2**20
        rows.append(f"| {name} | {seconds:.3f} | {peak:,.0f} | {gap:.1e}{', **off**' if gap > GOAL else ''} |")
    return rows


def page(arguments: argparse.Namespace, argv: list[str]) -> str:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        work = Work(folder, arguments.steps, arguments.rows, arguments.length, arguments.vocab)
        num_params = make_model(Path(folder), arguments.layers, arguments.width, work)
        found: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
        for name in in_turns(list(CONTENDERS), arguments.rounds):
            found[name].append(one_turn(name, work))
            print(f"{name}: {statistics.median(found[name][-1].seconds):.3f} s a step", file=sys.stderr, flush=True)
    tokens = f"{arguments.rows} x {arguments.length}"
    facts = [("work", f"GPT-2 of {num_params:,} parameters, {arguments.steps} steps of {tokens} "
                      f"tokens, fp32; {arguments.rounds} rounds, one thread on {num_cores()} cores ({processor()})"),
             ("goal", f"a gap of at most {GOAL:g}"),
             ("versions", versions(transformers=transformers.__version__)),
             *when_and_how("hf_trainer.sh", argv)]  # fmt: skip
    return "\n".join(["# Beside the Hugging Face Trainer", "", *bullets(facts), "", *table(found), ""])


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser = parser_of("hf_trainer.sh", __doc__)
    for name, default, least, what in NUMBERS:
        parser.add_argument(f"--{name}", type=at_least(least), default=default,
                            help=f"{what}, at least {least} [%(default)s]")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of hf_trainer.md [%(default)s]")
    arguments = parser.parse_args(given)
    text = page(arguments, given)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "hf_trainer.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
