"""Pictures of ranks, one function per chapter: what each rank holds, in bytes, and which messages it exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from docs.generate.pictures.data import buckets, groups, model, tiny, trained_by_lora
from docs.generate.pictures.pictures import MARGIN, WIDTH, Drawing, Row, Words

SEQUENCES = 12  # in the global batch of the captured runs
GAP = 40
HALF = (WIDTH - 2 * MARGIN - GAP) / 2
LEFT, RIGHT = MARGIN, MARGIN + HALF + GAP
HALVES = ((1, 0), (0, 1))  # the cells of two ranks that each hold one half

def _data(rank: int, num_ranks: int = 2, words: Words = str) -> Row:
    share = SEQUENCES // num_ranks
    cells = [int(rank * share <= n < (rank + 1) * share) for n in range(SEQUENCES)]
    return Row(words("sequences: {n} of {all}").format(n=share, all=SEQUENCES), "data", cells)


def _states(words: Words, parameters: Sequence[int] = (1,), gradients: Sequence[int] = (1,), moments: Sequence[int] = (1,),
            ) -> list[Row]:  # fmt: skip
    """Rows in fp32: 4, 4 and 8 bytes per parameter. A bar's length is proportional to its bytes."""
    return [Row(words("parameters, 4 B"), "parameters", parameters, 0.5),
            Row(words("gradients, 4 B"), "gradients", gradients, 0.5),
            Row(words("Adam's moments, 8 B"), "states", moments)]  # fmt: skip


def _activations(words: Words) -> Row:
    return Row(words("activations"), "activations", (1,), 0.7)


def _two(drawing: Drawing, titles: Sequence[str], first: Sequence[Row], second: Sequence[Row]) -> list[float]:
    """Draws two ranks side by side; returns the middle of each bar."""
    middles = drawing.panel(LEFT, HALF, titles[0], first)
    drawing.panel(RIGHT, HALF, titles[1], second)
    drawing.y = middles[-1] + 22
    return middles


def _across(drawing: Drawing, y: float, way: str) -> None:
    """An arrow between the two panels: '>', '<' or '='."""
    x1, x2 = LEFT + HALF + 4, RIGHT - 4
    if way == "<":
        x1, x2 = x2, x1
    drawing.arrow(x1, y, x2, y, both=way == "=", thick=3)


def _end(drawing: Drawing, messages: Sequence[tuple[str, str, str]], note: str = "") -> str:
    drawing.y += 6
    drawing.messages(messages)
    if note:
        drawing.note(note)
    drawing.legend()
    return drawing.svg()


def _ranks(words: Words) -> list[str]:
    return [words("rank {n}").format(n=n) for n in range(2)]


BYTES = "B is bytes a parameter; a dashed frame is what this rank does not hold."


def single(words: Words) -> str:
    """Chapter 00."""
    drawing = Drawing(words, words("One process holds everything"))
    width = 260
    rows = [_data(0, 1, words), *_states(words), _activations(words)]
    middles = drawing.panel((WIDTH - width) / 2, width, _ranks(words)[0], rows)
    drawing.y = middles[-1] + 22
    note = words("No messages: what the other chapters share among ranks is all here. B is bytes a parameter.")
    return _end(drawing, [], note)


def parameter_server(words: Words) -> str:
    """Chapter 01."""
    drawing = Drawing(words, words("A parameter server and a worker"))
    titles = [words("rank 0: server"), words("rank 1: worker")]
    y = _two(drawing, titles, [_data(0, 2, words), *_states(words), _activations(words)],
             [_data(1, 2, words), *_states(words, moments=(0,)), _activations(words)])  # fmt: skip
    _across(drawing, y[1], ">")
    _across(drawing, y[2], "<")
    return _end(drawing, [
        ("gradients", "1 → 0", words("push: all of a worker's gradients, once a step")),
        ("parameters", "0 → 1", words("pull: the weights after the server's step")),
    ], words("The server works too. B is bytes a parameter; a dashed frame is what this rank does not hold."))  # fmt: skip


