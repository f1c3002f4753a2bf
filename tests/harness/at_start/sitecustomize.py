"""Python imports this at its start, where tests/harness/handed_over.py put its folder on PYTHONPATH.

It hands the program over to the tests' process, passes signals on, and ends as the program ends.
"""

import json
import os
import signal
import socket
import sys

# Not handed over: the first looks at how it was started, the next at its memory, the others start processes that a forked
# program may not start.
HERE = ("setup_environment.py", "peak.py", "pytest", "gpt2_chinese.distributed.horovod_launcher")


def handed_over(address: str, words: list[str]) -> int:
    """Runs `python WORDS` in the process that a server of programs forks; returns its exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        message = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(message)
        with server.makefile("r") as answers:
            pid = int(answers.readline())
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda number, _: os.kill(pid, number))
            return int(answers.readline())


def program(words: list[str]) -> list[str]:
    """The words of a command line of Python from its program on, [] if it is not handed over."""
    while words and words[0] in ("-u", "-P"):
        words = words[1:]
    name = (words[1:2] if words[:1] == ["-m"] else [word for word in words[:1] if word.endswith(".py")] or [""])[0]
    return words if name and os.path.basename(name) not in HERE else []


if (place := os.environ.get("TESTS_PROGRAMS")) and (given := program(sys.orig_argv[1:])):
    status = handed_over(place, given)
    if status < 0:
        if -status != signal.SIGKILL:  # which has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
