"""The logits after a row of ids, in two ways that give the same numbers: computed anew, or with cached keys and values.

    plain = Plain(model)                  cached = Cached(model, room=1024)
    plain([[3, 1, 4], [1, 5]])   (2, V)   cached([[3, 1, 4], [1, 5]])          reads both rows
    plain([[3, 1, 4, 9], [1, 5, 2]])      cached([[3, 1, 4, 9], [1, 5, 2]])    reads only 9 and 2

`Plain` groups rows of one length and calls the model. `Cached` reads the model's weights, without a change to the model.
Rows of different length are padded on the left, a mask hides the padding, and positions count from a row's first id.
A transformer with `num_virtual_tokens` gives keys and values that precede every row (chapter 08, prefix and prompt tuning).
`Cached` saves the work of all earlier positions: a token costs O(T) instead of O(T^2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_chinese.model.gpt2 import Attention, GPT2LMHeadModel

Row = list[int]


class Plain:
    """Computes every row from its first id, at each call.

    Args:
        model: returns logits (B, T, V) for ids (B, T).
        device: the device of the ids.
    """

    def __init__(self, model: Callable[[Tensor], Tensor], device: torch.device | str = "cpu") -> None:
        self.model, self.device = model, device

    @torch.no_grad()
    def __call__(self, rows: list[Row]) -> Tensor:
        """Logits (B, V) float32 of what follows each row."""
        found: dict[int, Tensor] = {}
        for length in {len(row) for row in rows}:
            group = [i for i, row in enumerate(rows) if len(row) == length]
            logits = self.model(torch.tensor([rows[i] for i in group], device=self.device))[:, -1].float()
            found |= dict(zip(group, logits, strict=True))
        return torch.stack([found[i] for i in range(len(rows))])

    def keep(self, kept: list[int]) -> None:
        """Does nothing: there is no cache."""


class Cached:
    """Caches the keys and values of the rows of the last call. Rows that have grown by one id cost one position each.

    Args:
        model: in evaluation mode.
        room: the most ids that a row will have; the first call allocates memory for them.
    """

    def __init__(self, model: GPT2LMHeadModel, room: int) -> None:
        self.model = model
        self.room = min(room, model.config.n_positions)
        self.num_virtual: int = getattr(model.transformer, "num_virtual_tokens", 0)
        self.weight = model.transformer.wte.weight
        self._rows: list[Row] = []
        # of each layer: keys and values, (B, heads, num_virtual + room, C / heads)
        self._memory: list[tuple[Tensor, Tensor]] = []
        self._padding = torch.empty(0, dtype=torch.int64)  # (B,), columns between virtual tokens and the row's first id
        self._filled = 0  # columns in use

    @torch.no_grad()
    def __call__(self, rows: list[Row]) -> Tensor:
        """Logits (B, V) float32 of what follows each row. All are computed anew unless all continue the last call's."""
        grown = len(rows) == len(self._rows) and self._filled < self.num_virtual + self.room
        if grown and all(row[:-1] == before for row, before in zip(rows, self._rows, strict=True)):
            ids = torch.tensor([row[-1:] for row in rows], device=self.weight.device)
        else:
            ids = self._begin(rows)
        self._rows = [list(row) for row in rows]
        return self._read(ids).float()

    def keep(self, kept: list[int]) -> None:
        """Drops all rows except these, which keep their order."""
        index = torch.tensor(kept, device=self.weight.device)
        self._rows = [self._rows[i] for i in kept]
        self._padding = self._padding[index]
        self._memory = [(keys[index], values[index]) for keys, values in self._memory]

    def _begin(self, rows: list[Row]) -> Tensor:
        """Empties the cache; returns the rows as ids (B, T), padded on the left."""
        longest = max(map(len, rows))
        assert longest <= self.room, "a row is longer than the room"
        self._filled = self.num_virtual
        self._padding = torch.tensor([longest - len(row) for row in rows], device=self.weight.device)
        config = self.model.config
        shape = (len(rows), config.n_head, self.num_virtual + self.room, config.n_embd // config.n_head)
        self._memory = [(self.weight.new_zeros(shape), self.weight.new_zeros(shape)) for _ in range(config.n_layer)]
        if self.num_virtual:
            for both, virtual in zip(self._memory, self.model.transformer.virtual_keys_values(), strict=True):
                for memory, columns in zip(both, virtual, strict=True):
                    memory[:, :, : self.num_virtual] = columns
        return torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.weight.device)

    def _read(self, ids: Tensor) -> Tensor:
        """(B, T) ids for the next T columns -> logits (B, V) after the last of them."""
        core = self.model.transformer
        first, end = self._filled, self._filled + ids.shape[1]
        columns = torch.arange(end, device=ids.device)
        new = columns[first:, None]
        # a column attends to itself and to earlier ones without padding; so does padding, else its softmax has no input
        #     . . a b c          p . . . .
        #     p p a b c    ->    . p . . .     for a row with two columns of padding
        #                        . . a . .
        #                        . . a b .
        #                        . . a b c
        virtual, padding = self.num_virtual, self._padding[:, None, None]
        mask = ((columns <= new) & ((columns >= virtual + padding) | (columns < virtual))) | (columns == new)  # (B, T, end)
        positions = (columns[first:] - self._padding[:, None]).clamp(min=0)
        x = core.wte(ids) + core.wpe(positions)
        for block, (keys, values) in zip(core.h, self._memory, strict=True):
            x = x + _attend(block.attn, block.ln_1(x), keys, values, first, mask[:, None])
            x = x + block.mlp(block.ln_2(x))
        self._filled = end
        return self.model.lm_head(core.ln_f(x[:, -1]))


def _attend(attention: Attention, x: Tensor, keys: Tensor, values: Tensor, first: int, mask: Tensor) -> Tensor:
    """Attention.forward where keys and values (B, heads, room, C / heads) before column `first` are cached."""
    end = first + x.shape[1]
    shape = (*x.shape[:2], attention.num_heads, -1)
    q, k, v = (part.view(shape).transpose(1, 2) for part in attention.c_attn(x).chunk(3, dim=2))
    keys[:, :, first:end], values[:, :, first:end] = k, v
    y = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
    return attention.c_proj(y.transpose(1, 2).flatten(2))
