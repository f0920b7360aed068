"""Diagonals of the curvature at the kernels of convolutions, a few samples and columns at a time.

BackPACK forms the products of all samples and columns of the factorised matrix at once, each as large as the kernel:
708 MB for the second convolution of the network "3c3d" with 10 classes and 32 samples.
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


def weight_diagonal(_: Any, module: Any, g_inp: Any, g_out: Any, backpropagated: Any) -> Tensor:
    """Return the diagonal at a kernel, for the method ``weight`` of BackPACK's extensions.

    Args:
        module: The convolution.
        g_inp: Not needed.
        g_out: Not needed.
        backpropagated: A matrix S with ``S S^T`` the curvature at the output, ``[V, N, *output]``; or a dictionary of
            several with their signs, which add up to it.
    """
    is_one = isinstance(backpropagated, Tensor)
    matrices = [backpropagated] if is_one else backpropagated["matrices"]
    signs = [1.0] if is_one else backpropagated["signs"]
    groups, x = module.groups, unfold_input(module, module.input0)
    n, places = x.shape[0], x.shape[2]
    x = x.reshape(n, groups, -1, places).transpose(2, 3)  # [N, g, L, C K]
    shape = groups, module.weight.shape[0] // groups, x.shape[3]
    found = module.weight.new_zeros(shape, dtype=torch.float64)  # a running sum of hundreds of pieces
    most = ELEMENTS[is_host(x.device)] // max(found.numel(), x[0].numel())
    for matrix, sign in zip(matrices, signs, strict=True):
        s = matrix.reshape(len(matrix), n, groups, -1, places)
        size = max(1, min(n, most // len(s)))
        width = max(1, most // size)
        for start, first in product(range(0, n, size), range(0, len(s), width)):
            samples = slice(start, start + size)
            products = s[first : first + width, samples] @ x[samples]  # [v, n, g, O, C K]
            found.add_(products.square_().sum((0, 1)), alpha=sign)
    return found.to(module.weight.dtype).view(module.weight.shape)
