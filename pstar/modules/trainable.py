"""Whether the engine can train a model: what it cannot train is named before anything starts."""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch.utils._pytree import tree_leaves

from pstar.errors import ConfigError
from pstar.modules.scope import mode_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_trainable(module: torch.nn.Module) -> None:
    """Raises ConfigError for scripted modules, sparse embeddings, and parameters that a chunk cannot hold."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ConfigError(f"module {name or 'of model_func'} is scripted (torch.jit) and takes no hooks: "
                              "give the engine the module that was scripted")
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise ConfigError(f"embedding {name or 'of model_func'} makes sparse gradients, which a chunk cannot hold: make "
                              "it with sparse=False; use_cpu_embedding keeps a large table in host memory")
    for name, param in module.named_parameters():
        if torch.nn.parameter.is_lazy(param):
            raise ConfigError(f"parameter {name} has no shape yet, as in torch's lazy modules: call the model once in "
                              "model_func, under torch.no_grad()")
        dtype = str(param.dtype).removeprefix("torch.")
        if not param.is_floating_point():
            raise ConfigError(f"parameter {name} is {dtype}: the engine trains floating numbers only; make it a buffer, or "
                              "of a complex one its view_as_real")
        if param.dtype not in DTYPES:
            raise ConfigError(f"parameter {name} is {dtype}, which the engine would round: it computes in fp32, bf16 or "
                              "fp16; call model.float() in model_func")
    for first, second in _overlapping(dict(module.named_parameters())):
        raise ConfigError(f"parameters {first} and {second} share their memory, and in chunks each would have its own: make "
                          "them one Parameter (second.weight = first.weight), or give one of them its own memory")
    check_aliases(module, itertools.chain(module.named_buffers(), attributes(module)))


def check_aliases(module: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigError if one of these named tensors shares its memory with a trained parameter, which moves into a chunk:
    the tensor would keep the initial values. A parameter itself may be among them."""
    params = {name: param for name, param in module.named_parameters() if param.requires_grad and mode_of(param) is None}
    known = set(map(id, params.values()))
    storages = {param.untyped_storage()._cdata for param in params.values()}
    for alias, tensor in tensors:
        if id(tensor) in known or tensor.layout != torch.strided or tensor.untyped_storage()._cdata not in storages:
            continue
        for name, param in params.items():
            if any(_overlapping({name: param, alias: tensor})):
                raise ConfigError(f"{alias} shares the memory of parameter {name}, which moves into a chunk, and would keep "
                                  "the initial values: use the parameter itself in forward, or a clone of it")


def attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the tensors in attributes of all modules, also in lists, tuples and dicts there."""
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            for leaf in tree_leaves(value) if name not in ("_parameters", "_buffers", "_modules") else ():
                if isinstance(leaf, torch.Tensor):
                    yield f"{prefix}.{name}" if prefix else name, leaf


def check_made(module: torch.nn.Module) -> None:
    """Raises ConfigError for a parameter or buffer to which model_func, called without being recorded, gave no values."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.device.type == "meta":
            raise ConfigError(f"{name} has no values, because model_func makes it on torch's meta device: make the model "
                              "without it (torch.device('meta'), init_empty_weights), the engine's start is lazy anyway")


def _overlapping(params: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors with common elements, of which at least one is trained."""
    by_storage: dict[int, list[tuple[str, range]]] = {}
    for name, param in params.items():
        if param.numel():
            begin = param.storage_offset() * param.itemsize
            last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            place = range(begin, begin + (last + 1) * param.itemsize)
            by_storage.setdefault(param.untyped_storage()._cdata, []).append((name, place))
    for parts in by_storage.values():
        for (first, here), (second, there) in itertools.combinations(parts, 2):
            common = here.start < there.stop and there.start < here.stop
            if common and (params[first].requires_grad or params[second].requires_grad):
                yield first, second
