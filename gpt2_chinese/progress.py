"""Progress: a moving bar on a terminal, a line from time to time in a log file."""

from __future__ import annotations

import os
import sys
import time

SHARE_OF_STEPS = 0.05  # in a log file: a line after a twentieth of the steps ...
SECONDS_AT_LEAST = 10.0  # ... or after this time without a line, and at least a twentieth of the time so far


class Progress:
    """Shows the step, the loss and tokens/s, the latter as a mean over the last steps."""

    def __init__(self, done: int, total: int) -> None:
        self.total, self.tokens, self.seconds, self.steps = total, 0, 0.0, 0
        self._rate: float | None = None
        self._begin = self._shown = time.perf_counter()
        self._next = done + 1
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
            # some terminals give their size as 0 x 0, and tqdm would then draw nothing
            sized = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            width = {"dynamic_ncols": True} if sized else {"ncols": 80, "nrows": 24}
            self._bar = tqdm(total=total, initial=done, bar_format=form, mininterval=0.2, **width)

    def step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Counts a finished step, its tokens and its seconds, and shows the progress when it is time."""
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + tokens, self.seconds + seconds
        rate = tokens / seconds
        self._rate = rate if self._rate is None else 0.9 * self._rate + 0.1 * rate
        status = f"loss {loss:.4f}, {self._rate:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.update(1)
            return
        now = time.perf_counter()
        overdue = now - self._shown >= max(SECONDS_AT_LEAST, SHARE_OF_STEPS * (now - self._begin))
        if step >= self._next or step == self.total or overdue:
            left = (self.total - step) * (now - self._begin) / self.steps
            self.write(f"step {step}/{self.total}: {status}, {left:.0f} s left")
            self._shown = now
            self._next = step + max(1, round(self.total * SHARE_OF_STEPS))

    def write(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Closes the bar; its last state stays on the terminal."""
        if self._bar is not None:
            self._bar.close()

    def summary(self) -> str:
        """Time spent in steps and the mean rate."""
        if not self.steps:
            return "no step"
        return f"{self.seconds:.0f} s in {self.steps} steps at {self.tokens / self.seconds:,.0f} tokens/s"


class ByteProgress:
    """How many bytes of a known total are done: a bar on a terminal, else a line every SECONDS_AT_LEAST seconds.

    Both go to stderr, so that a command's stdout can be piped.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total, self.done, self.what = total, 0, what
        self._begin = self._shown = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, mininterval=0.2, delay=2)

    def add(self, count: int) -> None:
        """Counts `count` more bytes as done; bytes beyond the total are ignored."""
        count = min(count, self.total - self.done)
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = time.perf_counter()
        if now - self._shown >= max(SECONDS_AT_LEAST, SHARE_OF_STEPS * (now - self._begin)):
            rate = self.done / (now - self._begin)
            left = (self.total - self.done) / max(rate, 1.0)
            done = f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
            print(f"{self.what}: {done}, {rate / 1e6:.1f} MB/s, {left:.0f} s left", file=sys.stderr, flush=True)
            self._shown = now

    def close(self) -> None:
        """Closes the bar; its last state stays on the terminal."""
        if self._bar is not None:
            self._bar.close()
