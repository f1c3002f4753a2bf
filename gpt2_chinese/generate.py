"""Text from a trained model.

python -m gpt2_chinese.generate --model runs/00_single --prompt 今天天气 --prompt 这家小店 --length 100 --num 3
python -m gpt2_chinese.generate --model uer-folder --prompt-file prompts.txt --json --output texts.jsonl
python -m gpt2_chinese.generate --model runs/00_single --interactive

The text of prompt i, sample j depends on --seed, i and j alone. JSON lines have prompt, sample, text (what follows the
prompt), ids (of that text), finish_reason ("end": the model ended it, "length": --length was reached) and tokens_per_s (of
the whole batch). Beyond the model's context a text goes on from its last half (decoding.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gpt2_chinese.errors import OneLineParser, UserError, exit_on_user_error
from gpt2_chinese.sampling import Sampling, generator_of

if TYPE_CHECKING:
    from gpt2_chinese.model import GPT2LMHeadModel
    from gpt2_chinese.vocabulary import Vocabulary

PROMPT = "今天天气"
HELP = "/set NAME VALUE (length, num, seed, temperature, top_k, top_p, repetition_penalty, greedy), /show, /help"


@dataclasses.dataclass
class Text:
    """One continuation, as a JSON line has it."""

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
        cache: remember keys and values.
    """

    def __init__(
        self, model: GPT2LMHeadModel, vocabulary: Vocabulary, length: int, num: int, seed: int, sampling: Sampling,
        cache: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.vocabulary, self.cache = model, vocabulary, cache
        self.length, self.num, self.seed, self.sampling = length, num, seed, sampling

    def check(self) -> None:
        """Raises UserError for a number out of range."""
        for flag, value, least in (("--length", self.length, 1), ("--num", self.num, 1), ("--seed", self.seed, 0)):
            if value < least:
                raise UserError(f"{flag} {value} is out of range: it must be at least {least}")
        self.sampling.check()

    def texts(
        self, prompts: list[str], batch_size: int, first: int = 0, stream: Callable[[str], None] | None = None
    ) -> Iterator[list[Text]]:
        """Yields the texts, `num` a prompt, batch by batch.

        Args:
            prompts: to be continued.
            batch_size: how many texts are written at once.
            first: number of the first prompt, which decides the randomness.
            stream: called with characters as they are made, first with the prompt before them; for batches of one.
        """
        from gpt2_chinese.decoding import generate

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
    """What the new ids add to the text: between Latin words that begins with a blank, which the ids alone do not tell."""
    before, whole = vocabulary.decode(prompt), vocabulary.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else vocabulary.decode(new)


class Characters:
    """Ids to characters one by one: what is shown never changes, and together it is the prompt and its text."""

    def __init__(self, vocabulary: Vocabulary, prompt: str, prompt_ids: list[int]) -> None:
        self.vocabulary, self.prompt, self.prompt_ids, self.ids, self.shown = vocabulary, prompt, prompt_ids, [], ""

    def add(self, token: int) -> str:
        """The characters that are certain now: a character of several bytes waits for its last, a blank for what follows."""
        self.ids.append(token)
        new = continuation(self.vocabulary, self.prompt_ids, self.ids).rstrip("\ufffd").rstrip()
        text = self.prompt + new
        if not new or not text.startswith(self.shown):
            return ""
        piece, self.shown = text[len(self.shown) :], text
        return piece


def read_prompts(path: Path | str) -> list[str]:
    """The prompts of a file: one a line, or, when the first one begins with a brace, JSON lines with "prompt".

    Raises:
        UserError: no such file, no prompt in it, or a line that is none, with its number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt-file {path} cannot be read: {error}") from None
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
    """Writes all texts to stdout, or to a file, which is there only when all are written."""
    if output is None:
        return write(writer, prompts, batch_size, as_json, stream)
    beside = Path(f"{output}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            write(writer, prompts, batch_size, as_json, stream, file)
        os.replace(beside, output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None


def write(
    writer: Writer, prompts: list[str], batch_size: int, as_json: bool, stream: bool, file: TextIO | None = None,
    first: int = 0,
) -> None:  # fmt: skip
    """Writes all texts; to a file when there is one, with a bar on the terminal unless they are streamed to it."""
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
    """Prompt after prompt from stdin; an empty line, the end of the input or Ctrl-C end it."""
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
    """Carries out `/set temperature 0.7`, `/show` or `/help`; what to answer. A wrong one changes nothing."""
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


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="generate.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, default: Any, help: str, **more: Any) -> None:
        shown = "" if default is None or default is False else f" (default: {default})"
        parser.add_argument(flag, default=default, help=help.replace("%", "%%") + shown, **more)

    add("--model", None, "a run, its final/, a checkpoint, or a Hugging Face folder or file", required=True)
    add("--vocab", None, "vocabulary, where the folder has none")
    add("--prompt", None, f"the beginning of the text; may be repeated (default: {PROMPT})", action="append")
    add("--prompt-file", None, 'file with a prompt a line, or JSON lines with "prompt"')
    add("--length", 100, "new tokens at most", type=int)
    add("--num", 1, "how many texts of each prompt", type=int)
    add("--batch-size", 8, "texts written at once; no text depends on it", type=int)
    add("--temperature", 0.8, "below 1 is safer, above 1 wilder", type=float)
    add("--top-k", 40, "draw among the k likeliest tokens, 0 for all", type=int)
    add("--top-p", 1.0, "draw among the likeliest that reach this probability", type=float)
    add("--repetition-penalty", 1.1, "above 1: less repetition", type=float)
    add("--greedy", False, "always the likeliest token", action="store_true")
    add("--seed", 42, "the same seed gives the same texts", type=int)
    add("--stream", False, "show the text while it is written, one text at a time", action="store_true")
    add("--json", False, "JSON lines instead of text", action="store_true")
    add("--output", None, "write there instead of to the terminal")
    add("--interactive", False, "ask for prompt after prompt; /help lists its commands", action="store_true")
    add("--no-cache", False, "compute every token from the whole text: slower, the same texts", action="store_true")
    add("--device", "auto", "where to compute", choices=("auto", "cpu", "cuda"))
    return parser.parse_args(argv)


def _check(a: argparse.Namespace) -> None:
    """Raises UserError for flags that contradict each other or the machine."""
    given = {"--prompt": a.prompt, "--prompt-file": a.prompt_file, "--output": a.output}
    if a.prompt and a.prompt_file:
        raise UserError("--prompt and --prompt-file: give one of them")
    if a.interactive and any(given.values()):
        flag = next(name for name, value in given.items() if value)
        raise UserError(f"--interactive asks for prompts and answers on the terminal: leave {flag} out")
    if a.json and a.stream and not a.output:
        raise UserError("--json and --stream both write to the terminal: leave one out, or give --output")
    if a.batch_size < 1:
        raise UserError(f"--batch-size {a.batch_size} is out of range: it must be at least 1")
    if a.output and (Path(a.output).is_dir() or not Path(a.output).absolute().parent.is_dir()):
        raise UserError(f"--output {a.output} cannot be written: give a file in a folder that exists")


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    with exit_on_user_error():
        a = _parse(argv)
        sampling = Sampling(a.temperature, a.top_k, a.top_p, a.repetition_penalty, a.greedy)
        writer = Writer(None, None, a.length, a.num, a.seed, sampling, not a.no_cache)  # type: ignore[arg-type]
        writer.check()
        _check(a)
        prompts = read_prompts(a.prompt_file) if a.prompt_file else a.prompt or [PROMPT]
        from gpt2_chinese.weights import load_model, pick_device

        writer.model, writer.vocabulary = load_model(a.model, pick_device(a.device), a.vocab)
        if a.interactive:
            interact(writer, a.batch_size, a.json)
        else:
            run(writer, prompts, a.batch_size, a.json, a.stream, a.output)


if __name__ == "__main__":
    main()
