"""`pstar trace`: profiles of a run's ranks into one trace for Perfetto and two charts a rank."""

import argparse
import json
import re
from pathlib import Path

from pstar.errors import ArgumentError, ProfileError
from pstar.profile.charts import near_chart, places_chart, require_matplotlib
from pstar.profile.recording import load_profile, write_atomically
from pstar.profile.timeline import cut
from pstar.profile.trace_export import make_trace


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser("trace", help="turn profiles into a trace for ui.perfetto.dev and charts")
    parser.add_argument("profiles", nargs="+", metavar="PROFILE", help="files that a run wrote, one for each rank")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write trace.json and the charts to")
    parser.add_argument("--steps", metavar="A-B", help="only these steps, such as 3-4 or 3 (default: all that are there)")
    parser.add_argument("--no-charts", action="store_true",
                        help="write the trace alone, which needs no matplotlib (default: charts, too)")


def run(arguments: argparse.Namespace) -> int:
    """Writes trace.json, near.png and blocks.png (for several ranks near_rank0.png, ...), and prints their paths.

    Returns 0. Raises ArgumentError if --steps is no range, ProfileError for other errors. No file is written then, unless a
    profile is enough for a trace but has no data for a chart.
    """
    if not arguments.no_charts:
        require_matplotlib()
    steps = parse_steps(arguments.steps) if arguments.steps is not None else None
    recordings = []
    for path in arguments.profiles:
        recording = load_profile(path)
        try:
            recordings.append(cut(recording, *steps) if steps else recording)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from None
    trace = make_trace(recordings)

    folder = Path(arguments.out)
    target = folder / "trace.json"
    write_atomically(target, json.dumps(trace, separators=(",", ":")).encode())
    print(f"{target}: {len(trace['traceEvents'])} events, ranks: {', '.join(str(r.rank) for r in recordings)}; "
          f"open it at https://ui.perfetto.dev")
    for recording in recordings if not arguments.no_charts else ():
        of_rank = f"_rank{recording.rank}" if len(recordings) > 1 else ""
        for draw, name, what in ((near_chart, "near", "near bytes against the budget"),
                                 (places_chart, "blocks", "which block is where")):
            target = folder / f"{name}{of_rank}.png"
            draw(recording, target)
            print(f"{target}: {what}, rank {recording.rank}")
    return 0


def parse_steps(text: str) -> tuple[int, int]:
    """(first, last) of "3-4" or "3". Raises ArgumentError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ArgumentError(f"--steps {text!r} is no range of steps; write for example 3-4 or 3")
    return first, last
