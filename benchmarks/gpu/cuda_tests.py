"""Runs the tests that need a GPU, those with the mark `gpu`; writes gpu_tests.md.

    python benchmarks/gpu/cuda_tests.py

All other tests are for a CPU, also on a machine with a GPU: tests/conftest.py hides it from them. Status 1 if a test fails,
or if none passes on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(REPO)]
from common import check_device, facts_of, gpu_parser, name_of, write_page  # noqa: E402
from facts import bullets  # noqa: E402
from processes import finding_this_checkout  # noqa: E402

NEEDS_A_GPU = re.compile(r"\bpytest\.mark\.gpu\b")
RESULTS = ("passed", "failed", "skipped")


def files() -> list[str]:
    """Test files with the mark `gpu`, from the repository's root."""
    paths = sorted((REPO / "tests").rglob("test_*.py"))
    return [str(path.relative_to(REPO)) for path in paths if NEEDS_A_GPU.search(path.read_text(encoding="utf-8"))]


def rows(report: Path) -> tuple[dict[str, Counter], list[str]]:
    """({file: counts of RESULTS and seconds}, names of tests that failed) of pytest's XML report."""
    counts, failed = {}, []
    for case in ElementTree.parse(report).iter("testcase"):
        place = case.get("classname", "") or case.get("name", "")
        count = counts.setdefault(place, Counter())
        kinds = {child.tag for child in case}
        result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        count[result] += 1
        count["seconds"] += float(case.get("time", 0))
        if result == "failed":
            failed.append(f"{place}::{case.get('name')}")
    return counts, failed


def page(counts: dict[str, Counter], failed: list[str], device: str, argv: list[str]) -> str:
    facts = [("device", name_of(device)), *facts_of("cuda_tests.py", argv)]
    lines = ["# Tests on a GPU", "", *bullets(facts), "", "| tests | passed | failed | skipped | seconds |",
             "|---|---:|---:|---:|---:|"]
    for place, count in sorted(counts.items()):
        lines.append(f"| {place} | {' | '.join(str(count[result]) for result in RESULTS)} | {count['seconds']:.1f} |")
    if failed:
        lines += ["", "Failed:", "", *(f"- `{name}`" for name in failed)]
    return "\n".join([*lines, ""])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = gpu_parser("cuda_tests.py", __doc__, "accepted as by the other programs: it changes nothing")
    options = parser.parse_args(argv)
    check_device(parser, options.device, "--device cpu")
    return options


def main(argv: list[str]) -> int:
    """Runs pytest, writes and prints the page."""
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="cuda_tests_") as folder:
        report = Path(folder, "report.xml")
        found = files()
        at_once = ("-n", str(len(found))) if importlib.util.find_spec("xdist") else ()    # one worker for each file
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-m", "gpu and not deep", "-p", "no:cacheprovider",
                   *at_once, f"--junitxml={report}", *found]
        status = subprocess.run(command, cwd=REPO, env=finding_this_checkout() | {"TESTS_GPU": "1"}).returncode
        if not report.exists():
            return 1
        counts, failed = rows(report)
    text = page(counts, failed, options.device, argv)
    write_page(options.results, "gpu_tests.md", text)
    on_a_gpu = options.device == "cuda"
    return int(status != 0 or (on_a_gpu and not any(count["passed"] for count in counts.values())))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
