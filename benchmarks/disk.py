"""The disk tier's speed against plain writes and reads of the same bytes.

bash benchmarks/disk.sh --disk-path /mnt/nvme            # 1 GiB in chunks of 32 MiB: a few minutes on a slow disk
bash benchmarks/disk.sh --quick                          # 64 MiB, to see that it runs

Plain works like `dd`: one file of the same length, written and read front to back, 1 MiB a call, with O_DIRECT or without.
Every write ends with fdatasync, so its bytes are on the disk, with or without the page cache. Before every read the file is
dropped from the page cache. All contenders write and read once a round, in an order that rotates. A share is the median over
the rounds of (time of plain / time of the tier) in the same round: other work of the disk affects both equally. A disk with
an internal cache reads more slowly than measured here if the state is larger than that cache.
"""

from __future__ import annotations

import argparse
import datetime
import mmap
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from command_line import at_least, parser_of  # noqa: E402
from turns import in_turns  # noqa: E402

from pstar.errors import PstarError  # noqa: E402
from pstar.memory.disk import DiskTier, check_disk_path  # noqa: E402
from pstar.memory.tier import FAR, Tier  # noqa: E402

MIB, WARM_UP = 2**20, 1
PLAIN_BYTES = MIB


class Contender:
    """Writes and reads one set of buffers; keeps the seconds of each."""

    def __init__(self, name: str, direct: bool):
        self.name, self.direct = name, direct
        self.seconds: dict[str, list[float]] = {"write": [], "read": []}

    def write(self) -> None:
        raise NotImplementedError

    def read(self) -> None:
        raise NotImplementedError

    def files(self) -> list[int]:
        raise NotImplementedError

    def sync(self) -> None:
        for file in self.files():
            os.fdatasync(file)

    def forget(self) -> None:
        """Drops the file from the page cache."""
        for file in self.files():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


class TierContender(Contender):
    """DiskTier, one extent a buffer."""

    def __init__(self, folder: Path, buffers: list[torch.Tensor], direct: bool):
        super().__init__(f"DiskTier, {'direct' if direct else 'buffered'}", direct)
        self.buffers, self.tier = buffers, DiskTier(folder, direct=direct)
        self.extents = [self.tier.allocate(each.numel(), each.dtype, "exp_avg") for each in buffers]

    def write(self) -> None:
        for extent, each in zip(self.extents, self.buffers, strict=True):
            self.tier.write(extent, each)

    def read(self) -> None:
        for extent, each in zip(self.extents, self.buffers, strict=True):
            self.tier.read(extent, each)

    def files(self) -> list[int]:
        return [self.tier._buffered]    # fdatasync and fadvise act on the file, whichever descriptor is given


class PlainContender(Contender):
    """pwrite and pread of PLAIN_BYTES a call, front to back."""

    def __init__(self, folder: Path, num_bytes: int, direct: bool):
        super().__init__(f"plain, {'direct' if direct else 'buffered'}", direct)
        handle, path = tempfile.mkstemp(prefix="plain_", dir=folder)
        self.file = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        os.close(handle)
        os.unlink(path)
        os.posix_fallocate(self.file, 0, num_bytes)    # reserved, like the tier's file
        self.num_bytes, self.block = num_bytes, mmap.mmap(-1, PLAIN_BYTES)
        self.block.write(os.urandom(PLAIN_BYTES))

    def write(self) -> None:
        for offset in range(0, self.num_bytes, PLAIN_BYTES):
            if os.pwritev(self.file, [self.block], offset) != PLAIN_BYTES:
                raise OSError("a short write")

    def read(self) -> None:
        for offset in range(0, self.num_bytes, PLAIN_BYTES):
            if os.preadv(self.file, [self.block], offset) != PLAIN_BYTES:
                raise OSError("a short read")

    def files(self) -> list[int]:
        return [self.file]


