"""Text from a trained model.

python -m gpt2_chinese.generate --model runs/00_single --prompt 今天天气 --length 100 --num 3
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from gpt2_chinese.errors import UserError, exit_on_user_error


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    eos_id: int | None = None,
    forbidden: tuple[int, ...] = (),
) -> list[list[int]]:
    """Continues every row of ids; rows are drawn independently of each other.

    Beyond the model's context the window slides: the model sees the last n_positions ids.

    Args:
        model: gives logits (B, T, V) for ids (B, T); its config.n_positions is the context, if it has one.
        ids: (B, T) int64, the prompts, all of one length.
        max_new_tokens: how many ids to add at most.
        temperature: below 1 sharpens, above 1 flattens the distribution.
        top_k: draw among the k likeliest ids, 0 for all.
        top_p: draw among the fewest ids whose probabilities reach p, 1 for all.
        repetition_penalty: above 1 makes ids that stand already in the row less likely.
        greedy: take the likeliest id; the four above except repetition_penalty do not matter then.
        generator: the source of randomness, on the device of ids.
        eos_id: a row ends before this id.
        forbidden: ids never drawn.

    Returns:
        the new ids of each row, without eos_id.
    """
    context = getattr(getattr(model, "config", None), "n_positions", None)
    start = ids.shape[1]
    ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        logits = model(ids if context is None else ids[:, -context:])[:, -1].float()
        logits = penalise_repetition(logits, ids, repetition_penalty)
        if forbidden:
            logits[:, list(forbidden)] = -torch.inf
        if greedy:
            new = logits.argmax(-1, keepdim=True)
        else:
            logits = keep_top_p(keep_top_k(logits / temperature, top_k), top_p)
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        if eos_id is not None:
            new[ended] = eos_id
            ended |= new[:, 0] == eos_id
        ids = torch.cat([ids, new], dim=1)
        if eos_id is not None and bool(ended.all()):
            break
    rows = ids[:, start:].tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


def penalise_repetition(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Divides positive and multiplies negative logits (B, V) of the ids (B, T) seen so far."""
    if penalty == 1.0:
        return logits
    seen = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(seen > 0, seen / penalty, seen * penalty))


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Sets all but the k largest logits of each row to -inf; 0 keeps all."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    smallest = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest ids of each row whose probabilities add up to at least p, always one; 1 keeps all."""
    if p >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # what stands before an id: it is needed while that is below p
    drop = before >= p
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="generate.sh",
        description="Text from a trained model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a run, its final/, a checkpoint, or a Hugging Face folder")
    parser.add_argument("--vocab", help="vocabulary, where the folder has none")
    parser.add_argument("--prompt", default="今天天气", help="the beginning of the text")
    parser.add_argument("--length", type=int, default=100, help="new tokens at most")
    parser.add_argument("--num", type=int, default=1, help="how many texts")
    parser.add_argument("--temperature", type=float, default=0.8, help="below 1 is safer, above 1 wilder")
    parser.add_argument("--top-k", type=int, default=40, help="draw among the k likeliest tokens, 0 for all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest that reach this probability")
    parser.add_argument("--repetition-penalty", type=float, default=1.1, help="above 1: less repetition")
    parser.add_argument("--seed", type=int, default=42, help="the same seed gives the same texts")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    a = parser.parse_args()
    with exit_on_user_error():
        for name, good in {
            "--length": a.length >= 1,
            "--num": a.num >= 1,
            "--temperature": a.temperature > 0,
            "--top-k": a.top_k >= 0,
            "--top-p": 0 < a.top_p <= 1,
            "--repetition-penalty": a.repetition_penalty > 0,
        }.items():
            if not good:
                raise UserError(f"{name} {getattr(a, name[2:].replace('-', '_'))} is out of range")
        from gpt2_chinese.weights import load_model

        cuda = torch.cuda.is_available()
        if a.device == "cuda" and not cuda:
            raise UserError("--device cuda: this machine has no GPU that torch can use")
        device = torch.device("cuda" if cuda and a.device != "cpu" else "cpu")
        model, vocabulary = load_model(a.model, device, a.vocab)
        prompt = vocabulary.encode_prompt(a.prompt)
        rows = generate(
            model,
            torch.tensor([prompt] * a.num, device=device),
            a.length,
            a.temperature,
            a.top_k,
            a.top_p,
            a.repetition_penalty,
            a.greedy,
            torch.Generator(device).manual_seed(a.seed),
            vocabulary.end_id,
            forbidden=tuple(vocabulary.special_ids - {vocabulary.end_id}),
        )
    for row in rows:
        print(f"{a.prompt}{vocabulary.decode(row)}\n")


if __name__ == "__main__":
    main()
