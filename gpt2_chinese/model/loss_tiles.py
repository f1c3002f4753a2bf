"""How --loss-tiles cuts the tokens of a micro-batch. Imports no torch: a wrong value is answered before torch is loaded."""

from __future__ import annotations

from gpt2_chinese.errors import UserError


def read_tiles(text: str) -> int | str:
    """The flag --loss-tiles: "none", "auto", or the number of tiles. Raises UserError."""
    if text in ("none", "auto"):
        return text
    if text.isascii() and text.isdecimal() and len(text) < 19 and int(text) > 0:  # int() refuses thousands of digits
        return int(text)
    raise UserError(f"--loss-tiles {text}: give none, auto, or a number of tiles of at least 1")


def num_tiles(tiles: int | str, num_tokens: int, width: int) -> int:
    """Number of tiles for num_tokens tokens; no tile is empty.

    auto: a tile has about `width` tokens, the model's width. Its logits (width, V) then take as much memory as the gradient
    of the head's weight (V, width). Smaller tiles save little more, and each tile reads and writes that gradient once.
    """
    wanted = -(-num_tokens // width) if tiles == "auto" else int(tiles)
    return max(1, min(wanted, num_tokens))
