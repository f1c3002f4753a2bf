"""Machines as numbers for `pstar plan`: memory, speeds, and a table of machines with the source of every figure.

Bytes are those that a program can allocate (as the driver reports them). Speeds are those that programs reach, not the data
sheet's peaks. Without a measurement they are a share of the peak, as the machine's `source` says. If you have the machine,
measure, and write a file (see load_machine).
"""

import difflib
import json
import os
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pstar.errors import ConfigError
from pstar.layout.layout import GPU_PACKING, HOST_PACKING, Packing
from pstar.memory.tier import parse_bytes

GIB = 2**30


@dataclass(frozen=True)
class MachineSpeeds:
    """Speeds of a Machine; Speeds of pstar.planner.adam_choice are those of one rank."""

    link_bytes_per_s: float
    """Host to GPU, for each GPU while all copy at once; GPU to host is as fast, at the same time."""
    gpu_flops: float
    """Dense 16-bit floating-point operations per second that one GPU reaches in a transformer."""
    gpu_memory_bytes_per_s: float
    host_memory_bytes_per_s: float
    """Bandwidth of one node's memory."""
    disk_bytes_per_s: float = 0.0
    """Speed of one node's disk, reading or writing."""
    gpu_link_bytes_per_s: float = 0.0
    """Bytes per second that one GPU receives in a collective over all GPUs; 0 with one GPU."""
    host_adam_params_per_s: float = 0.0
    """Parameters that one node's cores update in a second; 0: as fast as its memory moves their bytes."""


@dataclass(frozen=True)
class Reserves:
    """Memory of a Machine that chunks and activations cannot have."""

    gpu_reserve_bytes: int = GIB
    """Bytes of one GPU for the CUDA context, NCCL's and cuBLAS's buffers."""
    gpu_fragmentation: float = 0.05
    """Share of a GPU's memory that the allocator cannot use."""
    host_reserve_bytes: int = 8 * GIB
    """Bytes of one node for the operating system and the page cache that data loading needs."""
    process_reserve_bytes: int = 2 * GIB
    """Host bytes of each rank for Python, torch, CUDA's host side."""
    host_page_bytes: int = 4096
    """A page of host memory: chunks there are whole pages, which are locked for a GPU; 1 without a GPU."""


