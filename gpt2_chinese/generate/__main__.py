"""Text from a trained model.

bash scripts/python.sh -m gpt2_chinese.generate --model runs/00_single --prompt 今天天气 --prompt 这家小店 --num 3
bash scripts/python.sh -m gpt2_chinese.generate --model uer-folder --prompt-file prompts.txt --json --output texts.jsonl
bash scripts/python.sh -m gpt2_chinese.generate --model runs/00_single --interactive

The text of prompt i, sample j depends on --seed, i and j alone. JSON lines have prompt, sample, text (what follows the
prompt), ids (of that text), finish_reason ("end": the model ended it, "length": --length was reached) and tokens_per_s (of
the whole batch). Beyond the model's context a text continues from its last half (decoding.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gpt2_chinese.checkpoint.trained_model import load_model, pick_device
from gpt2_chinese.errors import UserError, command_parser, exit_on_user_error
from gpt2_chinese.files import check_output_file
from gpt2_chinese.generate.sampling import Sampling
from gpt2_chinese.generate.writer import Writer, interact, read_prompts, run

PROMPT = "今天天气"
Load = Callable[[argparse.Namespace], tuple[Any, Any]]  # the flags -> (model in evaluation mode, vocabulary)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = command_parser("bash scripts/python.sh -m gpt2_chinese.generate", description)

    def add(flag: str, default: Any, help: str, **more: Any) -> None:
        shown = "" if default is None or default is False else f" (default: {default})"
        parser.add_argument(flag, default=default, help=help.replace("%", "%%") + shown, **more)

    add("--model", None, "a run, its final/, a checkpoint, or a Hugging Face folder or file", required=True)
    add("--vocab", None, "vocab.txt or tokenizer.json (default: that of the model's folder)")
    add("--prompt", None, f"the beginning of the text; may be repeated (default: {PROMPT})", action="append")
    add("--prompt-file", None, 'file with one prompt a line, or JSON lines with a field "prompt" (default: none)')
    add("--length", 100, "most new tokens of a text", type=int)
    add("--num", 1, "texts to write for each prompt", type=int)
    add("--batch-size", 8, "texts computed at once; it changes no text", type=int)
    add("--temperature", 0.8, "divides the logits: below 1 the text is safer, above 1 wilder", type=float)
    add("--top-k", 40, "draw among the k likeliest tokens, 0 for all", type=int)
    add("--top-p", 1.0, "draw among the likeliest tokens that together have this probability, 1 for all", type=float)
    add("--repetition-penalty", 1.1, "above 1 makes tokens that were used less likely, 1 changes nothing", type=float)
    add("--greedy", False, "always take the likeliest token (default: draw one)", action="store_true")
    add("--seed", 42, "the same seed gives the same texts", type=int)
    add("--stream", False, "show the text while it is written, one text at a time", action="store_true")
    add("--json", False, "JSON lines instead of text", action="store_true")
    add("--output", None, "file to write (default: none, the terminal)")
    add("--interactive", False, "ask for prompt after prompt; /help lists its commands", action="store_true")
    add("--no-cache", False, "compute every token from the whole text: slower, the same texts", action="store_true")
    add("--device", "auto", "where to compute", choices=("auto", "cpu", "cuda"))
    return parser


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
    if a.output:
        check_output_file(a.output, "--output")


def load_plain(a: argparse.Namespace) -> tuple[Any, Any]:
    """The model of --model."""
    return load_model(a.model, pick_device(a.device), a.vocab)


def main(
    argv: list[str] | None = None, load: Load = load_plain, description: str | None = __doc__,
    add_flags: Callable[[argparse.ArgumentParser], object] | None = None,
) -> None:  # fmt: skip
    """The command line.

    Args:
        argv: the arguments, sys.argv[1:] when None.
        load: gives the model; another program passes its own.
        description: shown by --help.
        add_flags: adds flags that `load` reads.
    """
    with exit_on_user_error():
        parser = _parser(description)
        if add_flags is not None:
            add_flags(parser)
        a = parser.parse_args(argv)
        sampling = Sampling(a.temperature, a.top_k, a.top_p, a.repetition_penalty, a.greedy)
        writer = Writer(None, None, a.length, a.num, a.seed, sampling, not a.no_cache)  # type: ignore[arg-type]
        writer.check()
        _check(a)
        prompts = read_prompts(a.prompt_file) if a.prompt_file else a.prompt or [PROMPT]
        writer.model, writer.vocabulary = load(a)
        if a.interactive:
            interact(writer, a.batch_size, a.json)
        else:
            run(writer, prompts, a.batch_size, a.json, a.stream, a.output)


if __name__ == "__main__":
    main()
