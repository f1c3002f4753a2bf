"""The command `pstar`: configuration keys, memory plans and profiles, without training."""

import json
import sys
from typing import Any, NoReturn

from durable.closed_pipe import exit_on_closed_pipe
from durable.command_line import WholeFlagsParser, one_line
from durable.printable import escape_what_stdout_lacks
from pstar.config import Config, load_config, reference
from pstar.errors import PstarError
from pstar.planner import plan_command
from pstar.profile import trace_command


class _Parser(WholeFlagsParser):
    """argparse with errors of one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message.removeprefix('argument '))} (--help lists all flags)\n")


def main(argv: list[str] | None = None) -> int:
    """`pstar config` prints every key with its default; `pstar config FILE` checks a file, of DeepSpeed or PatrickStar too,
    and prints what becomes of its keys; `pstar plan` predicts whether a model fits on a machine (exit status 1 if not);
    `pstar trace` draws profiles. Exit status 2 for bad input."""
    escape_what_stdout_lacks()
    with exit_on_closed_pipe():
        return _run(argv)


def _run(argv: list[str] | None) -> int:
    parser = _Parser(prog="pstar", description="PatrickStar: chunk-based training of large models")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print the configuration keys, or check a configuration file")
    config.add_argument("file", nargs="?", help="a JSON file to check, pstar's, DeepSpeed's or PatrickStar's; without it "
                        "the keys are printed")
    config.add_argument("--ranks", type=int, default=1, help="processes, for DeepSpeed's rule of batch sizes (default: 1)")
    trace_command.add_parser(commands)
    plan_command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "trace":
            return trace_command.run(arguments)
        if arguments.command == "plan":
            return plan_command.run(arguments)
        if arguments.file:
            if arguments.ranks < 1:
                parser.error(f"--ranks {arguments.ranks}: give at least 1")
            print_checked(arguments.file, load_config(arguments.file).for_ranks(arguments.ranks), arguments.ranks)
        else:
            for key, default, meaning in reference():
                print(f"{key}\n    {meaning} Default: {default}")
    except PstarError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


def print_checked(name: str, config: Config, num_ranks: int) -> None:
    """Prints that a file is valid; for one of DeepSpeed or PatrickStar what became of its keys, and pstar's keys for it."""
    if not config.notes:
        print(f"{name}: a valid configuration")
        return
    print(f"{name}: a valid configuration, translated for {num_ranks} process{'es' if num_ranks > 1 else ''}")
    for note in config.notes:
        print(f"{note.fate}: {', '.join(note.keys)}\n    {note.sentence}")
    defaults, values = {key: default for key, default, _ in reference()}, {}
    for key in defaults:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value != defaults[key]:
            values[key] = value
    print(f"pstar's keys, where they differ from its defaults:\n    {json.dumps(values)}")


if __name__ == "__main__":
    sys.exit(main())
