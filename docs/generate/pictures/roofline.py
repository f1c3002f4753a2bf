"""The pictures of basics/speed.md: a node with its links, and the operations of a step under the roof of an H100.

    basics_node_LANGUAGE.svg, basics_roofline_LANGUAGE.svg
"""

from __future__ import annotations

from collections.abc import Callable
from math import log10
from pathlib import Path

from docs.generate.arithmetic import speed
from docs.generate.lessons.links import LINKS
from docs.generate.pictures.pictures import MARGIN, WIDTH, Drawing, Words
from docs.generate.recorded.measured import write_whole
from pstar.planner.gpus import GPUS, cluster_of

GPUS_OF_A_NODE = 8
LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 12, 44, 284
X_DECADES, Y_DECADES = (-1, 4), (-1, 3.3)  # powers of ten: FLOP for each byte, TFLOP/s
KINDS = {"update of Adam": "states", "layer norm": "data", "linear layer, C to 4 C": "activations"}


def _gb_per_s(name: str) -> float:
    return next(link.gb_per_s for link in LINKS if link.name == name)


def node(words: Words) -> str:
    """Eight GPUs on NVLink, the host behind PCIe, and the network."""
    drawing = Drawing(words, "node")
    drawing.heading(words("A node of eight H100, speeds each way"))
    left, right, top = MARGIN + 4, WIDTH - MARGIN - 4, drawing.y
    width = (right - left - 8) / GPUS_OF_A_NODE
    drawing.box(left + 4, top + 10, right - left - 8, 26, "activations", f"NVLink 4: {_gb_per_s('NVLink 4'):g} GB/s")
    for number in range(GPUS_OF_A_NODE):
        x = left + 4 + number * width
        drawing.line(x + width / 2, top + 36, x + width / 2, top + 108)
        drawing.box(x + 3, top + 50, width - 6, 44, "parameters", "GPU")
    drawing.box(left + 4, top + 108, right - left - 8, 26, "data", f"PCIe 5.0 x16: {_gb_per_s('PCIe 5.0 x16'):g} GB/s")
    middle = (left + right) / 2
    host, cards = cluster_of("h100", GPUS_OF_A_NODE).host_speed / 1e9, GPUS["h100"].node_link_gb_s
    below = ((left + 4, "host memory", "states", host), (middle + 4, "network cards", "gradients", cards))
    for x, label, kind, number in below:
        drawing.line(x + 96, top + 134, x + 96, top + 148)
        drawing.box(x, top + 148, middle - left - 8, 26, kind, f"{words(label)}: {number:g} GB/s")
    drawing.outline(left, top, right - left, 182, dashed=False)
    drawing.line(middle + 100, top + 174, middle + 100, top + 202)
    port = _gb_per_s("InfiniBand NDR")
    drawing.box(left, top + 202, right - left, 26, "gradients", f"InfiniBand NDR: {cards / port:g} × {port:g} GB/s")
    drawing.y = top + 236
    drawing.note(words("Below the frame: the switches that lead to other nodes."))
    return drawing.svg()


def _x(intensity: float) -> float:
    return LEFT + (log10(intensity) - X_DECADES[0]) / (X_DECADES[1] - X_DECADES[0]) * (RIGHT - LEFT)


def _y(flops_per_s: float) -> float:
    return BOTTOM - (log10(flops_per_s / 1e12) - Y_DECADES[0]) / (Y_DECADES[1] - Y_DECADES[0]) * (BOTTOM - TOP)


def roofline(words: Words) -> str:
    """The roof of the machine, and each operation on it."""
    gpu, drawing = GPUS[speed.MACHINE], Drawing(words, "roofline")
    peak, ridge = gpu.tflops * 1e12, speed.ridge(speed.MACHINE)
    drawing.text(MARGIN, 16, words("TFLOP/s of an H100"), bold=True)
    for power in range(X_DECADES[0], X_DECADES[1] + 1):
        drawing.line(_x(10**power), TOP, _x(10**power), BOTTOM, dashed=True)
        drawing.text(_x(10**power), BOTTOM + 14, f"{10**power:g}", "end" if power == X_DECADES[1] else "middle")
    for power in range(Y_DECADES[0], int(Y_DECADES[1]) + 1):
        drawing.line(LEFT, _y(10**power * 1e12), RIGHT, _y(10**power * 1e12), dashed=True)
        drawing.text(LEFT - 6, _y(10**power * 1e12), f"{10**power:g}", "end")
    first = 10 ** X_DECADES[0]
    drawing.line(_x(first), _y(first * gpu.memory_gb_s * 1e9), _x(ridge), _y(peak))
    drawing.line(_x(ridge), _y(peak), RIGHT, _y(peak))
    drawing.text(_x(ridge) - 10, _y(peak), words("peak {n}").format(n=f"{gpu.tflops:g}"), "end")
    memory = words("memory {n} GB/s").format(n=f"{gpu.memory_gb_s:,}")
    drawing.text(_x(8) - 14, _y(8 * gpu.memory_gb_s * 1e9), memory, "end")
    for one in speed.operations():
        x, y = _x(one.intensity), _y(one.reaches(speed.MACHINE))
        name = words(one.name.partition(",")[0])
        label = words("{what}, {model}").format(what=name, model=speed.NAMES[one.model]) if one.model else name
        drawing.dot(x, y, KINDS[one.name])
        above = one.model == "small"  # beside the peak's line
        drawing.text(RIGHT if above else x + 10, y + (-16 if above else 14), label, "end" if above else "start")
    drawing.text(RIGHT, BOTTOM + 34, words("FLOP for each byte"), "end", bold=True)
    drawing.y = BOTTOM + 44
    return drawing.svg()


def drawn(words: Words) -> dict[str, str]:
    """Both pictures by name."""
    return {"basics_node": node(words), "basics_roofline": roofline(words)}


def write(words_in: Callable[[str], Words], folder: Path) -> None:
    """Writes both pictures in both languages."""
    for language in ("en", "zh"):
        for name, svg in drawn(words_in(language)).items():
            write_whole(folder / f"{name}_{language}.svg", svg)
