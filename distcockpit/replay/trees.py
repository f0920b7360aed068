"""Tensors inside whatever modules take and return: tuples, dicts, dataclasses, and torch's own pytrees."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

PLAIN = (int, bool, float, str, type(None), torch.dtype, torch.device, torch.Size)
"""Common arguments of functions that hold no tensors."""


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in a fixed order."""
    found: list[Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[Tensor]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:  # usually arguments; torch's own tree traversal is slow
        items = tree
    elif kind is dict:
        items = tree.values()
    elif isinstance(tree, Tensor):
        found.append(tree)
        return
    elif isinstance(tree, PLAIN):
        return
    else:
        found.extend(_tensors(tree))
        return
    for item in items:
        if type(item) is Tensor:
            found.append(item)
        elif type(item) not in PLAIN:
            _add_tensors(item, found)


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, MutableMapping):  # one that torch does not know as a pytree, such as a UserDict
            yield from _tensors(list(leaf.values()))


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the tree with every tensor replaced, in the order of `tensors`; the old tree is not modified."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) is tuple:
        return tuple([map_tensors(change, item) for item in tree])
    if isinstance(tree, PLAIN):
        return tree
    if type(tree) is dict:
        return {key: map_tensors(change, item) for key, item in tree.items()}

    def exchange(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            new = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(new, field.name, map_tensors(change, getattr(leaf, field.name)))
            return new
        if isinstance(leaf, MutableMapping):
            mapping = copy.copy(leaf)
            for key, value in leaf.items():
                mapping[key] = map_tensors(change, value)
            return mapping
        return leaf

    return tree_map(exchange, tree)


def memory_of(tensor: Tensor) -> int:
    """Return an id shared by tensors with the same memory: its address, or for tensors without plain memory, `id`."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, nested, masked, ...
        return id(tensor)