def measure(found: list[Contender], rounds: int) -> None:
    for contender in in_turns(found, rounds + WARM_UP):
        for doing in ("write", "read"):
            if doing == "read":
                contender.forget()
            begin = time.perf_counter()
            getattr(contender, doing)()
            if doing == "write":
                contender.sync()
            contender.seconds[doing].append(time.perf_counter() - begin)
    for contender in found:
        for seconds in contender.seconds.values():
            del seconds[:WARM_UP]


def report(found: list[Contender], num_bytes: int, options: argparse.Namespace, file_system: str, argv: list[str]) -> str:
    """The page, in Markdown."""
    plain = {each.direct: each for each in found if isinstance(each, PlainContender)}
    lines = [
        "# The disk tier", "",
        f"- work: {num_bytes / MIB:g} MiB in chunks of {options.chunk_mib} MiB, {options.rounds} rounds; {file_system}",
        f"- versions: torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
        f"- date: {datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')}",
        f"- command: `{shlex.join(['bash', 'benchmarks/disk.sh', *argv])}`", "",
        "MB/s: bytes / median time, fdatasync included; nothing is in the page cache before a read. Share: of plain calls "
        f"of {PLAIN_BYTES // MIB} MiB of the same kind, median over the rounds.", "",
        "| | write, MB/s | share of plain | read, MB/s | share of plain |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for contender in found:
        cells = []
        for doing, seconds in contender.seconds.items():
            ratios = [a / b for a, b in zip(plain[contender.direct].seconds[doing], seconds, strict=True)]
            share = "" if contender is plain[contender.direct] else f"{statistics.median(ratios):.2f}"
            cells += [f"{num_bytes / statistics.median(seconds) / 1e6:.0f}", share]
        lines.append(f"| {contender.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def file_system_of(folder: Path) -> str:
    """The file system of the folder's mount point, for example 'ext4'."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "file system unknown"
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[0])]
    return max(above, key=lambda mount: len(mount[0]))[1]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("disk.sh", __doc__)
    parser.add_argument("--disk-path", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk in question")
    parser.add_argument("--mib", type=at_least(1), default=1024, help="MiB that each contender writes (default: 1024)")
    parser.add_argument("--chunk-mib", type=at_least(1), default=32, help="MiB of a chunk (default: 32)")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="rounds that count; one more warms up (default: 7)")
    parser.add_argument("--quick", action="store_true", help="64 MiB, 2 rounds, nothing is written to results")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write disk.md")
    options = parser.parse_args(argv)
    if options.quick:
        options.mib, options.chunk_mib, options.rounds = 64, 8, 2
    if options.mib % options.chunk_mib:
        parser.error("--mib must be a multiple of --chunk-mib")
    if not hasattr(os, "posix_fadvise"):
        parser.error("this benchmark has to empty the page cache, which this system does not let it")
    return options


def main(argv: list[str]) -> int:
    """Measures, prints and writes; returns 2 if the folder cannot be used."""
    options = parse(argv)
    try:
        check_disk_path(options.disk_path)
        probe = DiskTier(options.disk_path)
        probe.close()
        kinds = (True, False) if probe.direct else (False,)
        host = Tier(FAR, torch.device("cpu"))
        num_chunks = options.mib // options.chunk_mib
        buffers = [host.allocate(options.chunk_mib * MIB, torch.uint8, "test") for _ in range(num_chunks)]
        for number, each in enumerate(buffers):
            each.random_(256, generator=torch.Generator().manual_seed(number))    # bytes that a disk cannot compress
        found: list[Contender] = [TierContender(options.disk_path, buffers, direct) for direct in kinds]
        found += [PlainContender(options.disk_path, options.mib * MIB, direct) for direct in kinds]
        measure(found, options.rounds)
    except (PstarError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page = report(found, options.mib * MIB, options, file_system_of(options.disk_path), argv)
    print(page, end="")
    if not options.quick:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "disk.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
