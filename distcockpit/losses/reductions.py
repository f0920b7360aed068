"""Calls that add up the terms of a loss: functional losses, sums, means, selections, and products with weights."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn._reduction import legacy_get_string

from distcockpit.gradients.uses import Axis
from distcockpit.losses.captured import ForwardPass
from distcockpit.replay.trees import map_tensors, tensors
from distcockpit.world import Pending

OF_CLASSES = {F.cross_entropy, F.nll_loss, getattr(F, "linear_cross_entropy", F.cross_entropy)}
"""Losses whose target may be classes, some of which may be ignored or weighted; the last one came after torch 2.11."""

LOSSES = {
    function: inspect.signature(function)
    for function in (getattr(F, name) for name in dir(F) if not name.startswith("_"))
    if inspect.isfunction(function) and "reduction" in inspect.signature(function).parameters
}
"""The losses of ``torch.nn.functional`` that reduce their terms."""


_numbers = itertools.count()


def number_of(node: Any) -> int:
    """Return a number that identifies a node of the autograd graph, also across helper threads; keeps nothing alive."""
    known: dict[str, int] = node.metadata
    if "distcockpit" not in known:
        known["distcockpit"] = next(_numbers)
    return known["distcockpit"]


@dataclass(eq=False)
class Reduction:
    """A call that added up terms."""

    name: str  # of the function
    terms: Tensor  # what was added up; for a loss, its output with reduction="none"
    divides_by: Pending | float  # the divisor of the sum
    adds: bool  # whether it is a sum or a mean of all terms
    is_sum: bool = True  # whether it divides by nothing itself
    is_product: bool = False  # whether it multiplies them by weights first
    weights: Pending | None = (
        None  # the factor of a sum's terms, if it is one number; the sum of the weights, if there are several
    )
    again: Callable[[], Tensor] | None = None  # the terms of a loss, with their graph
    edge: tuple[int, int] | None = None  # where the terms are in the graph; those of a loss are not in it
    inside: ForwardPass | None = None  # the pass in which it was called
    key: str = ""  # its key inside the model
    call: int = 0  # how many such calls came before it in the pass
    given: Sequence[tuple[torch.Size, torch.Size]] = ()  # the shapes of its inputs inside the model
    axis: Axis = None  # the batch axis of the terms, if it is inside the model

    @property
    def divisor(self) -> float:
        """The divisor of the sum; waits for the device."""
        return self.divides_by if isinstance(self.divides_by, float) else float(self.divides_by.result()[0])


SUMS = (torch.sum, Tensor.sum, torch.nansum, Tensor.nansum)
MEANS = (torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean)


def adds_up(args: Any, kwargs: Any, result: Any) -> bool:
    """True if a differentiable call returned fewer elements than it was given."""
    made = [t for t in tensors(result) if t.grad_fn is not None and not t.is_nested]
    given = [t for t in tensors((args, kwargs)) if t.requires_grad and not t.is_nested]
    return bool(made) and any(_is_less(made, t) for t in given)


def _is_less(made: Sequence[Tensor], given: Tensor) -> bool:
    """True if the smallest of these has fewer elements, or, for a single element, no axes any more."""
    least = min(made, key=Tensor.numel)
    return given.numel() > least.numel() or (given.dim() > 0 and not least.dim())


def drops_batch(args: Any, kwargs: Any, result: Any, n: int) -> bool:
    """True if a call inside the model, with n samples, turned something with a batch axis into something without."""
    made = [t for t in tensors(result) if t.is_floating_point() and not t.is_nested]
    if not made or any(n in t.shape for t in made):
        return False
    given = [t for t in tensors((args, kwargs)) if t.is_floating_point() and not t.is_nested]
    return any(_is_less(made, t) and t.numel() % n == 0 for t in given)


def terms_inside(
    function: Any, args: Any, kwargs: Any, result: Any, n: int
) -> tuple[str, Tensor, list[Tensor], Reduction | None] | None:
    """Return what a call inside the model, with n samples, added up.

    Returns:
        The key of such calls, the terms, the tensors they were computed from, and the reduction if terms were added up;
        ``None`` for other calls.
    """
    if function in LOSSES:
        reduction = _of_loss(function, args, kwargs)
        terms, given = result if reduction is None else reduction.terms, tensors((args, kwargs))
    elif drops_batch(args, kwargs, result, n):
        reduction = reduction_of(function, args, kwargs, result)
        assert reduction is not None
        terms, given = reduction.terms, [reduction.terms]
    else:
        return None
    return f"terms of {getattr(function, '__name__', function)}, {terms.dim()} axes", terms, given, reduction


def reduction_of(function: Any, args: Any, kwargs: Any, result: Any) -> Reduction | None:
    """Return what a call added up; ``None`` for a loss that adds up nothing."""
    if function in LOSSES:
        return _of_loss(function, args, kwargs)
    given = [t for t in tensors((args, kwargs)) if t.is_floating_point() and not t.is_nested]
    made, terms = tensors(result)[0], max([t for t in given if t.requires_grad] or given, key=Tensor.numel)
    edge = None if terms.grad_fn is None else (number_of(terms.grad_fn), terms.output_nr)
    adds = made.dim() == 0 and function in (*SUMS, *MEANS)
    name, is_mean = getattr(function, "__name__", str(function)), adds and function in MEANS
    divisor: Pending | float = float(terms.numel()) if is_mean else 1.0
    if is_mean and name == "nanmean":
        divisor = Pending((~terms.detach().isnan()).sum(dtype=torch.float64).reshape(1))
    reduction = Reduction(name, terms, divisor, adds, not is_mean, edge=edge)
    if adds and not is_mean:
        reduction.weights = _weights_of(terms)
    return reduction


def _weights_of(terms: Tensor) -> Pending | None:
    """Return the factor of terms multiplied or divided by a constant number, and the sum of several weights."""
    node: Any = terms.grad_fn
    name = "" if node is None else node.name()
    if not name.startswith(("MulBackward", "DivBackward")):
        return None
    first, second = (upstream is not None for upstream, _ in node.next_functions)
    if first == second or (second and name.startswith("Div")):
        return None
    weights = node._saved_other if first else node._saved_self
    weights = weights.detach().double()
    weights = weights.reciprocal() if name.startswith("Div") else weights
    factor = weights.where(weights != 0, 1.0) if weights.dim() == 0 else weights.new_ones(())
    whole = weights.sum() if weights.dim() else weights.new_zeros(())
    return Pending(torch.stack([factor, whole]))


def arguments_of_loss(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return the input and target of a loss that is called without options."""
    bound = LOSSES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    first, second, *options = bound.arguments
    defaults = LOSSES[function].parameters
    if any(
        isinstance(bound.arguments[name], Tensor) or bound.arguments[name] != defaults[name].default for name in options
    ):
        return None
    return bound.arguments[first], bound.arguments[second]