def ddp(words: Words) -> str:
    """Chapter 02: the gradient bar is cut as the buckets are."""
    drawing = Drawing(words, words("Two replicas average their gradients"))
    rows = [[_data(rank, 2, words), *_states(words), _activations(words)] for rank in range(2)]
    y = _two(drawing, _ranks(words), *rows)
    _across(drawing, y[2], "=")
    sizes = buckets()
    total = sum(sum(bucket) for bucket in sizes)
    for left in (LEFT, RIGHT):
        x = left + 8
        for bucket in sizes:
            width = 0.5 * (HALF - 16) * sum(bucket) / total
            drawing.box(x, y[2] - 7, width, 14, "gradients")
            x += width
    sentence = words("all-reduce of {n} buckets, the last layers' first: afterwards both hold the mean").format(n=len(sizes))
    note = words("Nothing else travels: equal weights and equal gradients make equal steps. B is bytes a parameter.")
    return _end(drawing, [("gradients", "0 ⇄ 1", sentence)], note)


def horovod(words: Words) -> str:
    """Chapter 03."""
    drawing = Drawing(words, words("Horovod's own thread averages what all ranks have ready"))
    rows = [[_data(rank, 2, words), *_states(words), _activations(words),
             Row(words("Horovod: fusion buffer"), "gradients", (1, 1, 1, 0, 0, 0))] for rank in range(2)]  # fmt: skip
    y = _two(drawing, _ranks(words), *rows)
    _across(drawing, y[5] - 9, "<")
    _across(drawing, y[5] + 5, "=")
    return _end(drawing, [
        ("data", "1 → 0", words("names of the gradients that are ready here")),
        ("data", "0 → 1", words("those that are ready everywhere, in one order")),
        ("gradients", "0 ⇄ 1", words("ring all-reduce of the fusion buffer")),
    ])  # fmt: skip


def apex(words: Words) -> str:
    """Chapter 04, level O2."""
    drawing = Drawing(words, words("Mixed precision, level O2"))
    rows = [[_data(rank, 2, words), Row(words("weights, 16 bit, 2 B"), "parameters", (1,), 0.25),
             Row(words("gradients, 16 bit, 2 B"), "gradients", (1,), 0.25),
             Row(words("masters, fp32, 4 B"), "parameters", (1,), 0.5),
             Row(words("gradients, fp32, 4 B"), "gradients", (1,), 0.5),
             Row(words("Adam's moments, 8 B"), "states"), Row(words("activations, 16 bit"), "activations", (1,), 0.35)]
            for rank in range(2)]  # fmt: skip
    y = _two(drawing, _ranks(words), *rows)
    _across(drawing, y[2], "=")
    note = words("Forward and backward work on the short bars; their gradients are given up as the fp32 ones are made, on "
                 "which the optimizer works. It copies the masters back into the weights. B is bytes a parameter.")
    return _end(drawing, [("gradients", "0 ⇄ 1", words("all-reduce in 16 bit, of the scaled gradients"))], note)


