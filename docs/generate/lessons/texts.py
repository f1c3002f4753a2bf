"""The wall and the prediction of each chapter's lesson, as Markdown. Numbers come from numbers.py, Chinese from zh.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from docs.generate.lessons import numbers

Words = Callable[[str], str]


@dataclass(frozen=True)
class Lesson:
    """Texts in English, with the names of numbers.py in braces.

    Attributes:
        wall: what the chapter before ran into.
        question: what the reader predicts; its answer is one number.
        unit: of the answer, '' for a count.
        answer: the number and why.
    """

    wall: str
    question: str
    unit: str
    answer: str


LESSONS = {
    "00_single": Lesson(
        "Nothing tells you that a parallel program is wrong: its loss falls, too. Published trainings of this model "
        "clipped gradients that were still multiplied by the loss scale, or took two optimizer steps a batch. So you "
        "first need one process whose every number is known. It holds everything. For GPT-2 small in fp32 that is "
        "**{small_states}** of parameters, gradients and moments, and **{activations}** of activations for "
        "{small_batch} × {small_length} tokens.",
        "In `tiny`, parameters, gradients and AdamW's moments take {states}. How many MiB do the logits alone take in"
        " fp32, with {batch} sequences of {length} tokens and a vocabulary of {vocabulary}?",
        "MiB",
        "{batch} × {length} × {vocabulary} numbers of 4 bytes: **{answer} MiB**, {times} times the model states. The "
        "states do not depend on the batch; activations grow with every token of it.",
    ),
    "01_parameter_server": Lesson(
        "Chapter 00 computes alone. A step with GPT-2's own batch, {batch} sequences of {length} tokens, is {tflop} "
        "TFLOP for the 124M model. A GPU that reaches {reached} TFLOP/s ({share} of an A100's peak) needs **{seconds}"
        " s** for it, and **{days} days** for 300 billion tokens. But the gradient is a mean over sequences, so the "
        "batch can be divided.",
        "The 124M model is trained by {ranks} ranks, and rank 0 is their server. The gradients of one rank are "
        "{gradients}. How many GiB of gradients does rank 0 receive in a step?",
        "GiB",
        "It receives those of the {others} other ranks: **{answer} GiB**, and sends as many GiB of weights back. With"
        " twice as many ranks it is more than twice as much.",
    ),
    "02_ddp": Lesson(
        "With {ranks} ranks, the server of chapter 01 receives **{bytes}** of gradients in a step of the 124M model "
        "and sends as much. On 10 Gbit/s Ethernet that takes {seconds} s in each direction. A rank computes for "
        "{compute} s, at {reached} TFLOP/s and with GPT-2's own batch.",
        "Without a server, {ranks} ranks average gradients of {gradients}. Each rank sends only to the next one. How "
        "many GiB does each rank send in a step?",
        "GiB",
        "2 (p − 1) / p of the gradients: **{answer} GiB**, {times} times less than the server. It never reaches twice"
        " the gradients, however many ranks there are.",
    ),
    "03_horovod": Lesson(
        "The averaging of chapter 02 is **{lines} lines** (`ddp.py` and `ring.py`), and each program would need its "
        "own copy. Its buckets leave in a fixed order; in the frameworks of 2017, each rank's graph decided in which "
        "order gradients were ready. And when one worker is lost, all ranks end.",
        "Each of the {tensors} gradients of the 124M model is a message of its own, in a ring of {ranks} ranks. A "
        "message takes 2 (p − 1) turns. How many turns are that in a step?",
        "",
        "{tensors} × {turns} = **{answer}** turns. At {hop} µs a turn between nodes, that is {latency_ms} ms of "
        "latency alone. Horovod fuses gradients into buffers of {fusion} MiB: {messages} messages and {fused} turns.",
    ),
    "04_apex": Lesson(
        "Until now every number has four bytes. One process then keeps **{activations}** of activations of the 124M "
        "model, for {batch} × {length} tokens. And an A100 multiplies fp32 matrices at up to {slow} TFLOP/s, bf16 at "
        "up to {fast} ([data sheet](https://www.nvidia.com/en-us/data-center/a100/)): chapters 02 and 03 leave a "
        "factor of **{times}** unused.",
        "At level O2 parameters and gradients have 16 bits. AdamW keeps an fp32 copy of the parameters and two fp32 "
        "moments. How many bytes a parameter is that? In fp32 it is {fp32}.",
        "bytes",
        "2 + 2 + 4 + 8 = **{answer}**, as many as in fp32. Activations shrink, here from {activations} to {half}, and"
        " messages by half.",
    ),
    "05_model_parallel": Lesson(
        "DDP trains 124M. GPT-2 xl has {parameters} parameters: the optimizer's states alone take **{optimizer}**, "
        "with parameters and gradients **{states}**, on every rank and before the first activation. Of a GPU with "
        "{gpu} GiB about {usable} are usable. More GPUs do not help: DDP divides the batch, not the model.",
        "A pipeline of {ranks} ranks cuts its batch into {micros} micro-batches. During what share of the time does a"
        " rank wait, in per cent?",
        "%",
        "(p − 1) / (m + p − 1) = {waits} / {rounds} = **{answer} %**. With {more} micro-batches it is {less_bubble} "
        "%, with a single one {one_bubble} %.",
    ),
    "06_zero": Lesson(
        "Chapter 05 divides the model, at a price: tensor parallelism sends {tensor} a rank in a step of the 124M "
        "model on {few} ranks, DDP {ddp}, and the layers must be rewritten. Data parallelism takes any model. But "
        "{ranks} ranks keep **{all}** of states of GPT-2 xl, of which **{copies}** are copies.",
        "Stage 1 of ZeRO divides only the optimizer's states, 12 of the 16 bytes a parameter. How many GiB of states "
        "are left on each of {ranks} ranks, for GPT-2 xl?",
        "GiB",
        "4 + 12 / 8 = 5.5 bytes a parameter: **{answer} GiB** instead of {whole}. Stage 2 leaves {stage2}, stage 3 "
        "{stage3}.",
    ),
    "07_patrickstar": Lesson(
        "ZeRO divides by the number of ranks, and with one GPU there is nothing to divide: GPT-2 xl needs "
        "**{states}** of states, a GPU of {gpu} GiB has {usable} for everything. ZeRO's offload moves all of it to "
        "the host. Then **{moved}** cross the bus in each step, even if half of the GPU is free.",
        "A step uses {n} chunks, forward and then backward in reverse order. The GPU has room for {room}. With the "
        "best choice of the chunk that leaves, how many chunks does a step load?",
        "",
        "2 (n − C) = **{answer}**. Loading each chunk at each use would be {every} loads. The chunks that are near at"
        " the end of forward are those that backward uses first.",
    ),
    "08_param_efficient": Lesson(
        "Chapter 07 finds room for the model data, but still trains every parameter. To teach GPT-2 small one more "
        "kind of text takes 16 bytes a parameter, **{full}** in all, and each variant of the model is another "
        "**{weights}** on the disk.",
        "LoRA of rank 8 on each block's `c_attn` trains {count} of the {all} parameters of GPT-2 small, {share}. By "
        "which factor do weights, gradients and AdamW's moments shrink together, in fp32?",
        "",
        "Only by a factor of **{answer}**, from {full} to {lora}. Gradients and moments almost disappear, 12 of the "
        "16 bytes, but the frozen weights stay. Fewer bits for the frozen weights remove the rest.",
    ),
}


def _shown(chapter: str) -> numbers.Numbers:
    found = numbers.CHAPTERS[chapter]()
    return {**found, "answer": found["answer"] if isinstance(found["answer"], int) else numbers.three(found["answer"])}


def wall(words: Words, chapter: str) -> str:
    """The paragraph of a lesson's wall."""
    return words(LESSONS[chapter].wall).format(**_shown(chapter)) + "\n"


def prediction(words: Words, chapter: str) -> str:
    """The question and its folded answer. assets/predict.js adds the field; without a script the answer still unfolds."""
    lesson, shown = LESSONS[chapter], _shown(chapter)
    shown["answer"] = f"{shown['answer']:,}" if isinstance(shown["answer"], int) else shown["answer"]
    unit = words(lesson.unit) if lesson.unit == "bytes" else lesson.unit
    plain = shown["answer"].replace(",", "")
    return (f'<div class="prediction" data-answer="{plain}" data-unit="{unit}" markdown>\n\n'
            f"{words(lesson.question).format(**shown)}\n\n"
            f'??? success "{words("The answer")}"\n\n    {words(lesson.answer).format(**shown)}\n\n</div>\n')  # fmt: skip
