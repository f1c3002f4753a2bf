"""What the programs of this folder share: the line on a machine without a GPU, and the facts on each page.

torch is imported late: run.sh does not need it for toys on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import signal
import warnings
from pathlib import Path

from command_line import parser_of
from facts import versions, when_and_how

from durable.cores import num_cores

RESULTS = Path(__file__).resolve().parents[1] / "results"


def has_gpu() -> bool:
    """True if torch can use a GPU. Prints nothing: a CUDA build of torch warns if there is no driver."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def end_with_parent() -> None:
    """This process is killed when its parent ends, also if that is killed: else it would keep the GPU. Linux only."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)    # PR_SET_PDEATHSIG of <sys/prctl.h>


def gpu_parser(script: str, description: str | None, quick: str) -> argparse.ArgumentParser:
    """A benchmark's parser with the flags that run.sh gives to every step; quick: the help of --quick."""
    parser = parser_of(script, description)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda or cpu (default: cuda)")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    return parser


def write_page(folder: Path, name: str, text: str) -> None:
    """Writes a page into a folder, which is made if it is missing, and prints the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    print(text, end="")


def check_device(parser: argparse.ArgumentParser, device: str, instead: str) -> None:
    """Ends the program with one line and status 2 if device is "cuda" without a GPU; `instead`: flags that work here."""
    if device == "cuda" and not has_gpu():
        parser.error(f"--device cuda needs a GPU that torch can use; {instead} shows that the program runs")


def name_of(device: str) -> str:
    """The device in words."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{num_cores()} cores of a CPU, no GPU"


def facts_of(script: str, argv: list[str]) -> list[tuple[str, str]]:
    """(name, fact) of versions, date and command. The folder of the results is a path of one machine, so it is left out."""
    import torch

    shown = list(argv)
    if "--results" in shown:
        at = shown.index("--results")
        del shown[at : at + 2]
    return [("versions", versions(CUDA=str(torch.version.cuda))), *when_and_how(f"gpu/{script}", shown, "python")]
