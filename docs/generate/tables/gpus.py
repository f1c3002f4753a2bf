"""The table of GPUs that the layouts are planned with, and the sources of its figures."""

from __future__ import annotations

from collections.abc import Callable

Words = Callable[[str], str]


def gpus(words: Words) -> str:
    """One row for each kind, figures of the data sheets, links each way; below it the sources, which are sentences."""
    from docs.generate.tables.tables import table
    from pstar.planner.gpus import GPUS

    head = ["GPU", words("memory, GiB"), words("dense 16-bit TFLOP/s"), words("memory, GB/s"), words("in a node, GB/s"),
            "PCIe, GB/s", words("between nodes, GB/s")]  # fmt: skip
    rows = [[f"`{name}`", gpu.memory_gib, f"{gpu.tflops:,}", f"{gpu.memory_gb_s:,}", gpu.link_gb_s, gpu.pcie_gb_s,
             gpu.node_link_gb_s] for name, gpu in GPUS.items()]  # fmt: skip
    sources = [[f"`{name}`", words(gpu.source)] for name, gpu in GPUS.items()]
    return f"{table(head, rows, right=6)}\n{table(['GPU', words('source')], sources)}"