def _of_loss(function: Any, args: Any, kwargs: Any) -> Reduction | None:
    """Return the reduction of a loss of `torch.nn.functional`."""
    bound = LOSSES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = legacy_get_string(given["size_average"], given["reduce"])
        given |= {"size_average": None, "reduce": None}
    if reduction == "none":
        return None
    given["reduction"] = "none"
    kept = map_tensors(lambda t: t if t.requires_grad else t.clone(), (bound.args, bound.kwargs))
    weights: Tensor | None = None
    if function is F.ctc_loss and reduction == "mean":
        lengths = torch.as_tensor(given["target_lengths"])
        weights = lengths.clamp(min=1).double().reciprocal()

    def again() -> Tensor:
        terms = function(*kept[0], **kept[1])
        return terms if weights is None else terms * weights.to(terms)

    with torch.no_grad():
        terms = again()
    divisor = 1.0 if reduction == "sum" else _mean_divisor(function, reduction, given, terms)
    return Reduction(function.__name__, terms, divisor, True, reduction == "sum", again=again)


def _mean_divisor(function: Any, reduction: str, given: Mapping[str, Any], terms: Tensor) -> Pending | float:
    if reduction == "batchmean":
        return float(given["input"].shape[0])
    target: Any = given.get("target")
    if function in OF_CLASSES and not target.is_floating_point():
        ignored = given["ignore_index"]
        counted = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
        weight = given.get("weight")
        if weight is None:
            return Pending(counted.sum(dtype=torch.float64).reshape(1))
        return Pending((weight.detach().double()[target.where(counted, 0)] * counted).sum().reshape(1))
    return float(terms.numel())
