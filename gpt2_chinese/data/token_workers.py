"""Tokenises the groups of a large corpus in processes, one a core (token_shards.py says what a group is).

A worker (workers.py) reads the Job, then numbers of groups. To stdout it writes one JSON object a line: {"bytes": n} done
meanwhile, then {"group": [...]}, or {"error": ...} for an error that the user can put right.

Workers end when nobody reads their lines, so they outlive a killed parent by at most one part. They hold the parent's lock
until then: no other command writes the same parts meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpt2_chinese.data.token_parts import Group, Job, tokenise_group
from gpt2_chinese.errors import UserError
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
from gpt2_chinese.workers import end_workers, start_worker

_PROGRAM = "from gpt2_chinese.data.token_workers import work; work()"


def tokenise_in_processes(job: Job, count: int, progress: Callable[[int], None], lock: int | None) -> list[Group]:
    """Tokenises the groups of a job in `count` processes. Returns them in order.

    Args:
        progress: called with numbers of bytes of the corpus that are done.
        lock: an open lock that the processes keep until they end.

    Raises:
        UserError: as `tokenise`, for the first group that has an error; or a process that was killed.
        OSError: the disk is full, or fails.
    """
    numbers = itertools.count()
    groups: dict[int, Group] = {}
    errors: dict[int, Exception] = {}
    taking = threading.Lock()

    def counted(done: int) -> None:
        with taking:
            progress(done)

    def serve(worker: subprocess.Popen[bytes]) -> None:
        """Gives a worker one group after the other; after an error no further group is begun."""
        while True:
            with taking:
                number = next(numbers)
                if number >= len(job.groups) or errors:
                    return
            try:
                groups[number] = _group_of(worker, number, counted)
            except (UserError, OSError) as error:
                errors[number] = error

    workers: list[subprocess.Popen[bytes]] = []
    try:
        fds = () if lock is None else (lock,)
        # each core has a worker, so the library needs no threads
        workers += (start_worker(_PROGRAM, job, fds, TOKENIZERS_PARALLELISM="false") for _ in range(count))
        with ThreadPoolExecutor(count) as pool:
            try:
                for served in [pool.submit(serve, worker) for worker in workers]:
                    served.result()
            except BaseException:  # Ctrl-C: the threads end when their workers do
                end_workers(workers)
                raise
    finally:
        end_workers(workers)
    if errors:  # groups are begun in order, so this is the error that one process would have found
        raise errors[min(errors)]
    return [groups[number] for number in range(len(job.groups))]


def _group_of(worker: subprocess.Popen[bytes], number: int, progress: Callable[[int], None]) -> Group:
    """Asks a worker for a group. Raises as `tokenise_in_processes`."""
    try:
        worker.stdin.write(f"{number}\n".encode())
        worker.stdin.flush()
        for line in worker.stdout:
            found = json.loads(line)
            if "bytes" in found:
                progress(found["bytes"])
            elif "group" in found:
                return Group(*found["group"])
            elif "errno" in found:
                raise OSError(*found["errno"])
            else:
                raise UserError(found["error"])
    except BrokenPipeError:
        pass
    raise UserError(f"a process that tokenised ended by itself with status {worker.wait()}: is there enough memory? "
                    "The same command resumes")  # fmt: skip


def work() -> None:
    """The program of a worker."""
    job: Job = pickle.load(sys.stdin.buffer)
    vocabulary = Vocabulary(job.vocabulary)
    try:
        for line in sys.stdin.buffer:
            try:
                parts, reused = tokenise_group(job, int(line), vocabulary, lambda count: _say({"bytes": count}))
                _say({"group": [parts, reused]})
            except UserError as error:
                _say({"error": str(error)})
            except BrokenPipeError:
                raise
            except OSError as error:
                _say({"errno": [error.errno, error.strerror]})
    except BrokenPipeError:
        os._exit(1)  # the parent has ended; without Python's flush of stdout, which would fail again


def _say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)
