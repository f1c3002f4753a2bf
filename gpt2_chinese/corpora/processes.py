"""Prepares items in several processes, and gives the results in order.

A worker (workers.py) reads the rules, then batches, and answers each batch with its results, all as pickles.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from gpt2_chinese.corpora.prepare import Prepared, Rules, Stretch, prepare
from gpt2_chinese.errors import UserError
from gpt2_chinese.workers import end_workers, start_worker

Batch = list[Stretch]
Results = list[Prepared]  # of each stretch
_PROGRAM = "from gpt2_chinese.corpora.processes import work; work()"


def prepared_here(batches: Iterable[Batch], rules: Rules) -> Iterator[tuple[Batch, Results]]:
    """Yields each batch with its results, prepared by this process."""
    for batch in batches:
        yield batch, [prepare(stretch, rules) for stretch in batch]


def prepared_by(count: int, batches: Iterable[Batch], rules: Rules) -> Iterator[tuple[Batch, Results]]:
    """The same by `count` workers. An error of `batches` is raised after the results of what came before it.

    Raises:
        UserError: a worker was killed; what `batches` raises.
    """
    workers: list[subprocess.Popen[bytes]] = []
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    waiting: deque[tuple[Batch, Future[Results]]] = deque()

    def ask(batch: Batch) -> Results:
        worker = idle.get()
        try:
            pickle.dump(batch, worker.stdin, pickle.HIGHEST_PROTOCOL)
            worker.stdin.flush()
            return pickle.load(worker.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            raise UserError(f"a process that converted ended by itself with status {worker.wait()}: "
                            "is there enough memory?") from None  # fmt: skip
        finally:
            idle.put(worker)

    try:
        for _ in range(count):
            workers.append(start_worker(_PROGRAM, rules))
            idle.put(workers[-1])
        with ThreadPoolExecutor(count) as pool:
            try:
                failure = None
                source = iter(batches)
                while True:
                    try:
                        batch = next(source, None)
                    except UserError as error:
                        batch, failure = None, error
                    if batch is None:
                        break
                    waiting.append((batch, pool.submit(ask, batch)))
                    if len(waiting) > 2 * count:  # memory stays constant
                        batch, result = waiting.popleft()
                        yield batch, result.result()
                while waiting:
                    batch, result = waiting.popleft()
                    yield batch, result.result()
                if failure is not None:
                    raise failure
            finally:  # the threads end when their workers do
                pool.shutdown(wait=False, cancel_futures=True)
                end_workers(workers)
    finally:
        end_workers(workers)


def work() -> None:
    """The program of a worker."""
    rules = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            results = [prepare(stretch, rules) for stretch in pickle.load(sys.stdin.buffer)]
            pickle.dump(results, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()
    os._exit(0)  # without Python's flush of stdout, which would fail if the parent has ended
