"""The command `pstar`: configuration keys, memory plans and profiles, without training."""

import argparse
import sys
from typing import NoReturn

from pstar.config import load_config, reference
from pstar.errors import PstarError
from pstar.planner import plan_command
from pstar.profile import trace_command


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')} (--help lists all flags)\n")


def main(argv: list[str] | None = None) -> int:
    """`pstar config` prints every key with its default; `pstar config FILE` checks a file; `pstar plan` predicts whether a
    model fits on a machine (exit status 1 if not); `pstar trace` draws profiles. Exit status 2 for bad input."""
    parser = _Parser(prog="pstar", description="PatrickStar: chunk-based training of large models")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print the configuration keys, or check a configuration file")
    config.add_argument("file", nargs="?", help="a JSON file to check; without it the keys are printed")
    trace_command.add_parser(commands)
    plan_command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "trace":
            return trace_command.run(arguments)
        if arguments.command == "plan":
            return plan_command.run(arguments)
        if arguments.file:
            load_config(arguments.file)
            print(f"{arguments.file}: a valid configuration")
        else:
            for key, default, meaning in reference():
                print(f"{key}\n    {meaning} Default: {default}")
    except PstarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
