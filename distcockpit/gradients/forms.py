"""The functions whose calls have a closed form, and which of their arguments it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distcockpit.gradients.convolution import ConvolutionRule, Sizes
from distcockpit.gradients.embedding import EmbeddingRule
from distcockpit.gradients.linear import LinearRule
from distcockpit.gradients.recording import Given, Leaf, Made, Recording
from distcockpit.gradients.scale import ScaleRule
from distcockpit.gradients.uses import UseRule

LINEAR, TRANSPOSED = LinearRule(), LinearRule(transposed=True)


@dataclass(frozen=True)
class Form:
    """A closed form for one call.

    Args:
        rule: The rule with the formulas.
        names: The parameters that it serves, by local name.
        source: Index of the batch tensor that is x.
    """

    rule: UseRule
    names: Mapping[str, str]
    source: int


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call by name, with the batch tensors it was given and the shape of its output."""

    named: Mapping[str, Any]
    given: Sequence[Tensor]
    output: torch.Size

    def __getitem__(self, name: str) -> Any:
        return self.named.get(name)

    def tensor(self, name: str) -> Tensor | None:
        """Return an argument that is a tensor, but not a parameter."""
        found = self[name]
        return self.given[found.position] if isinstance(found, Given) else None

    def shape(self, name: str) -> torch.Size:
        """Return the shape of an argument that is a parameter or another tensor."""
        found = self[name]
        return found.shape if isinstance(found, Leaf) else self.given[found.position].shape


Found = tuple[UseRule, dict[str, Any], Any]
"""The rule, and what stands for its parameters and for x."""


def closed_form(recording: Recording, given: Sequence[Tensor], output: Any) -> Form | None:
    """Return the closed form that serves a call, if there is one.

    Args:
        recording: The call.
        given: The batch tensors in it, and the constants.
        output: What it returned.
    """
    known = FUNCTIONS.get(recording.function)
    if known is None or not isinstance(output, Tensor):
        return None
    names, form = known
    positional = dict(zip(names, recording.args, strict=False))
    found = form(_Arguments(positional | recording.kwargs, given, output.shape))
    if found is None:
        return None
    rule, places, x = found
    leaves = {local: part.name for local, part in places.items() if isinstance(part, Leaf)}
    if not isinstance(x, Given) or any(isinstance(part, Made) for part in places.values()):
        return None
    serves_all = sorted(leaves.values()) == sorted(recording.parameters)
    return Form(rule, leaves, x.position) if serves_all else None


def _linear(call: _Arguments) -> Found | None:
    weight, rule = _matrix(call["weight"], LINEAR)
    return rule, {"weight": weight, "bias": call["bias"]}, call["input"]


def _product(call: _Arguments) -> Found | None:
    weight, rule = _matrix(call["other"], TRANSPOSED)
    x = call.tensor("input")
    if x is None or x.dim() < 2 or not isinstance(weight, Leaf) or len(weight.shape) != 2:
        return None
    return rule, {"weight": weight}, call["input"]


def _sum_and_product(call: _Arguments) -> Found | None:
    weight, rule = _matrix(call["other"], TRANSPOSED)
    if (call["beta"], call["alpha"]) != (None, None) or len(call.shape("bias") if call["bias"] else ()) != 1:
        return None
    return rule, {"weight": weight, "bias": call["bias"]}, call["input"]


def _matrix(part: Any, rule: LinearRule) -> tuple[Any, LinearRule]:
    """Return a matrix, untransposed if it was transposed, with the rule for the argument as it was."""
    if isinstance(part, Made) and part.call.function in TRANSPOSING:
        argument, *axes = part.call.args
        swaps = {axis % 2 for axis in axes} in (set(), {0, 1})
        if isinstance(argument, Leaf) and len(argument.shape) == 2 and swaps:
            return argument, TRANSPOSED if rule is LINEAR else LINEAR
    return part, rule


def _embedding(call: _Arguments) -> Found | None:
    weight, padding = call["weight"], call["padding_idx"]
    if call["max_norm"] or call["scale_grad_by_freq"] or not isinstance(weight, Leaf):
        return None
    n_rows = weight.shape[0]
    return EmbeddingRule(n_rows, padding and padding % n_rows), {"weight": weight}, call["input"]


