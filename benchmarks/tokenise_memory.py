"""Peak memory and speed of tokenising, for corpora of three sizes, beside the tokenizers library alone.

bash benchmarks/tokenise_memory.sh                     # 50 MB, 500 MB and 2 GB: six minutes, 5 GB of disk
bash benchmarks/tokenise_memory.sh --megabytes 10 100
bash benchmarks/tokenise_memory.sh --quick             # 1 MB and 4 MB, to see that it runs

The corpora repeat the shipped one until they are large enough, each time in another order, in files of about 1 MB.
`python -m gpt2_chinese.tokens` tokenises each into an empty cache; its rate is for the whole run, from the checksum of the
corpus to the checksum of the finished cache. The library alone reads the same files and encodes them, with encode_batch and
with encode_batch_fast, and keeps nothing, so it does less. In the smallest corpus all ids are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from command_line import parser_of, publish
from facts import bullets, processor, versions, when_and_how
from process_tree import run_and_watch

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MIB, FLAT, ENOUGH = 2**20, 1.25, 3000.0  # the largest peak at most this times the one before it; MB a minute
METHODS = ("gpt2_chinese", "encode_batch_fast", "encode_batch")
PEERS = """
import hashlib, json, sys
from pathlib import Path
import numpy as np
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
folder, method, digest, count = sys.argv[1], sys.argv[2], hashlib.sha256(), 0
vocabulary = Vocabulary.load(sys.argv[3])
encode = getattr(vocabulary._tokenizer, method)
for file in sorted(Path(folder).glob("*.json")):
    texts = json.loads(file.read_text(encoding="utf-8"))
    for begin in range(0, len(texts), 1000):
        for encoding in encode(texts[begin : begin + 1000], add_special_tokens=False):
            ids = np.array([vocabulary.begin_id, *encoding.ids, vocabulary.end_id], np.uint16)
            count += len(ids)
            if len(sys.argv) > 4:
                digest.update(ids)
print(count, digest.hexdigest())
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


def measure(megabytes: int, methods: tuple[str, ...], compare: bool) -> list[dict]:
    """One run of each method on a corpus: bytes, tokens, peak, processes, seconds. With `compare`, raises on other ids."""
    found = []
    with tempfile.TemporaryDirectory(prefix="tokenise_memory_") as folder:
        corpus, cache = Path(folder, "corpus"), Path(folder, "cache")
        size = make_corpus(corpus, megabytes)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GPT2_CHINESE_CACHE": str(cache)}
        vocab = str(ROOT / "cache/vocab.txt")
        for method in methods:
            command = [sys.executable, "-c", PEERS, str(corpus), method, vocab, *["compare"] * compare]
            if method == METHODS[0]:
                command = [sys.executable, "-m", "gpt2_chinese.tokens", "--corpus", str(corpus), "--vocab", vocab]
            said, seconds, peak, processes = run_and_watch(command, environment)
            if method == METHODS[0]:
                tokens = int(next(line for line in said.splitlines() if " tokens of " in line).split()[0].replace(",", ""))
                digest = hashlib.sha256(Path(said.splitlines()[-1]).read_bytes()).hexdigest() if compare else ""
            elif said.split() != [str(tokens), digest or said.split()[1]]:
                raise SystemExit(f"error: {method} gives other ids than gpt2_chinese: {said}")
            found.append({"method": method, "bytes": size, "tokens": tokens, "peak": peak, "processes": processes,
                          "seconds": seconds})  # fmt: skip
    return found


def verdict(good: bool) -> str:
    return "yes" if good else "**no**"


def report(results: list[dict], argv: list[str]) -> str:
    """The page, in Markdown."""
    import tokenizers

    lines = [
        "# Memory and speed of tokenising", "",
        f"- work: `python -m gpt2_chinese.tokens`, the shipped corpus repeated and permuted, the shipped vocabulary, "
        f"{num_cores()} cores ({processor()}); the tokenizers library alone reads and encodes the same files",
        f"- versions: {versions(tokenizers=tokenizers.__version__)}",
        *bullets(when_and_how("tokenise_memory.sh", argv)), "",
        "| corpus, MB | tokens | program | processes | peak, MiB | seconds | MB a minute |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for each in results:
        lines.append(f"| {each['bytes'] / 1e6:,.1f} | {each['tokens']:,.0f} | {each['method']} | {each['processes']} | "
                     f"{each['peak'] / MIB:,.1f} | {each['seconds']:,.1f} | {rate(each):,.0f} |")  # fmt: skip
    ours = [each for each in results if each["method"] == METHODS[0]]
    growth, largest = ours[-1]["peak"] / ours[-2]["peak"], rate(ours[-1])
    lines += ["", f"- the largest corpus needs {growth:.2f} times the memory of the one before it; at most {FLAT}: "
              f"{verdict(growth <= FLAT)}",
              f"- {largest:,.0f} MB a minute; at least {ENOUGH:,.0f}: {verdict(largest >= ENOUGH)}",
              "- all ids of the smallest corpus are those of the library: yes"]  # fmt: skip
    return "\n".join(lines) + "\n"


def rate(each: dict) -> float:
    """MB (10^6 bytes) a minute."""
    return each["bytes"] / each["seconds"] * 60e-6


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("tokenise_memory.sh", __doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500, 2000], metavar="MB",
                        help="sizes of the corpora, two or more (default: 50 500 2000)")
    parser.add_argument("--library-up-to", type=int, default=500, metavar="MB",
                        help="the library alone does no larger corpus: it needs minutes (default: 500)")
    parser.add_argument("--quick", action="store_true", help="1 and 4 MB")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    sizes = options.megabytes
    if len(sizes) < 2 or sizes[0] < 1 or sorted(set(sizes)) != sizes:
        parser.error("--megabytes must be two or more numbers above 0, the smallest first")
    if not Path("/proc/self/status").exists():
        parser.error("this benchmark reads the kernel's counts in /proc, which are not here")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes."""
    options = parse(argv)
    sizes = [1, 4] if options.quick else options.megabytes
    results = []
    for size in sizes:
        results += measure(size, METHODS if size <= options.library_up_to else METHODS[:1], size == sizes[0])
    page = report(results, argv)
    publish(page, options.results / "tokenise_memory.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
