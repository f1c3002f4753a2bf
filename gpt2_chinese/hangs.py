"""Merges the reports of a job that hung into one table: bash scripts/python.sh -m gpt2_chinese.hangs runs/02_ddp"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from durable.hang_report import FILES, judge, read_reports, table
from gpt2_chinese.errors import OneLineParser, UserError, exit_on_user_error
from gpt2_chinese.files import kind


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = OneLineParser(
        prog="bash scripts/python.sh -m gpt2_chinese.hangs",
        description=f"Merges the reports of a job that hung, {FILES} in its output folder, into one table: who waits for "
        "whom, in which collective, and the first call in which the ranks differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the --output-dir of the run")
    parser.add_argument("--stacks", action="store_true", help="print the stacks of all ranks, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    with exit_on_user_error():
        arguments = parser.parse_args(argv)
        if (found := kind(arguments.folder, f"{arguments.folder}")) != "folder":
            raise UserError(f"{arguments.folder} is {found}: give the output folder of a run")
        reports = read_reports(arguments.folder)
        if reports.unreadable:
            raise UserError(f"{arguments.folder}: not the report of a rank: {reports.unreadable[0]}")
        if not reports.by_rank:
            raise UserError(f"{arguments.folder} has no {FILES}: no hang was reported there")
        if arguments.json:
            num_ranks = max(answer["num_ranks"] for answer in reports.by_rank.values())
            print(json.dumps({**judge(reports.by_rank, num_ranks), "ranks": reports.by_rank}, ensure_ascii=False))
            return
        print("\n".join(table(reports)))
        if arguments.stacks:
            for rank, answer in sorted(reports.by_rank.items()):
                print(f"\nrank {rank}, most recent call first:", *answer["stacks"], sep="\n")


if __name__ == "__main__":
    main()
