"""Real links, with sources, and how long a step's bytes of each chapter take over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from docs.generate.arithmetic import adaptation, formulas
from docs.generate.arithmetic.arithmetic import bytes_text
from docs.generate.lessons.numbers import job
from docs.generate.pictures.data import chapter_module
from docs.generate.tables.tables import table

Words = Callable[[str], str]

PCI = "https://en.wikipedia.org/wiki/PCI_Express#Comparison_table"
ETHERNET = "https://en.wikipedia.org/wiki/Terabit_Ethernet"
RANKS = 8
H100_FLOPS = 989e12  # dense bf16, from NVIDIA's page of the H100
REACHED = 0.4  # of the peak


@dataclass(frozen=True)
class Link:
    """A link of one GPU.

    Attributes:
        gb_per_s: 10^9 bytes a second in one direction, as specified; programs reach 70 to 95 % of it.
        latency_us: microseconds that a turn of a ring adds, in NCCL's model (ring, protocol Simple).
        between: in English; zh.json has the Chinese.
        source: where gb_per_s is from.
    """

    name: str
    gb_per_s: float
    latency_us: float
    between: str
    source: str


LINKS = (
    Link("NVLink 4", 450, 3.4, "H100 GPUs of a node", "https://www.nvidia.com/en-us/data-center/h100/"),
    Link("PCIe 5.0 x16", 63, 5.7, "a GPU and its host, or GPUs of a node without NVLink", PCI),
    Link("PCIe 4.0 x16", 31.5, 5.7, "the same, one generation before", PCI),
    Link("InfiniBand NDR", 50, 14, "nodes, 400 Gbit/s a port", "https://www.infinibandta.org/infiniband-roadmap/"),
    Link("Ethernet 100G", 12.5, 14, "nodes of a cloud", ETHERNET),
    Link("Ethernet 10G", 1.25, 14, "servers of a laboratory", "https://en.wikipedia.org/wiki/10_Gigabit_Ethernet"),
)


def all_links(words: Words) -> str:
    """The links: bytes a second, latency, and where they are found."""
    rows = [(f"[{link.name}]({link.source})", words(link.between), f"{link.gb_per_s:g} GB/s", f"{link.latency_us:g} µs")
            for link in LINKS]  # fmt: skip
    head = [words(word) for word in ("link", "between", "one direction", "a turn of a ring")]
    return table(head, rows, right=2)


def time_text(seconds: float) -> str:
    """Three digits in µs, ms or s."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _both(name: str, ranks: int = RANKS, precision: str | None = None, **changes: object) -> int:
    found = formulas.traffic(job(name, ranks, precision, **changes))
    return max(formulas.sent_bytes(found), formulas.received_bytes(found))


def _copied(name: str, **changes: object) -> int:
    """Bytes of the copies between one GPU and its host, in the direction that has more."""
    found = formulas.traffic(job(name, 1, **changes))
    return max(found["host_out"], found["host_in"])


def _lora_bytes() -> int:
    found = chapter_module("08_param_efficient", "methods.counts").trained_rows(adaptation.configs()["small"])
    return formulas.ring_bytes(4 * next(row.count for row in found if row.method == "lora"), RANKS)


# Chapter -> its rows, a label and the bytes that the busiest rank sends in a step of the 124M model.
# "with the host" means copies, which only PCIe carries.
ROWS: dict[str, Callable[[], list[tuple[str, int]]]] = {
    "01_parameter_server": lambda: [("rank 0, the server", _both("server")), ("every rank of a ring", _both("ddp"))],
    "02_ddp": lambda: [("gradients in fp32", _both("ddp")), ("gradients in 16 bit", _both("ddp", precision="O2"))],
    "03_horovod": lambda: [("gradients in fp32", _both("horovod")), ("`--compression fp16`", _both("horovod") // 2)],
    "04_apex": lambda: [("gradients of O1, fp32", _both("ddp", precision="O1")),
                        ("gradients of O2, 16 bit", _both("ddp", precision="O2"))],
    # Twelve layers and twelve heads divide by four.
    "05_model_parallel": lambda: [("pipeline, p = 4", _both("1f1b", 4, micro_batches=8)),
                                  ("tensor parallel, p = 4", _both("tensor", 4))],
    "06_zero": lambda: [("stages 1 and 2", _both("zero1")), ("stage 3", _both("zero3"))],
    "07_patrickstar": lambda: [("between ranks, all near", _both("pstar")),
                               ("with the host, one GPU, near budget 25 %", _copied("pstar", near_percent=25)),
                               ("with the host, one GPU, ZeRO-3 offload", _copied("zero3_offload"))],
    "08_param_efficient": lambda: [("all gradients in fp32", _both("ddp", precision="fp32")),
                                   ("gradients of LoRA", _lora_bytes())],
}  # fmt: skip


def times(words: Words, chapter: str) -> str:
    """The bytes of a step and their times over each link, and the time of the computation beside them."""
    columns = [link for link in LINKS if not link.name.startswith("PCIe 4")]
    rows = []
    for label, size in ROWS[chapter]():
        possible = [link.name.startswith("PCIe") or not label.startswith("with the host") for link in columns]
        cells = [time_text(size / link.gb_per_s / 1e9) if yes else "—"
                 for link, yes in zip(columns, possible, strict=True)]  # fmt: skip
        rows.append([words(label), bytes_text(size), *cells])
    head = [words("124M, a step"), words("bytes"), *(link.name for link in columns)]
    ranks = 4 if chapter.startswith("05") else RANKS
    compute = formulas.compute_seconds(job("ddp", ranks), REACHED * H100_FLOPS)
    said = words("Computing such a step ({tokens} tokens on {ranks} ranks) takes an H100 {time} at {share} of its peak. "
                 "[Sources](../basics/collectives.md#links), "
                 "[other bounds](../basics/speed.md).")  # fmt: skip
    model = job("ddp", ranks)
    said = said.format(tokens=f"{model['batch'] * model['seq_len']:,}", ranks=ranks, time=time_text(compute),
                       share=f"{REACHED:.0%}")  # fmt: skip
    return table(head, rows, right=len(head) - 1) + f"\n{said}\n"
