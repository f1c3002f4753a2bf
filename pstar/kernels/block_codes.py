"""Frozen weights in 8 or 4 bits: codes in blocks of 64, each with its largest magnitude as a bf16 scale.

    a block of 64 weights         0.31   -0.80    0.02  ...
    scale: the largest magnitude  0.80                            2 bytes
    weight / scale, in [-1, 1]    0.39   -1.00    0.03  ...
    code: the nearest value       NF4's 16 values (QLoRA, Dettmers et al. 2023, section 3), or k / 127 for k = -127 .. 127

A block is one row of bytes: its scale, then its codes. That is 34 bytes for 64 weights in 4 bits, 66 in 8:
(2 + 8 * bits) / 64 bytes a weight, 0.266 and 0.516 of bf16's. (QLoRA has fp32 scales, and codes for them in turn.)

A weight is the fp32 product of its code's value and the scale, rounded to the dtype in which the model computes. In fp32
and bf16 these weights have the same codes and scales when they are encoded again: the scale is one of them, and rounding
moves no weight to another code. So a checkpoint of decoded weights resumes with the same bits.

Decoding needs no second buffer. The rows are put into the last bytes of the buffer that the weights will fill, and are
decoded from its front. After block b of N the rows that are left begin at N * (whole - row) + b * row bytes, and the
weights end at b * whole: never behind them, because a row is smaller than its block.

    | weights decoded so far ...  ->      | free        | rows that are left                         |
"""

from functools import cache

import torch

CODE_BLOCK = 64
"""Weights that share a scale; pstar.layout.layout.CODE_BLOCK. Blocks begin with each parameter."""

SCALE_BYTES = 2

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
"""NormalFloat: equally probable values of a normal distribution, with an exact zero (QLoRA, appendix E)."""

LEAST_SCALE = 2.0**-126
"""Blocks of smaller weights become zeros: the reciprocal of a smaller scale may be infinite."""

CPU_BLOCKS, GPU_BLOCKS = 256, 2**16
"""Blocks that are decoded at once. On the CPU so few that torch uses one thread: copies run in the background, and a second
team of threads slows the model (pstar.memory.links.Links.copy)."""


@cache
def _table(bits: int, device: torch.device) -> torch.Tensor:
    """(256, weights in a byte) fp32: what each byte of codes means. Of two 4-bit codes the first is in the high half."""
    byte = torch.arange(256, dtype=torch.int64, device="cpu")
    if bits == 8:
        return (byte.to(torch.uint8).view(torch.int8).float() / 127)[:, None].to(device)
    book = torch.tensor(NF4, dtype=torch.float32, device="cpu")
    return torch.stack([book[byte >> 4], book[byte & 15]], 1).to(device)


class BlockCodes:
    """The format for one number of bits, 8 or 4."""

    def __init__(self, bits: int):
        self.bits = bits
        self.row_bytes = SCALE_BYTES + CODE_BLOCK * bits // 8

    def num_bytes(self, numel: int) -> int:
        """Bytes of numel weights in codes; the last block may be shorter, but takes a whole row."""
        return -(-numel // CODE_BLOCK) * self.row_bytes

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of fp32 weights (N,) as bytes: (num_bytes(N),) uint8. The weights must be finite."""
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK)
        most = blocks.abs().amax(1)
        most = torch.where(most < LEAST_SCALE, 0.0, most).clamp(max=torch.finfo(torch.bfloat16).max)
        relative = blocks * (1 / most.clamp(min=LEAST_SCALE))[:, None]
        if self.bits == 8:
            codes = (relative * 127).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        else:
            book = torch.tensor(NF4, dtype=torch.float32, device=values.device)
            nearest = torch.bucketize(relative, (book[1:] + book[:-1]) / 2, out_int32=True).to(torch.uint8)
            codes = nearest[:, ::2] << 4 | nearest[:, 1::2]
        scales = most.to(torch.bfloat16)[:, None].view(torch.uint8)
        return torch.cat([scales, codes], 1).view(-1)

    def decode(self, codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the weights of rows (num_bytes(N),) uint8 into out, (N,) of a floating dtype, N a multiple of CODE_BLOCK;
        returns out. The rows may be the last bytes of out."""
        rows, blocks = codes.view(-1, self.row_bytes), out.view(-1, CODE_BLOCK)
        table = _table(self.bits, codes.device)
        at_once = CPU_BLOCKS if codes.device.type == "cpu" else GPU_BLOCKS
        for row, block in zip(rows.split(at_once), blocks.split(at_once), strict=True):
            scales = row[:, :SCALE_BYTES].contiguous().view(torch.bfloat16).float()
            values = torch.nn.functional.embedding(row[:, SCALE_BYTES:].int(), table).view(-1, CODE_BLOCK)
            block.copy_(values.mul_(scales))
        return out

    def tail(self, buffer: torch.Tensor) -> torch.Tensor:
        """The last bytes of a buffer (N,) of weights, as many as its rows take: (num_bytes(N),) uint8, a view."""
        return buffer.view(torch.uint8)[-self.num_bytes(buffer.numel()) :]

    def decode_tail(self, buffer: torch.Tensor) -> None:
        """Decodes the rows in the last bytes of a buffer, (N,) of a floating dtype, into the buffer."""
        self.decode(self.tail(buffer), buffer)

    def put(self, values: torch.Tensor, copy: torch.Tensor, offset: int) -> None:
        """Writes fp32 weights (N,) into a copy in codes, from its weight `offset` on: a multiple of CODE_BLOCK."""
        rows = self.encode(values)
        copy[self.num_bytes(offset) :][: rows.numel()].copy_(rows)

    def round(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Weights of any shape as they are after encoding and decoding, in dtype."""
        flat = values.detach().reshape(-1).float()
        padded = torch.empty(-(-flat.numel() // CODE_BLOCK) * CODE_BLOCK, dtype=dtype, device=flat.device)
        return self.decode(self.encode(flat), padded)[: flat.numel()].view(values.shape)
