"""Diagonals and traces of the curvature at weights that act on many places: kernels of convolutions, linear layers.

BackPACK forms the products of all samples and columns of the factorised matrix at once, each as large as the kernel:
708 MB for the second convolution of the network "3c3d" with 10 classes and 32 samples. Here they are formed a few
samples and columns at a time, and for a trace alone often not at all.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from backpack.utils.conv import unfold_input
from torch import Tensor, nn

from distcockpit.replay.devices import is_host

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ELEMENTS = 2**24, 2**19  # of the products formed at once: elsewhere, and on a CPU, to stay in a cache
DOUBLE = 64, 2  # how much longer a product in float64 takes than one in float32, at most: elsewhere, and on a CPU


def weight_diagonal(_: Any, module: Any, g_inp: Any, g_out: Any, backpropagated: Any) -> Tensor:
    """Return the diagonal at a weight, for the method ``weight`` of BackPACK's extensions.

    Args:
        module: The convolution, or the linear layer.
        g_inp: Not needed.
        g_out: Not needed.
        backpropagated: A matrix S with ``S S^T`` the curvature at the output, ``[V, N, *output]``; or a dictionary of
            several with their signs, which add up to it.
    """
    x = _inputs(module)
    n, groups, i, _ = x.shape
    o = len(module.weight) // groups
    found = module.weight.new_zeros((groups, o, i), dtype=torch.float64)  # a running sum of hundreds of pieces
    most = ELEMENTS[is_host(x.device)] // max(found.numel(), x[0].numel())
    for s, sign in _matrices(module, backpropagated):
        size = max(1, min(n, most // len(s)))
        width = max(1, most // size)
        for start, first in product(range(0, n, size), range(0, len(s), width)):
            samples = slice(start, start + size)
            products = s[first : first + width, samples] @ x[samples].mT  # [v, n, g, O, I]
            found.add_(products.square_().sum((0, 1)), alpha=sign)
    return found.to(module.weight.dtype).view(module.weight.shape)


def weight_trace(_: Any, module: Any, g_inp: Any, g_out: Any, backpropagated: Any) -> Tensor:
    r"""Return the sum of the diagonal at a weight, float64; arguments as for `weight_diagonal`.

    With the input $X_n$ ``[I, L]`` of a sample at its L places, it is $\sum_{v,n} |S_{vn} X_n^\top|^2 = \sum_n
    \langle \sum_v S_{vn}^\top S_{vn}, X_n^\top X_n \rangle$, for which no product of the weight's size is formed. The
    matrices of L x L are formed in float64, because what is added up may cancel.
    """
    x, matrices = _inputs(module), _matrices(module, backpropagated)
    n, groups, i, places = x.shape
    o = len(module.weight) // groups
    rows, on_host = o * sum(len(s) for s, _ in matrices), is_host(x.device)
    if DOUBLE[on_host] * places * (rows + i) > rows * i:
        return weight_diagonal(_, module, g_inp, g_out, backpropagated).sum(dtype=torch.float64)
    found = x.new_zeros((), dtype=torch.float64)
    for s, sign in matrices:
        size = max(1, ELEMENTS[on_host] // (groups * places * max(len(s) * o, i, places)))
        for start in range(0, n, size):
            samples = slice(start, start + size)
            outputs = s[:, samples].movedim(0, 2).flatten(2, 3)  # [n, g, V O, L]
            found.add_(_gram(x[samples]).flatten() @ _gram(outputs).flatten(), alpha=sign)
    return found


def _gram(factor: Tensor) -> Tensor:
    """Return ``factor^T factor`` for each sample and group, float64 ``[n, groups, L, L]``."""
    if factor.shape[3] == 1:
        return torch.linalg.vector_norm(factor, dim=2, keepdim=True, dtype=torch.float64).square()
    wide = factor.double()
    return wide.mT @ wide


def _inputs(module: Any) -> Tensor:
    """Return what the weight of each group is multiplied with, ``[N, groups, I, L]``."""
    x: Tensor = module.input0
    if isinstance(module, nn.Linear):
        return x.unsqueeze(1).flatten(1, -2).mT.unsqueeze(1)
    x = unfold_input(module, x)  # [N, groups I, L]
    return x.reshape(len(x), module.groups, -1, x.shape[2])


def _matrices(module: Any, backpropagated: Any) -> list[tuple[Tensor, float]]:
    """Return the matrices at the output, ``[V, N, groups, O, L]``, with their signs."""
    is_one = isinstance(backpropagated, Tensor)
    matrices = [backpropagated] if is_one else backpropagated["matrices"]
    signs = [1.0] if is_one else backpropagated["signs"]
    if isinstance(module, nn.Linear):
        matrices = [s.unsqueeze(2).flatten(2, -2).mT.unsqueeze(2) for s in matrices]
    else:
        matrices = [s.reshape(*s.shape[:2], module.groups, s.shape[2] // module.groups, -1) for s in matrices]
    return list(zip(matrices, signs, strict=True))
