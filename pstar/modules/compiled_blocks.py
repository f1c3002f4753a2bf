"""Compiled blocks: the repeated modules that torch.compile compiles, each between the engine's hooks.

Without compilation each module acquires its own parameters (chunks/hooks.py). Hooks inside of a compiled region would end
its graph. So a compiled block acquires all parameters below it, by hooks outside of the region, and the modules inside of it
have no hooks. torch.compile sees the parameters as inputs of the graph. It checks their shapes, strides and dtypes, never
their addresses: a block whose chunks have moved, and the next block of the same shapes, run the same compiled code.

What autograd saves of a compiled block goes through the same hooks for saved tensors as in an eager one.
"""

from collections.abc import Iterator, Mapping

import torch

from pstar.errors import ConfigError
from pstar.modules.scope import parameters_of, used_by

NO_BLOCKS = "none"
LARGEST_LIST = "block"


def find_blocks(module: torch.nn.Module, compile: str | list[str]) -> dict[str, torch.nn.Module]:
    """The modules to compile, by qualified name.

    Args:
        module: the model.
        compile: "none"; "block" for the elements of the torch.nn.ModuleList with most parameters; or names of classes. A
            block inside a block is compiled with the outer one.

    Raises ConfigError if the model has none of them.
    """
    if compile == NO_BLOCKS:
        return {}
    if compile == LARGEST_LIST:
        lists = [(sum(param.numel() for param in parameters_of(child)), name) for name, child in module.named_modules()
                 if isinstance(child, torch.nn.ModuleList) and all(map(_has_forward, child))]
        if not lists or not max(lists)[0]:
            raise ConfigError("compile is block, but the model has no torch.nn.ModuleList of repeated modules: name their "
                              "classes, as [\"Block\"], or set compile to none")
        name = max(lists, key=lambda item: item[0])[1]
        repeated = set(map(id, module.get_submodule(name)))
        found = {name: child for name, child in module.named_modules() if id(child) in repeated}
    else:
        found = {name: child for name, child in module.named_modules() if name and type(child).__name__ in compile}
        if missing := sorted(set(compile) - {type(child).__name__ for child in found.values()}):
            raise ConfigError(f"compile names {missing[0]}, but no module of the model has this class: it has "
                              f"{', '.join(sorted({type(child).__name__ for child in module.modules()}))}")
    return {name: child for name, child in found.items()
            if not any(name.startswith(other + ".") for other in found if other != name)}


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def owners(module: torch.nn.Module, blocks: Mapping[str, torch.nn.Module]
           ) -> Iterator[tuple[str, torch.nn.Module, list[torch.nn.Parameter]]]:
    """(name, module, the parameters that it acquires before its forward) of each module that has hooks."""
    inside = {id(child) for block in blocks.values() for child in block.modules()}
    whole = {id(block) for block in blocks.values()}
    for name, child in module.named_modules():
        if id(child) in whole:
            yield name, child, list(parameters_of(child))
        elif id(child) not in inside:
            yield name, child, used_by(child)


def compile_blocks(blocks: Mapping[str, torch.nn.Module]) -> None:
    """Compiles the forward of each block, when it is first called. Names of parameters and modules stay.

    Hooks, also those of the program, stay outside: Module.compile() would give them to the compiler.
    """
    for block in blocks.values():
        block.forward = torch.compile(block.forward)
