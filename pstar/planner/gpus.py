"""GPUs as numbers for `pstar plan --layouts`: data sheets, one source a line, and the clusters that are made of them.

Speeds of a sheet are peaks. A Cluster has what programs reach: REACHED_BANDWIDTH of a sheet's bytes per second, and a
`fraction` of its floating-point operations. docs/assets/tools/layouts_model.js has the same table; a test compares them.
"""

from dataclasses import dataclass, fields
from math import isfinite

from pstar.errors import ConfigError

GIB = 2**30
REACHED_FLOPS = 0.5
"""Of the sheet's dense 16-bit peak, by a transformer's layers on one GPU. Narayanan et al. 2021, table 1: 44 to 52 % of an
A100's peak with all communication; pstar.planner.machines takes 0.45 to 0.5 for V100 to H200."""
REACHED_BANDWIDTH = 0.8
"""Of a sheet's memory, NVLink, PCIe or network bandwidth: an estimate, as in pstar.planner.machines."""
NVLINK_LATENCY_S, PCIE_LATENCY_S, NODE_LATENCY_S = 3.4e-6, 5.7e-6, 14e-6
"""Seconds of one step of a ring by NCCL's tuning model (hwLat, ring, Simple: NVLink, PCI, network; src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Gpu:
    """One line of the table. Peaks as the maker's data sheet gives them, without sparsity; links each way."""

    memory_gib: float
    """As the driver reports it to a program, a little below the sheet's."""
    tflops: float
    """Dense bf16 or fp16 products with fp32 sums."""
    memory_gb_s: float
    link_gb_s: float
    """To the other GPUs of the node: NVLink, or PCIe where there is none."""
    pcie_gb_s: float
    """To the host."""
    node_link_gb_s: float
    """From one node to another, all its adapters together, in the usual server."""
    has_bf16: bool
    nvlink: bool
    source: str


GPUS = {
    "rtx4090": Gpu(23.6, 165.2, 1008, 16, 32, 12.5, True, False,
                   "Ada architecture whitepaper, appendix; PCIe 4 x16. Estimates: half of it between GPUs, because peer "
                   "access is off and copies pass through host memory; node link: one 100 Gb/s adapter"),
    "v100-32": Gpu(31.7, 125, 900, 150, 16, 50, False, True,
                   "V100 SXM2 data sheet; PCIe 3 x16. Node link: four 100 Gb/s adapters of a DGX-1"),
    "a100-40": Gpu(39.4, 312, 1555, 300, 32, 200, True, True,
                   "A100 SXM data sheet; PCIe 4 x16. Node link: eight 200 Gb/s adapters of a DGX A100"),
    "a100-80": Gpu(79.1, 312, 2039, 300, 32, 200, True, True,
                   "A100 SXM data sheet; PCIe 4 x16. Node link: eight 200 Gb/s adapters of a DGX A100"),
    "l40s": Gpu(44.4, 362.05, 864, 32, 32, 12.5, True, False,
                "L40S data sheet; PCIe 4 x16. Node link: one 100 Gb/s adapter, an estimate"),
    "h100": Gpu(79.1, 989, 3350, 450, 64, 400, True, True,
                "H100 SXM data sheet; PCIe 5 x16. Node link: eight 400 Gb/s adapters of a DGX H100"),
    "h200": Gpu(139.0, 989, 4800, 450, 64, 400, True, True,
                "H200 SXM data sheet; PCIe 5 x16. Node link: eight 400 Gb/s adapters of a DGX H200"),
    "b200": Gpu(178.0, 2250, 8000, 900, 64, 400, True, True,
                "HGX B200 data sheet, 1000 W; PCIe 5 x16. Node link: eight 400 Gb/s adapters of a DGX B200"),
}


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs. Speeds are those that programs reach, in bytes or operations per second."""

    gpus: int
    """In all nodes together."""
    nodes: int
    gpu_bytes: int
    host_bytes: int
    """Of one node."""
    flops: float
    """The sheet's dense 16-bit peak of one GPU."""
    fraction: float
    """Share of `flops` that a transformer's layers reach."""
    memory_speed: float
    link_speed: float
    """Between GPUs of one node, for each GPU, each way."""
    node_link_speed: float
    """Between nodes, for one node, each way; its GPUs share it."""
    pcie_speed: float
    """Between a GPU and its host, each way."""
    host_speed: float
    """Of one node's memory."""
    link_latency_s: float
    node_latency_s: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isfinite(value) or value <= 0:
                raise ConfigError(f"the cluster's {item.name} is {value}; give a number above 0")
        if self.gpus % self.nodes:
            raise ConfigError(f"--gpus {self.gpus} is not a multiple of --nodes {self.nodes}; every node has as many GPUs")
        if self.fraction > 1:
            raise ConfigError(f"--fraction {self.fraction}: give a share of the peak, at most 1")

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def usable_gpu_bytes(self) -> int:
        """As docs' usable_bytes: the driver, the context, the libraries and fragments take 1 GiB and 5 %."""
        return max(0, self.gpu_bytes * 95 // 100 - GIB)

    @property
    def usable_host_bytes(self) -> int:
        """Of one rank, as Machine.usable_host_bytes: the system takes 8 GiB of a node, each process 2 GiB."""
        return max(0, self.host_bytes - 8 * GIB - 2 * GIB * self.per_node) // self.per_node


def cluster_of(name: str, gpus: int, nodes: int = 1, host_bytes: int = 512 * GIB, host_gb_s: float = 200.0,
               fraction: float = REACHED_FLOPS, gpu_gib: float | None = None, link_gb_s: float | None = None,
               node_link_gb_s: float | None = None) -> Cluster:  # fmt: skip
    """A cluster of one kind of GPU. Links that are given are taken as reached, those of the table at REACHED_BANDWIDTH.

    host_gb_s: bandwidth of a node's memory; 200 is about half of what two sockets with eight DDR4 channels each have on
    paper. Raises ConfigError for an unknown kind.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu {name}: no such kind; give one of {', '.join(GPUS)}")
    gpu = GPUS[name]
    return Cluster(
        gpus, nodes, int((gpu.memory_gib if gpu_gib is None else gpu_gib) * GIB), host_bytes, gpu.tflops * 1e12, fraction,
        gpu.memory_gb_s * REACHED_BANDWIDTH * 1e9,
        gpu.link_gb_s * REACHED_BANDWIDTH * 1e9 if link_gb_s is None else link_gb_s * 1e9,
        gpu.node_link_gb_s * REACHED_BANDWIDTH * 1e9 if node_link_gb_s is None else node_link_gb_s * 1e9,
        gpu.pcie_gb_s * REACHED_BANDWIDTH * 1e9, host_gb_s * 1e9,
        NVLINK_LATENCY_S if gpu.nvlink else PCIE_LATENCY_S, NODE_LATENCY_S)  # fmt: skip
