"""Peak memory and speed of tokenising, for a small and a large corpus: memory must not grow with the input.

bash benchmarks/tokenise_memory.sh                        # 10 MB and 500 MB: about eight minutes on two cores
bash benchmarks/tokenise_memory.sh --megabytes 10 100
bash benchmarks/tokenise_memory.sh --quick                # 1 MB and 4 MB, to see that it runs

The corpora repeat the shipped one until they are large enough, each time in another order, in files of about 1 MB.
`python -m gpt2_chinese.tokens` tokenises each in a separate process, into an empty cache. The peak is the kernel's count for
the whole process (VmHWM), interpreter and libraries included. The rate is for the whole run, from the checksum of the corpus
to the checksum of the finished cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command_line import parser_of
from facts import bullets, num_cores, processor, versions, when_and_how

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MIB, FLAT, ENOUGH = 2**20, 1.25, 20.0    # the large peak at most this times the small one; MB a minute
PROGRAM = """
import sys
from gpt2_chinese.tokens import main
main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def make_corpus(folder: Path, megabytes: int) -> int:
    """Writes at least `megabytes` MB (10^6 bytes) of array-JSON; returns the bytes."""
    files = sorted((ROOT / "data/train").glob("*.json"))
    texts = [text for file in files for text in json.loads(file.read_text(encoding="utf-8"))]
    folder.mkdir()
    total = number = 0
    while total < megabytes * 10**6:
        random.Random(number).shuffle(texts)
        total += (folder / f"{number:05d}.json").write_bytes(json.dumps(texts, ensure_ascii=False).encode())
        number += 1
    return total


def measure(megabytes: int) -> dict[str, float]:
    """Bytes of the corpus, peak bytes, seconds and tokens of one run."""
    with tempfile.TemporaryDirectory(prefix="tokenise_memory_") as folder:
        size = make_corpus(Path(folder, "corpus"), megabytes)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GPT2_CHINESE_CACHE": str(Path(folder, "cache"))}
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", PROGRAM, "--corpus", str(Path(folder, "corpus"))], env=environment,
                              stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - begin
        lines = done.stdout.splitlines()
        tokens = next(line for line in lines if " tokens of " in line).split()[0]
        return {"bytes": size, "peak": 1024 * int(lines[-1]), "seconds": seconds, "tokens": int(tokens.replace(",", ""))}


def verdict(good: bool) -> str:
    return "yes" if good else "**no**"


def report(results: list[dict[str, float]], argv: list[str]) -> str:
    """The page, in Markdown."""
    import tokenizers

    lines = [
        "# Memory and speed of tokenising", "",
        f"- work: `python -m gpt2_chinese.tokens`, the shipped corpus repeated and permuted, the shipped vocabulary, "
        f"{num_cores()} cores ({processor()})",
        f"- versions: {versions(tokenizers=tokenizers.__version__)}",
        *bullets(when_and_how("tokenise_memory.sh", argv)), "",
        "| corpus, MB | tokens | peak, MiB | seconds | MB a minute |", "|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    rates = [each["bytes"] / each["seconds"] * 60e-6 for each in results]
    for each, rate in zip(results, rates, strict=True):
        lines.append(f"| {each['bytes'] / 1e6:,.1f} | {each['tokens']:,.0f} | {each['peak'] / MIB:,.1f} | "
                     f"{each['seconds']:,.1f} | {rate:,.0f} |")  # fmt: skip
    growth, slowest = results[-1]["peak"] / results[0]["peak"], min(rates[1:])
    flat = verdict(growth <= FLAT)
    lines += ["", f"- the largest needs {growth:.2f} times the memory of the smallest; at most {FLAT}: {flat}",
              f"- {slowest:,.0f} MB a minute; at least {ENOUGH:.0f}: {verdict(slowest >= ENOUGH)}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("tokenise_memory.sh", __doc__)
    parser.add_argument("--megabytes", type=int, nargs=2, default=(10, 500), metavar=("SMALL", "LARGE"),
                        help="sizes of the corpora (default: 10 500)")
    parser.add_argument("--quick", action="store_true", help="1 and 4 MB")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    if not 0 < options.megabytes[0] < options.megabytes[1]:
        parser.error("--megabytes must be two numbers above 0, the smaller first")
    if not Path("/proc/self/status").exists():
        parser.error("this benchmark reads the kernel's counts in /proc, which are not here")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes."""
    options = parse(argv)
    page = report([measure(size) for size in ((1, 4) if options.quick else options.megabytes)], argv)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "tokenise_memory.md").write_text(page, encoding="utf-8")
    print(page, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