def _convolution(call: _Arguments, *, transposed: bool = False) -> Found | None:
    weight, bias = call["weight"], call["bias"]
    if isinstance(weight, Made):
        return None
    shape = call.shape("weight")
    n = len(shape) - 2
    x = call.tensor("input")
    if x is None or x.dim() != n + 2:
        return None
    stride, dilation = _each(call["stride"], 1, n), _each(call["dilation"], 1, n)
    padding = call["padding"]
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
        sides = tuple((size // 2, size - size // 2) for size in whole)
    else:
        sides = tuple((size, size) for size in _each(0 if padding == "valid" else padding, 0, n))
    further = _each(call["output_padding"], 0, n) if transposed else None
    rule = ConvolutionRule(shape, stride, sides, dilation, call["groups"] or 1, further)
    return rule, {"weight": weight, "bias": bias}, call["input"]


def _each(value: Any, default: int, n: int) -> Sizes:
    """Return one number per spatial axis."""
    value = default if value is None else value
    return (value,) * n if isinstance(value, int) else tuple(value) * (n // len(value))


def _layer_norm(call: _Arguments) -> Found | None:
    shape, options = tuple(call["normalized_shape"]), _given(call, "eps")
    rule = ScaleRule(shape, lambda x: F.layer_norm(x, shape, **options))
    return rule, {"weight": call["weight"], "bias": call["bias"]}, call["input"]


def _rms_norm(call: _Arguments) -> Found | None:
    shape, options = tuple(call["normalized_shape"]), _given(call, "eps")
    return ScaleRule(shape, lambda x: F.rms_norm(x, shape, **options)), {"weight": call["weight"]}, call["input"]


def _group_norm(call: _Arguments) -> Found | None:
    groups, options = call["num_groups"], _given(call, "eps")
    return _of_channels(call, lambda x: F.group_norm(x, groups, **options))


def _batch_norm(call: _Arguments) -> Found | None:
    mean, variance, options = call.tensor("running_mean"), call.tensor("running_var"), _given(call, "eps")
    if call["training"] or mean is None or variance is None:
        return None
    return _of_channels(call, lambda x: F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), **options))


def _instance_norm(call: _Arguments) -> Found | None:
    options = _given(call, "eps")
    if call["use_input_stats"] is False:
        return None
    return _of_channels(call, lambda x: F.instance_norm(x, **options))


def _of_channels(call: _Arguments, normalise: Callable[[Tensor], Tensor]) -> Found:
    """Serve a normalisation whose parameters belong to the axis after the batch."""
    shape = (call.output[1], *[1] * (len(call.output) - 2))
    rule = ScaleRule(shape, normalise, whole=True)
    return rule, {"weight": call["weight"], "bias": call["bias"]}, call["input"]


def _given(call: _Arguments, *names: str) -> dict[str, Any]:
    """Return the options that the call specifies."""
    return {name: call[name] for name in names if name in call.named}


def _elementwise(call: _Arguments, local: str, sign: float = 1) -> Found | None:
    first, second = call["input"], call["other"]
    if call["alpha"] is not None or call["out"] is not None:
        return None
    x, p, sign = (first, second, sign) if isinstance(second, Leaf) else (second, first, 1)
    if not isinstance(p, Leaf) or not isinstance(x, Given) or call.given[x.position].shape != call.output:
        return None
    shape = tuple(p.shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return ScaleRule(shape, sign=sign), {local: p}, x


TRANSPOSING = frozenset({
    torch.t,
    torch.transpose,
    *(getattr(Tensor, name) for name in ("t", "transpose")),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
})

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_BACK = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_TWO = ("input", "other")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_INSTANCE_NORM = (*_BATCH_NORM[:5], "use_input_stats", "momentum", "eps")
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")

FUNCTIONS: dict[Any, tuple[Sequence[str], Callable[[_Arguments], Found | None]]] = {
    F.linear: (("input", "weight", "bias"), _linear),
    F.embedding: (_EMBEDDING, _embedding),
    F.layer_norm: (("input", "normalized_shape", "weight", "bias", "eps"), _layer_norm),
    F.rms_norm: (("input", "normalized_shape", "weight", "eps"), _rms_norm),
    F.group_norm: (("input", "num_groups", "weight", "bias", "eps"), _group_norm),
    F.batch_norm: (_BATCH_NORM, _batch_norm),
    F.instance_norm: (_INSTANCE_NORM, _instance_norm),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (_CONVOLUTION, _convolution)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), (_BACK, partial(_convolution, transposed=True))
    ),
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm), (_TWO, _product)),
    **dict.fromkeys((torch.addmm, Tensor.addmm), (("bias", "input", "other", "beta", "alpha"), _sum_and_product)),
    **dict.fromkeys((torch.add, Tensor.add), (_TWO, partial(_elementwise, local="bias"))),
    **dict.fromkeys((torch.sub, Tensor.sub), (_TWO, partial(_elementwise, local="bias", sign=-1))),
    **dict.fromkeys((torch.mul, Tensor.mul), (_TWO, partial(_elementwise, local="weight"))),
}
"""By function: the names of its arguments, in order, and its closed form."""
