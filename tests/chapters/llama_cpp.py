"""llama.cpp itself as an oracle, by the package xllamacpp, in a process of its own: it starts threads and writes to stdout.

python -m tests.chapters.llama_cpp FILE.gguf NUMBER ID ...      prints, as its last line, [[id, log-probability], ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.chapters.program import ROOT, environment
from tests.limits import HANGS_S


def continued(file: Path, ids: list[int], number: int) -> list[tuple[int, float]]:
    """The greedy continuation of ids by llama.cpp: `number` ids with their log-probabilities."""
    command = [sys.executable, "-m", "tests.chapters.llama_cpp", file, number, *ids]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([str(each) for each in command], env=environment() | path, capture_output=True, text=True,
                          timeout=HANGS_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(token, value) for token, value in json.loads(done.stdout.splitlines()[-1])]


def main(file: str, number: int, ids: list[int]) -> None:
    import xllamacpp

    wanted = xllamacpp.CommonParams()
    wanted.model.path = file
    wanted.n_parallel, wanted.warmup, wanted.cpuparams.n_threads = 1, False, 1
    server = xllamacpp.Server(wanted)
    answer = server.handle_completions({"prompt": ids, "max_tokens": number, "temperature": 0, "logprobs": 1,
                                        "ignore_eos": True})  # fmt: skip
    found = [(each["id"], each["logprob"]) for each in answer["choices"][0]["logprobs"]["content"]]
    del server  # it says goodbye
    print(f"\n{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(each) for each in sys.argv[3:]])
