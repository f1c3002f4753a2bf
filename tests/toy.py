"""A small model with a tied head, its data, and its oracle, a plain PyTorch loop: for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import pstar
from pstar.numerics.grad_norm import clip_grad_norm_

VOCAB, WIDTH, LAYERS, BATCH, LENGTH = 211, 48, 3, 12, 9
LR, WEIGHT_DECAY, CLIP = 2e-3, 0.1, 1.0


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Embedding, residual blocks, tied head; returns the loss, or logits without targets."""

    def __init__(self, layers: int = LAYERS):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Untied(nn.Module):
    """Two embeddings, a block, and a head, without shared weights; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.block = Block(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        return F.cross_entropy(self.head(self.block(x)).flatten(0, 1), targets.flatten())


def batch(number: int, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), each (BATCH, length); depends only on the number."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCAB, (BATCH, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def share(number: int, rank: int, num_ranks: int, micro: int = 0, num_micros: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows of one micro-batch of the global batch."""
    size = BATCH // (num_ranks * num_micros)
    first = (rank * num_micros + micro) * size
    inputs, targets = batch(number)
    return inputs[first : first + size], targets[first : first + size]


def adamw(params, **options) -> torch.optim.Optimizer:
    """Adam in torch operations, without chunks and compiled kernels: the engine must give the same bits.

    It rounds more finely than torch.optim; tests/pstar/optim/test_hybrid_adam.py compares the two with a tolerance.
    """
    return pstar.HybridAdam(params, implementation="torch", **options)


def oracle(num_steps: int, num_micros: int = 1, clip: float = CLIP,
           model_func=Toy) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """(losses, final weights, gradient norms) of plain PyTorch on one process."""
    torch.manual_seed(0)
    model = model_func()
    optimizer = adamw(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(num_micros):
            loss = model(*share(step, 0, 1, micro, num_micros)) / num_micros
            loss.backward()
            total += loss.item()
        norms.append(clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(total)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}, norms


def plain_run(model_func, loss_of, num_steps: int, optimizer_class=adamw) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, final weights) of plain PyTorch on one process; loss_of(model, step) gives a step's loss."""
    torch.manual_seed(0)
    model = model_func()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, losses = optimizer_class(trained, lr=LR, weight_decay=WEIGHT_DECAY), []
    for step in range(num_steps):
        torch.manual_seed(step)    # for dropout
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        clip_grad_norm_(trained, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def config(**keys) -> dict:
    """A configuration with the oracle's optimizer."""
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
    return {"optimizer": adamw, "gradient_clipping": CLIP} | keys


def build(model_func=Toy, **keys) -> tuple[pstar.Engine, pstar.optim.chunked_adam.ChunkedAdam]:
    torch.manual_seed(0)
    return pstar.initialize_engine(model_func, 0, config(**keys))


def losses_of_both(plain, oracle, model, optimizer, loss_of, num_steps: int,
                   before=lambda model, step: None) -> Iterator[tuple[float, float]]:
    """Trains `plain` with the optimizer `oracle`, and the engine with the same dropout; yields both losses of each step.

    Among several ranks each has rows of its own: those of another step. All draw the same random numbers: a model that
    leaves layers out must leave out the same ones on all ranks.
    """
    params = [param for group in oracle.param_groups for param in group["params"]]
    rank, num_ranks = ranks()
    for seed, step in enumerate(range(rank, num_steps * num_ranks, num_ranks)):
        torch.manual_seed(seed)
        oracle.zero_grad()
        before(plain, step)
        expected = loss_of(plain, step)
        expected.backward()
        average_gradients(params, num_ranks)
        clip_grad_norm_(params, CLIP)
        oracle.step()
        torch.manual_seed(seed)
        optimizer.zero_grad()
        before(model, step)
        loss = loss_of(model, step)
        model.backward(loss)
        optimizer.step()
        yield expected.item(), loss.item()


def ranks() -> tuple[int, int]:
    """(this rank, number of ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def average_gradients(params, num_ranks: int) -> None:
    """Sets each gradient to its mean over the ranks: exact for two, whose sum does not depend on the order."""
    for param in params if num_ranks > 1 else []:
        has = torch.tensor(param.grad is not None)
        dist.all_reduce(has, dist.ReduceOp.MAX)
        if has:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= num_ranks


def compare(model_func, loss_of, num_steps: int, before=lambda model, step: None, **keys) -> pstar.Engine:
    """Trains in plain PyTorch and with the engine, by default with the smallest near budget; asserts equal losses, weights.

    loss_of(module or engine, step) gives a step's loss; before(module or engine, step) is called at each step.
    """
    torch.manual_seed(0)
    plain = model_func()
    params = list(plain.parameters())    # also frozen ones: a test may thaw them later
    oracle = adamw(params, lr=LR, weight_decay=WEIGHT_DECAY)
    model, optimizer = build(model_func, **{"near_budget": "min"} | keys)
    losses = losses_of_both(plain, oracle, model, optimizer, loss_of, num_steps, before)
    for step, (expected, loss) in enumerate(losses):
        assert loss == expected, f"step {step}"
    weights, _ = model.gather_state()    # to rank 0
    for name, value in plain.named_parameters() if ranks()[0] == 0 else ():
        assert torch.equal(weights[name], value), name
    return model


def train(model, optimizer, num_steps: int, rank: int = 0, num_ranks: int = 1, num_micros: int = 1,
          first: int = 0) -> list[float]:
    """This rank's losses of steps first, first + 1, ..."""
    losses = []
    for step in range(first, first + num_steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(num_micros):
            loss = model(*share(step, rank, num_ranks, micro, num_micros))
            model.backward(loss)
            total += (loss / num_micros).item()
        optimizer.step()
        losses.append(total)
    return losses
