"""Any torch.nn.Module: the engine against plain PyTorch, bit for bit, on models that it knows nothing of."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pstar
from pstar.modules.lazy_init import record, storage_key
from tests import toy

STEPS, LR = 4, 1e-3


def compare(model_func, inputs, loss_of, near: str = "min", chunk: int | str = 3_000) -> pstar.Engine:
    """Trains plainly and with the engine; asserts equal losses and weights, and that one step was traced.

    inputs(step) -> keyword arguments of the model; loss_of(output) -> scalar.
    """
    model = toy.compare(model_func, lambda model, step: loss_of(model(**inputs(step))), STEPS,
                        near_budget=near, default_chunk_size=chunk)
    assert model.schedule.num_traced == 1
    return model


def ids(step: int, vocab: int = 97, length: int = 7) -> torch.Tensor:
    return torch.randint(0, vocab, (3, length), generator=torch.Generator().manual_seed(step))


def hugging_face(kind: str):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.1)
        return lambda: transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        return lambda: transformers.BertForMaskedLM(transformers.BertConfig(**small))
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=2))


@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_hugging_face_models_unchanged(kind: str, near: str) -> None:
    def inputs(step: int) -> dict:
        return {"input_ids": ids(step), "labels": ids(step)}

    model = compare(hugging_face(kind), inputs, lambda out: out.loss, near)
    assert model.near.peak_bytes <= model.near.budget_bytes


@dataclass
class Out:
    first: torch.Tensor
    rest: dict


class Reused(nn.Module):
    """One layer applied three times, a parameter of the module itself around its children, results in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> Out:
        h = x * self.scale
        for _ in range(3):
            h = torch.tanh(self.layer(h)) * self.scale
        return Out(h, {"normed": (self.norm(h), None)})


def test_a_layer_used_three_times_and_results_in_a_dataclass() -> None:
    compare(Reused, lambda step: {"x": torch.randn(5, 8, generator=torch.Generator().manual_seed(step))},
            lambda out: (out.first.sum() + out.rest["normed"][0].pow(2).sum()), chunk=40)


class Convolutional(nn.Module):
    """Buffers that change in training, convolutions, an embedding that only some rows of are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6)
        self.conv = nn.Conv1d(6, 5, 3, padding=1)
        self.norm = nn.BatchNorm1d(5)
        self.gru = nn.GRU(5, 4, batch_first=True)
        self.head = nn.Bilinear(4, 4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(self.embed(tokens).transpose(1, 2)))).transpose(1, 2)
        out, _ = self.gru(h)
        return self.head(out[:, -1], out[:, 0]).pow(2).sum()


def test_convolutions_batch_norm_gru_and_bilinear() -> None:
    with pytest.warns(UserWarning, match="lazy start is not possible .* referenced weakly"):
        compare(Convolutional, lambda step: {"tokens": ids(step, 50)}, lambda out: out, chunk=100)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
                                    for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + torch.utils.checkpoint.checkpoint(block, h, use_reentrant=self.use_reentrant)
        return h.pow(2).sum()


class Borrowing(nn.Module):
    """Uses a child's parameter in its own forward while it is near: backward must fetch it again, not read stale bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        h = h @ self.embed.weight.T @ self.embed.weight
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h.pow(2).sum()


def test_a_parameter_borrowed_by_the_module_around_its_owner() -> None:
    compare(Borrowing, lambda step: {"tokens": ids(step, 50)}, lambda out: out, chunk=300)


@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_both_variants_of_activation_checkpointing(use_reentrant: bool, near: str) -> None:
    compare(lambda: Checkpointed(use_reentrant), lambda step: {"tokens": ids(step, 50)}, lambda out: out, near, chunk=700)


class Deep(nn.Module):
    """Forty layers, initialised twice as Hugging Face's models are: when made, and once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))
        self.register_buffer("steps", torch.arange(5.0) / 4)
        self.apply(lambda module: nn.init.trunc_normal_(module.weight) if isinstance(module, nn.Linear) else None)
        with torch.no_grad():
            self.layers[3].weight[5].zero_()          # a part of a parameter, after all
            self.layers[4].weight.mul_(0.5)
        nn.init.orthogonal_(self.layers[5].weight)
        nn.init.xavier_normal_(self.layers[6].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.steps.sum()).pow(2).sum()


def deep_inputs(step: int) -> dict:
    return {"x": torch.randn(3, 64, generator=torch.Generator().manual_seed(step))}


def test_lazy_start_makes_the_same_weights_and_never_holds_the_model() -> None:
    torch.manual_seed(7)
    plain = Deep()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    module, recipe = record(Deep)
    assert all(tensor.device.type == "meta" for tensor in module.parameters())
    expected, made = dict(plain.named_parameters()) | dict(plain.named_buffers()), []
    wanted = {storage_key(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}

    def take(name: str, memory: torch.Tensor) -> None:
        assert torch.equal(memory.view(torch.float32), expected[name].flatten()), name
        made.append(name)

    recipe.replay(wanted, take)
    assert sorted(made) == sorted(expected)
    assert torch.equal(torch.get_rng_state(), state), "the random generator has the state after a plain start"
    assert recipe.peak_bytes < sum(param.nbytes for param in plain.parameters()) / 8
    compare(Deep, deep_inputs, lambda out: out)


def test_a_model_that_reads_its_values_in_init_starts_without_lazy_init_and_warns() -> None:
    class Looking(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.scale = float(self.layers[0].weight.detach().std())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    with pytest.warns(UserWarning, match="lazy start is not possible"):
        compare(Looking, deep_inputs, lambda out: out)
    with pytest.warns(UserWarning, match="lazy start is not possible"):
        assert pstar.plan_engine(Looking).layout.num_params > 0, "it can be planned as well"


def test_a_compiled_engine_trains_on_where_all_model_data_fit_next_to_the_activations() -> None:
    """Its fourth step is the first resident one. torch.compile does not trace the engine's code, which moves parameters."""
    torch._dynamo.reset()
    model, optimizer = toy.build(near_memory="1GiB")
    called = torch.compile(model, backend="aot_eager")
    losses = []
    for step in range(6):
        loss = called(*toy.batch(step))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == toy.oracle(6)[0] and model.ledger.step_bytes.total() == 0


@pytest.mark.parametrize("what", ["block.compile()", "torch.compile(block)", "torch.compile(engine)"])
def test_torch_compile_gives_the_same_bits_and_compiles_the_code_between_the_hooks(what: str) -> None:
    """With the backend aot_eager, whose graphs have autograd of their own but the kernels of plain PyTorch."""
    def model_func() -> toy.Toy:
        model = toy.Toy()
        for index, block in enumerate(model.blocks):
            if what == "block.compile()":
                block.compile(backend="aot_eager")
            elif what == "torch.compile(block)":
                model.blocks[index] = torch.compile(block, backend="aot_eager")
        return model

    losses, weights, _ = toy.oracle(4)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, optimizer = toy.build(model_func, near_budget="min", default_chunk_size=5_000)
    called = torch.compile(model, backend="aot_eager") if what == "torch.compile(engine)" else model
    got = []
    for step in range(4):
        optimizer.zero_grad()
        loss = called(*toy.batch(step))
        model.backward(loss)
        optimizer.step()
        got.append(loss.item())
    assert got == losses and torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    trained = {name.replace("_orig_mod.", ""): value for name, value in model.gather_state()[0].items()}
    assert all(torch.equal(trained[name], value) for name, value in weights.items())
    assert model.ledger.moves["near to far"] > 0 and model.schedule.num_traced == 1