def _by_record(figures: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The figures of a flat object by record: Machine's own, MachineSpeeds', Reserves'."""
    speeds, reserves = ({item.name: figures[item.name] for item in fields(record) if item.name in figures}
                        for record in (MachineSpeeds, Reserves))
    return {key: value for key, value in figures.items() if key not in speeds | reserves}, speeds, reserves


@dataclass(frozen=True)
class Machine:
    """One or more equal nodes. Bytes of host and disk are for one node, bytes of near for one GPU."""

    name: str
    num_gpus: int
    """In all nodes together; one rank for each GPU."""
    gpu_bytes: int
    """Memory of one GPU, as its driver reports it."""
    host_bytes: int
    """Memory of one node."""
    speeds: MachineSpeeds
    disk_bytes: int = 0
    """Free space of one node for chunks; 0 for none."""
    nodes: int = 1
    has_bf16: bool = True
    """Whether matrix products in bf16 are fast; if not, 16 bit means fp16."""
    reserves: Reserves = Reserves()
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpu_bytes", "host_bytes", "nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"machine {self.name}: {name} is {getattr(self, name)}; give at least 1")
        figures = vars(self) | vars(self.speeds) | vars(self.reserves)
        for name in ("link_bytes_per_s", "gpu_flops", "gpu_memory_bytes_per_s", "host_memory_bytes_per_s"):
            if not 0 < figures[name] < float("inf"):
                raise ConfigError(f"machine {self.name}: {name} is {figures[name]}; give a speed above 0")
        for name in ("disk_bytes", "disk_bytes_per_s", "gpu_link_bytes_per_s", "host_adam_params_per_s",
                     "gpu_reserve_bytes", "host_reserve_bytes", "process_reserve_bytes"):
            if not 0 <= figures[name] < float("inf"):
                raise ConfigError(f"machine {self.name}: {name} is {figures[name]}; give a number from 0 on")
        if self.reserves.host_page_bytes < 1:
            raise ConfigError(f"machine {self.name}: host_page_bytes is {self.reserves.host_page_bytes}; give at least 1")
        if not 0 <= self.reserves.gpu_fragmentation < 1:
            raise ConfigError(f"machine {self.name}: gpu_fragmentation is {self.reserves.gpu_fragmentation}; give a share "
                              "below 1")
        if self.num_gpus % self.nodes:
            raise ConfigError(f"machine {self.name}: {self.num_gpus} GPUs are not a multiple of {self.nodes} nodes")
        if self.num_gpus > 1 and not self.speeds.gpu_link_bytes_per_s:
            raise ConfigError(f"machine {self.name}: {self.num_gpus} GPUs need gpu_link_bytes_per_s, what one of them "
                              "receives in a collective")
        if self.disk_bytes and not self.speeds.disk_bytes_per_s:
            raise ConfigError(f"machine {self.name}: disk_bytes needs disk_bytes_per_s")

    def changed(self, **figures: Any) -> "Machine":
        """This machine with other figures, by the keys of a machine file (see load_machine)."""
        own, speeds, reserves = _by_record(figures)
        return replace(self, **own, speeds=replace(self.speeds, **speeds), reserves=replace(self.reserves, **reserves))

    @property
    def packing(self) -> Packing:
        """How a layout for this machine is chosen."""
        return GPU_PACKING if self.reserves.host_page_bytes > 1 else HOST_PACKING

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.nodes

    @property
    def usable_gpu_bytes(self) -> int:
        """Bytes of one GPU for model data and activations."""
        return max(0, int(self.gpu_bytes * (1 - self.reserves.gpu_fragmentation)) - self.reserves.gpu_reserve_bytes)

    @property
    def usable_host_bytes(self) -> int:
        """Bytes of far for one rank."""
        reserves = self.reserves
        whole = self.host_bytes - reserves.host_reserve_bytes - self.gpus_per_node * reserves.process_reserve_bytes
        return max(0, whole // self.gpus_per_node)

    @property
    def usable_disk_bytes(self) -> int:
        """Bytes of disk for one rank."""
        return self.disk_bytes // self.gpus_per_node


YARD = Machine(
    "8xV100-32GB-240GB", num_gpus=8, gpu_bytes=int(31.7 * GIB), host_bytes=240 * 10**9, has_bf16=False,
    speeds=MachineSpeeds(link_bytes_per_s=6e9, gpu_flops=62e12, gpu_memory_bytes_per_s=0.72e12,
                         host_memory_bytes_per_s=100e9, gpu_link_bytes_per_s=25e9),
    source="PatrickStar's 'yard' node (README and doc/yard_network_fabric.md of Tencent/PatrickStar): 240 GB of host "
           "memory, NVLink rings with one 25.8 GB/s link at the narrowest. Estimates: half of V100's 125 TFLOP/s, "
           "0.8 of its 900 GB/s, half of PCIe 3 x16's 12 GB/s because two GPUs share a switch, 100 GB/s of host memory")
SUPERPOD = Machine(
    "8xA100-40GB-1TB", num_gpus=8, gpu_bytes=int(39.4 * GIB), host_bytes=10**12,
    speeds=MachineSpeeds(link_bytes_per_s=12e9, gpu_flops=156e12, gpu_memory_bytes_per_s=1.24e12,
                         host_memory_bytes_per_s=200e9, gpu_link_bytes_per_s=230e9),
    source="one node of PatrickStar's A100 SuperPod (README of Tencent/PatrickStar; DGX A100 data sheet). Estimates: half "
           "of A100's 312 TFLOP/s, 0.8 of its 1555 GB/s, half of PCIe 4 x16's 24 GB/s because two GPUs share a switch, "
           "half of two Rome sockets' 409 GB/s, 230 of NVSwitch's 300 GB/s")
MACHINES = {
    "yard": YARD,
    "superpod": SUPERPOD,
    "superpod-4": SUPERPOD.changed(
        name="32xA100-40GB-4x1TB", num_gpus=32, nodes=4, gpu_link_bytes_per_s=20e9,
        source=SUPERPOD.source.replace("one node", "four nodes") + "; between nodes 20 of HDR InfiniBand's 25 GB/s a GPU"),
    "h200": Machine(
        "1xH200-139GiB-128GiB", num_gpus=1, gpu_bytes=139 * GIB, host_bytes=128 * GIB, disk_bytes=60 * GIB,
        speeds=MachineSpeeds(link_bytes_per_s=55e9, gpu_flops=500e12, gpu_memory_bytes_per_s=4.2e12,
                             host_memory_bytes_per_s=117e9, disk_bytes_per_s=1e9, host_adam_params_per_s=4.6e9),
        source="one rented H200 with 16 cores: memory as reported; 55 GB/s, 4.2 TB/s and, beyond the caches, 4.6 G "
               "parameters/s of host Adam as measured; 500 TFLOP/s is the engine's design figure. Estimate: 1 GB/s of disk"),
    "h100-80": Machine(
        "1xH100-80GB-128GiB", num_gpus=1, gpu_bytes=int(79.1 * GIB), host_bytes=128 * GIB, disk_bytes=60 * GIB,
        speeds=MachineSpeeds(link_bytes_per_s=50e9, gpu_flops=450e12, gpu_memory_bytes_per_s=2.7e12,
                             host_memory_bytes_per_s=117e9, disk_bytes_per_s=1e9, host_adam_params_per_s=4.6e9),
        source="one H100 SXM. Estimates: 0.45 of 989 TFLOP/s, 0.8 of 3.35 TB/s, 50 of PCIe 5 x16's 64 GB/s; the host as "
               "h200's"),
    "cpu2": Machine(
        "2-cores-8GiB", num_gpus=1, gpu_bytes=4 * GIB, host_bytes=4 * GIB, disk_bytes=50 * GIB,
        speeds=MachineSpeeds(link_bytes_per_s=8e9, gpu_flops=0.1e12, gpu_memory_bytes_per_s=20e9,
                             host_memory_bytes_per_s=20e9, disk_bytes_per_s=0.5e9),
        reserves=Reserves(gpu_reserve_bytes=0, gpu_fragmentation=0.0, host_reserve_bytes=GIB, process_reserve_bytes=GIB,
                          host_page_bytes=1),
        source="a laptop's two cores with 8 GiB, of which near takes 4. Estimates: 0.1 TFLOP/s, 20 GB/s of memory"),
}
ALIASES = {machine.name.lower(): name for name, machine in MACHINES.items()}
KEYS = {item.name: item for record in (Machine, MachineSpeeds, Reserves) for item in fields(record)
        if item.type not in (MachineSpeeds, Reserves)}
"""The keys of a machine file: the fields of the three records, in one flat object."""


def find_machine(text: str) -> Machine:
    """A name of MACHINES (or the machine's own name), or the path of a JSON file. Raises ConfigError."""
    name = ALIASES.get(text.lower(), text.lower())
    if name in MACHINES:
        return MACHINES[name]
    if text.endswith(".json") or (len(text) < 4096 and "\0" not in text and os.path.exists(text)):
        return load_machine(text)
    similar = difflib.get_close_matches(name, [*MACHINES, *ALIASES], n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"give one of {', '.join(MACHINES)}, or a JSON file"
    raise ConfigError(f"--machine {text}: no such machine; {hint}")


def load_machine(source: "str | Path | dict[str, Any]") -> Machine:
    """A checked Machine from a JSON file or its content. Amounts of bytes may be written '80GiB'.

    The key "like" names a machine of the table, whose figures are used for keys that are missing.
    Raises ConfigError for an unreadable file, an unknown key (naming the most similar one), a missing key and a value of a
    wrong type.
    """
    where = "the machine"
    if not isinstance(source, dict):
        where = str(source)
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from error
        if not isinstance(source, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(source).__name__}")
    values = {}
    for key, value in source.items():
        if key == "like":
            continue
        if key not in KEYS:
            similar = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.4)
            hint = f"did you mean '{similar[0]}'?" if similar else f"known keys: {', '.join(KEYS)}"
            raise ConfigError(f"{where}: unknown key '{key}'; {hint}")
        values[key] = _convert(KEYS[key].type, value, where, key)
    if "like" in source:
        if source["like"] not in MACHINES:
            raise ConfigError(f"{where}: 'like' is {source['like']!r}; give one of {', '.join(MACHINES)}")
        return MACHINES[source["like"]].changed(**({"name": Path(where).stem} | values))
    values = {"name": Path(where).stem} | values
    missing = [name for name, item in KEYS.items() if item.default is MISSING and name not in values]
    if missing:
        raise ConfigError(f"{where}: '{missing[0]}' is missing; give it, or \"like\" with one of {', '.join(MACHINES)}")
    own, speeds, reserves = _by_record(values)
    return Machine(**own, speeds=MachineSpeeds(**speeds), reserves=Reserves(**reserves))


def _convert(kind: type, value: Any, where: str, key: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int and key.endswith("_bytes") and (isinstance(value, str) or number):
        return parse_bytes(value, 0) if isinstance(value, str) else int(value)
    if kind is float and number:
        return float(value)
    if type(value) is kind:
        return value
    raise ConfigError(f"{where}: '{key}' must be {kind.__name__}, found {value!r}")
