"""Peak memory of a conversion (python -m gpt2_chinese.corpora convert) does not depend on the size of its input.

bash benchmarks/convert_memory.sh                     # 50 MB, 500 MB and 2 GB of each format: ten minutes, 4.5 GB of disk
bash benchmarks/convert_memory.sh --megabytes 50 500 --formats json-lines
bash benchmarks/convert_memory.sh --quick             # 2 MB and 8 MB of one format, to see that it runs

The inputs are random combinations of the shipped corpus's sentences, so that almost no item is a duplicate.
The peak of a conversion is the sum of the kernel's counts (VmHWM) for its processes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from command_line import parser_of, publish
from facts import bullets, processor, versions, when_and_how
from process_tree import run_and_watch

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
MB = 10**6
FORMATS = ("json-lines", "array-json", "clue-text", "lines.gz")


class Run(NamedTuple):
    """One conversion: bytes of text read, peak bytes of memory, processes, seconds, items kept."""

    text_bytes: int
    peak_bytes: int
    processes: int
    seconds: float
    kept: int


def sentences() -> list[str]:
    """The sentences of the shipped training corpus."""
    files = sorted((HERE.parent / "data/train").glob("*.json"))
    items = [item for file in files for item in json.loads(file.read_text(encoding="utf-8"))]
    return [part for item in items for part in re.findall("[^。！？\n]+[。！？]*", item)]


def random_items(num_bytes: int) -> Iterator[list[str]]:
    """Items, each a list of 2 to 12 random sentences, until they have `num_bytes` in total."""
    shipped, generator, made_bytes = sentences(), random.Random(0), 0
    while made_bytes < num_bytes:
        item = generator.sample(shipped, generator.randint(2, 12))
        made_bytes += sum(len(sentence.encode()) for sentence in item)
        yield item


def write_input(path: Path, form: str, num_bytes: int) -> int:
    """Writes a file with `num_bytes` of text in one of FORMATS; returns the file's bytes before compression."""
    file = gzip.open(path, "wb", compresslevel=1) if form.endswith(".gz") else path.open("wb")  # noqa: SIM115
    written = 0
    with file as stream:
        for number, item in enumerate(random_items(num_bytes)):
            if form == "clue-text":
                line = "\n".join(item) + "\n\n"
            elif form == "array-json":
                line = ("[" if number == 0 else ", ") + json.dumps("".join(item), ensure_ascii=False)
            elif form == "json-lines":
                line = json.dumps({"text": "".join(item)}, ensure_ascii=False) + "\n"
            else:
                line = "".join(item) + "\n"
            written += stream.write(line.encode())
        if form == "array-json":
            written += stream.write(b"]")
    return written


def measure(form: str, num_bytes: int) -> Run:
    """Makes an input of `num_bytes` and converts it in a separate process."""
    with tempfile.TemporaryDirectory(prefix="convert_memory_") as folder:
        input_path, output = Path(folder, f"input.{form}"), Path(folder, "output")
        text_bytes = write_input(input_path, form, num_bytes)
        command = [sys.executable, "-m", "gpt2_chinese.corpora", "convert", str(input_path), "--output", str(output),
                   "--max-length", "1000", "--format", form.removesuffix(".gz")]  # fmt: skip
        _, seconds, peak, processes = run_and_watch(command, os.environ | {"PYTHONPATH": str(HERE.parent)})
        kept = json.loads((output / "report.json").read_text(encoding="utf-8"))["kept"]
        return Run(text_bytes, peak, processes, seconds, kept)


def report(results: dict[str, list[Run]], argv: list[str]) -> str:
    """The page, in Markdown."""
    lines = [
        "# Memory of a conversion", "",
        "- work: `python -m gpt2_chinese.corpora convert`; it drops duplicates and splits items above 1000 characters; "
        "the inputs are random sentences of the shipped corpus",
        f"- machine: {num_cores()} cores ({processor()})",
        f"- versions: {versions()}",
        *bullets(when_and_how("convert_memory.sh", argv)), "",
        "Peak: resident memory of all processes together (VmHWM). Growth: the peak against that of the smallest input.", "",
        "| format | input MB | items kept | processes | peak MiB | growth MiB | seconds | MB a minute |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for form, runs in results.items():
        for run in runs:
            growth = (run.peak_bytes - runs[0].peak_bytes) / 2**20
            size = run.text_bytes / MB
            lines.append(f"| {form} | {size:,.1f} | {run.kept:,} | {run.processes} | {run.peak_bytes / 2**20:,.1f} | "
                         f"{growth:+,.1f} | {run.seconds:,.1f} | {size / run.seconds * 60:,.0f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("convert_memory.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="small inputs of one format")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500, 2000], metavar="MB",
                        help="sizes of the inputs (default: 50 500 2000)")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS, help="which formats (default: all)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write (default: results/)")
    options = parser.parse_args(argv)
    if options.megabytes[0] < 1 or sorted(set(options.megabytes)) != options.megabytes:
        parser.error("--megabytes must be numbers above 0, the smallest first")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes."""
    options = parse(argv)
    sizes = [2, 8] if options.quick else options.megabytes
    forms = FORMATS[:1] if options.quick else options.formats
    results = {form: [measure(form, size * MB) for size in sizes] for form in forms}
    page = report(results, argv)
    publish(page, options.results / "convert_memory.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
