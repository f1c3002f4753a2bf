"""Writes texts with a trained model: in batches, character by character, or prompt after prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from durable.files import replacing
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import read_text
from gpt2_chinese.generate.sampling import Sampling, generator_of

if TYPE_CHECKING:
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary


HELP = "/set NAME VALUE (length, num, seed, temperature, top_k, top_p, repetition_penalty, greedy), /show, /help"


@dataclasses.dataclass
class Text:
    """One continuation: the fields of a JSON line."""

    prompt: str
    sample: int
    text: str
    ids: list[int]
    finish_reason: str
    tokens_per_s: float


class Writer:
    """Writes texts with one model.

    Args:
        model: in evaluation mode.
        vocabulary: of the model.
        length, num, seed: as the flags.
        sampling: how each token is chosen.
        cache: use a cache of keys and values.
    """

    def __init__(
        self, model: GPT2LMHeadModel, vocabulary: Vocabulary, length: int, num: int, seed: int, sampling: Sampling,
        cache: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.vocabulary, self.cache = model, vocabulary, cache
        self.length, self.num, self.seed, self.sampling = length, num, seed, sampling

    def check(self) -> None:
        """Raises UserError for a number out of range."""
        for flag, value, least, most in (
            ("--length", self.length, 1, 10**9), ("--num", self.num, 1, 10**6), ("--seed", self.seed, 0, None),
        ):  # fmt: skip
            if value < least or (most is not None and value > most):
                limit = f"at least {least}" + (f" and at most {most}" if most is not None and value > most else "")
                raise UserError(f"{flag} {value} is out of range: it must be {limit}")
        self.sampling.check()

    def texts(
        self, prompts: list[str], batch_size: int, first: int = 0, stream: Callable[[str], None] | None = None
    ) -> Iterator[list[Text]]:
        """Yields the texts, `num` a prompt, batch by batch.

        Args:
            prompts: to be continued.
            batch_size: how many texts are written at once.
            first: number of the first prompt, which decides the random numbers.
            stream: called with new characters at once, the first time with the prompt before them; for batches of one.
        """
        from gpt2_chinese.generate.decoding import generate

        vocabulary = self.vocabulary
        jobs = [(i, j) for i in range(len(prompts)) for j in range(self.num)]
        encoded = [vocabulary.encode_prompt(prompt) for prompt in prompts]
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            made = Characters(vocabulary, prompts[batch[0][0]], encoded[batch[0][0]])

            def on_token(_: int, token: int, made: Characters = made) -> None:
                if piece := made.add(token):
                    stream(piece)

            begin = time.perf_counter()
            rows = generate(
                self.model,
                [encoded[i] for i, _ in batch],
                self.length,
                self.sampling,
                [generator_of(self.seed, first + i, j) for i, j in batch],
                vocabulary.end_id,
                tuple(vocabulary.special_ids - {vocabulary.end_id}),
                self.cache,
                on_token if stream else None,
            )
            rate = sum(map(len, rows)) / max(time.perf_counter() - begin, 1e-9)
            yield [
                Text(
                    prompts[i], j, continuation(vocabulary, encoded[i], row).rstrip(), row,
                    "length" if len(row) == self.length else "end", round(rate, 1),
                )
                for (i, j), row in zip(batch, rows, strict=True)
            ]  # fmt: skip


def continuation(vocabulary: Vocabulary, prompt: list[int], new: list[int]) -> str:
    """The text that the new ids add: after a Latin word it may begin with a blank, which decoding them alone would lose."""
    before, whole = vocabulary.decode(prompt), vocabulary.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else vocabulary.decode(new)


class Characters:
    """Decodes ids one by one: shown characters never change, and all together are the prompt and its text."""

    def __init__(self, vocabulary: Vocabulary, prompt: str, prompt_ids: list[int]) -> None:
        self.vocabulary, self.prompt, self.prompt_ids, self.ids, self.shown = vocabulary, prompt, prompt_ids, [], ""

    def add(self, token: int) -> str:
        """The characters that are final now: one of several bytes waits for its last byte, a blank for the next letter."""
        self.ids.append(token)
        new = continuation(self.vocabulary, self.prompt_ids, self.ids).rstrip("\ufffd").rstrip()
        text = self.prompt + new
        if not new or not text.startswith(self.shown):
            return ""
        piece, self.shown = text[len(self.shown) :], text
        return piece


def read_prompts(path: Path | str) -> list[str]:
    """The prompts of a file: one a line, or, if the first line begins with a brace, JSON lines with "prompt".

    Raises:
        UserError: no such file, no UTF-8 text, no prompt in it, or a line without a prompt, with its number.
    """
    lines = read_text(Path(path), f"--prompt-file {path}").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompt-file {path} holds no prompt: give one a line")
    if not numbered[0][1].lstrip().startswith("{"):
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(f'--prompt-file {path}, line {number}: give a JSON object with "prompt", a text')
        prompts.append(prompt)
    return prompts


def run(writer: Writer, prompts: list[str], batch_size: int, as_json: bool, stream: bool, output: str | None) -> None:
    """Writes all texts to stdout, or to a file, which appears only when all texts are written."""
    if output is None:
        return write(writer, prompts, batch_size, as_json, stream)
    try:
        with replacing(Path(output)) as staging, staging.open("w", encoding="utf-8") as file:
            write(writer, prompts, batch_size, as_json, stream, file)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None


def write(
    writer: Writer, prompts: list[str], batch_size: int, as_json: bool, stream: bool, file: TextIO | None = None,
    first: int = 0,
) -> None:  # fmt: skip
    """Writes all texts to `file`, else to stdout; a file without streaming gets a progress bar on the terminal."""
    from tqdm import tqdm

    show = (lambda piece: print(piece, end="", flush=True)) if stream else None
    hidden = None if file and not stream else True  # None: hidden unless stderr is a terminal
    with tqdm(total=len(prompts) * writer.num, unit="text", leave=False, disable=hidden) as bar:
        for texts in writer.texts(prompts, 1 if stream else batch_size, first, show):
            bar.update(len(texts))
            for text in texts:
                if stream:
                    print("\n" if text.text else f"{text.prompt}\n", flush=True)
                if as_json:
                    print(json.dumps(dataclasses.asdict(text), ensure_ascii=False), file=file, flush=True)
                elif file or not stream:
                    print(f"{text.prompt}{text.text}\n", file=file, flush=True)
                if not text.text:
                    line = f"note: nothing follows 「{text.prompt}」 in sample {text.sample + 1}: the model ended at once"
                    print(line, file=sys.stderr, flush=True)


def interact(writer: Writer, batch_size: int, as_json: bool) -> None:
    """Reads prompt after prompt from stdin, until an empty line, the end of the input or Ctrl-C."""
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"Type a prompt. {HELP}. An empty line ends.", flush=True)
    number = 0
    try:
        while line := input("> " if terminal else "").strip():
            if line.startswith("/"):
                print(command(writer, line), flush=True)
                continue
            write(writer, [line], batch_size, as_json, not as_json, first=number)
            number += 1
    except (EOFError, KeyboardInterrupt):
        print(flush=True)


def command(writer: Writer, line: str) -> str:
    """Runs `/set temperature 0.7`, `/show` or `/help`, and returns the answer. A wrong command changes nothing."""
    fields = {f.name: type(f.default) for f in dataclasses.fields(Sampling)}
    names = dict.fromkeys(("length", "num", "seed"), int) | fields
    words = line.split()
    if words == ["/show"]:
        return ", ".join(f"{name} {getattr(_holder(writer, name), name)}" for name in names)
    name = words[1].removeprefix("--").replace("-", "_") if len(words) == 3 and words[0] == "/set" else None
    if name not in names:
        return HELP if words == ["/help"] else f"error: {line} is no command: {HELP}"
    holder = _holder(writer, name)
    before = getattr(holder, name)
    try:
        value = {"on": True, "off": False}[words[2]] if names[name] is bool else names[name](words[2])
        setattr(holder, name, value)
        writer.check()
    except (ValueError, KeyError):
        return f"error: {name} cannot be {words[2]}" + (": on or off" if names[name] is bool else "")
    except UserError as error:
        setattr(holder, name, before)
        return f"error: {error}"
    return f"{name} is {value}"


def _holder(writer: Writer, name: str) -> Any:
    return writer if hasattr(writer, name) else writer.sampling