def model_parallel(words: Words) -> str:
    """Chapter 05: a pipeline of two."""
    drawing = Drawing(words, words("A pipeline: each rank holds half of the layers"))
    layers = tiny().n_layer
    titles = [words("rank 0: h.0–h.{last}").format(last=layers // 2 - 1),
              words("rank 1: h.{first}–h.{last}").format(first=layers // 2, last=layers - 1)]  # fmt: skip
    rows = [[Row(words(what), "data", (1,) * SEQUENCES), *_states(words, *[cells] * 3),
             Row(words("activations"), "activations", cells, 0.7)]
            for what, cells in zip(("tokens of all {n}", "targets of all {n}"), HALVES, strict=True)]  # fmt: skip
    rows = [[row._replace(label=row.label.format(n=SEQUENCES)) for row in each] for each in rows]
    y = _two(drawing, titles, *rows)
    _across(drawing, y[4] - 7, ">")
    _across(drawing, y[4] + 7, "<")
    return _end(drawing, [
        ("activations", "0 → 1", words("the activations between the halves, of each micro-batch")),
        ("gradients", "1 → 0", words("their gradients, on the way back")),
        ("gradients", "0 ⇄ 1", words("once a step: the embedding is also the head; both have a copy and sum its gradients")),
    ])  # fmt: skip


def tensor_parallel(words: Words) -> str:
    """Chapter 05: the MLP or the attention of one layer, on two tensor ranks."""
    drawing = Drawing(words, words("Inside a layer: each rank holds half of both matrices"))
    rows = [[Row(words("input: all of it"), "activations", (1, 1), 0.5),
             Row(words("first matrix: columns"), "parameters", half),
             Row(words("GELU or heads: half"), "activations", half),
             Row(words("second matrix: rows"), "parameters", half),
             Row(words("output: a partial sum"), "activations", (2, 2), 0.5)] for half in HALVES]  # fmt: skip
    y = _two(drawing, _ranks(words), *rows)
    _across(drawing, y[0], "=")
    _across(drawing, y[4], "=")
    return _end(drawing, [
        ("activations", "0 ⇄ 1", words("g, forward: all-reduce makes the whole output of the two parts")),
        ("gradients", "0 ⇄ 1", words("f, backward: all-reduce of the input's gradient")),
    ], words("Twice in every layer, for attention and for the MLP; between the two matrices nothing travels."))  # fmt: skip


def zero(words: Words) -> str:
    """Chapter 06, stage 3."""
    drawing = Drawing(words, words("ZeRO stage 3: each rank keeps half of everything"))
    whole = words("a block, for a while")
    rows = [[_data(rank, 2, words), *_states(words, *[half] * 3), Row(whole, "parameters", (2,), 0.3), _activations(words)]
            for rank, half in enumerate(HALVES)]  # fmt: skip
    y = _two(drawing, _ranks(words), *rows)
    _across(drawing, y[1], "=")
    _across(drawing, y[2], "=")
    return _end(drawing, [
        ("parameters", "0 ⇄ 1", words("all-gather of a block before its forward and again before its backward")),
        ("gradients", "0 ⇄ 1", words("reduce-scatter after its backward: each rank gets the mean of its half")),
    ], words(BYTES))  # fmt: skip


def patrickstar(words: Words) -> str:
    """Chapter 07: the groups are those of the engine's plan for tiny."""
    drawing = Drawing(words, words("Chunks between near and far"))
    num_groups = groups()
    rows = []
    for rank in range(2):
        own = [int(n % 2 == rank) for n in range(2 * num_groups)]
        near = [1 if held else 2 for held in own[:2]] + [0] * (2 * num_groups - 2)
        rows.append([_data(rank, 2, words), Row(words("near: in use now"), "parameters", near),
                     _activations(words), Row(words("far: parameter chunks"), "parameters", own),
                     Row(words("far: gradients"), "gradients", own), Row(words("far: first moments"), "states", own),
                     Row(words("far: second moments"), "states", own)])  # fmt: skip
    y = _two(drawing, _ranks(words), *rows)
    _across(drawing, y[1], "=")
    sentence = words("a group of p chunks is gathered before use: p = 2, {n} groups").format(n=num_groups)
    return _end(drawing, [
        ("parameters", "0 ⇄ 1", sentence),
        ("gradients", "0 ⇄ 1", words("and its gradients are reduced to the owners after")),
        ("parameters", words("far ⇄ near"), words("a chunk comes when it is needed; the one needed last leaves")),
    ], words("Pale: another rank's chunk, here for a while. Dashed: held by the other rank, or far."))  # fmt: skip


def param_efficient(words: Words) -> str:
    """Chapter 08: a rank that trains all parameters, and a rank that trains LoRA's two matrices."""
    drawing = Drawing(words, words("A rank of chapter 02, and a rank with LoRA"))
    every, few = sum(p.numel() for p in model().parameters()), trained_by_lora()
    share = 0.5 * few / every
    small = [Row(words("A and B, 4 B"), "parameters", (1,), share),
             Row(words("their gradients, 4 B"), "gradients", (1,), share),
             Row(words("their moments, 8 B"), "states", (1,), 2 * share)]  # fmt: skip
    frozen = Row(words("frozen parameters, 4 B"), "parameters", (2,), 0.5)
    full = [_data(0, 2, words), *_states(words), Row(words("nothing frozen"), "parameters", (0,), 0.5), _activations(words)]
    with_lora = [_data(0, 2, words), *small, frozen, _activations(words)]
    _two(drawing, [words("all trained"), words("LoRA, rank 8")], full, with_lora)
    return _end(drawing, [
        ("gradients", words("all"), words("{n} numbers to average in a step of chapter 02").format(n=f"{every:,}")),
        ("gradients", words("LoRA"), words("{n} numbers: one message, no buckets").format(n=f"{few:,}")),
    ], words("Pale: frozen, read in forward and backward, never written. Bars have the length of their bytes."))  # fmt: skip
