"""Traces of the pooled curvature from products with random vectors, for any model that can be differentiated twice.

If the elements of v are independent and +1 or -1, the mean of ``v_p . (C v)_p`` is the trace of the block of C that
belongs to parameter p: Hutchinson 1990, "A stochastic estimator of the trace of the influence matrix for Laplacian
smoothing splines", doi:10.1080/03610919008812866. All ranks draw the same vectors, so the sum over ranks is the number
that one process with the whole batch would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distcockpit.curvature.lanczos import check_twice_differentiable, twice_differentiable_loss
from distcockpit.losses.captured import CapturedMicroBatch

MATRICES = {"hutchinson": "Hessian", "hutchinson_ggn": "generalised Gauss-Newton matrix"}


@dataclass(frozen=True)
class TraceEstimate:
    """Which traces to estimate.

    Args:
        kind: One of ``MATRICES``.
        samples: Number of random vectors.
        seed: Base seed of these vectors; actual seeds differ per step.
    """

    kind: str = "hutchinson"
    samples: int = 10
    seed: int = 0


def check_support(quantity: str, estimate: TraceEstimate, loss_fn: nn.Module | None) -> None:
    """Reject early what cannot be estimated.

    Raises:
        ValueError: If the split into model and loss is needed, and there is no loss module.
    """
    if estimate.kind == "hutchinson_ggn" and loss_fn is None:
        raise ValueError(
            f"quantity '{quantity}' (curvature='hutchinson_ggn') needs the loss as a module, loss_fn=..., because the "
            "Gauss-Newton matrix is defined by the split into model and loss. Pass DistCockpit the loss module, or use "
            "curvature='hutchinson'."
        )


def quadratic_forms(
    estimate: TraceEstimate,
    model: nn.Module,
    loss_fn: nn.Module | None,
    parameters: Mapping[str, nn.Parameter],
    captured: Sequence[CapturedMicroBatch],
    seed: int,
) -> Tensor:
    """Compute ``v_p . (C v)_p`` for every vector and parameter, C the curvature of the sum over micro-batches of w L.

    Args:
        estimate: What to estimate.
        model: The bare module.
        loss_fn: The loss module; ``None`` if the model returns its loss.
        parameters: The variables.
        captured: This rank's micro-batches.
        seed: Seed of the vectors; the same on all ranks.

    Returns:
        float64 ``[samples, parameters]``.

    Raises:
        RuntimeError: If the step cannot be differentiated twice.
    """
    leaves = list(parameters.values())
    total = torch.zeros(estimate.samples, len(leaves), dtype=torch.float64, device=leaves[0].device)
    for micro in captured:
        if not micro.weight:
            continue
        try:
            with twice_differentiable_loss(model, loss_fn, micro) as (loss, outputs):
                product = _PRODUCTS[estimate.kind](loss, outputs, leaves)
                for k, vector in enumerate(_vectors(leaves, estimate.samples, seed)):
                    forms = [(v.double() * c.double()).sum() for v, c in zip(vector, product(vector), strict=True)]
                    total[k] += torch.stack(forms) * micro.scale.divisor
        except Exception as error:
            if micro.is_broken:
                total += float("nan")
                continue
            raise RuntimeError(
                f"curvature={estimate.kind!r} could not be computed for {type(model).__name__}: {error} It needs a "
                "model that can be differentiated twice. Leave quantities with curvature out."
            ) from error
    return total


def _vectors(leaves: Sequence[Tensor], samples: int, seed: int) -> Iterator[list[Tensor]]:
    """Yield Rademacher vectors; the same for every micro-batch and rank."""
    generator = torch.Generator(leaves[0].device).manual_seed(seed)
    for _ in range(samples):
        signs = [torch.randint(2, p.shape, generator=generator, device=p.device, dtype=torch.int8) for p in leaves]
        yield [sign.to(p.dtype) * 2 - 1 for sign, p in zip(signs, leaves, strict=True)]


Vector = Sequence[Tensor]
Product = Callable[[Vector], Vector]


def hessian_product(loss: Tensor, outputs: Vector, leaves: Vector) -> Product:
    """Return Hessian-vector products: differentiate the gradient once more (Pearlmutter 1994)."""
    gradient = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    check_twice_differentiable(gradient)
    return lambda vector: _pull_back(gradient, leaves, vector)


def gauss_newton_product(loss: Tensor, outputs: Vector, leaves: Vector) -> Product:
    """Return products with ``J^T H J``, J the model's Jacobian and H the Hessian of the loss (Schraudolph 2002).

    ``J v`` is the derivative of ``u -> J^T u``, which is linear, in the direction v.
    """
    slope = torch.autograd.grad(loss, outputs, create_graph=True, materialize_grads=True)
    u = [torch.zeros_like(z, requires_grad=True) for z in outputs]
    pulled = torch.autograd.grad(outputs, leaves, u, create_graph=True, materialize_grads=True)
    check_twice_differentiable(pulled)

    def product(vector: Vector) -> Vector:
        pushed = _pull_back(pulled, u, vector)
        curved = _pull_back(slope, outputs, pushed)
        return _pull_back(outputs, leaves, curved)

    return product


_PRODUCTS = {"hutchinson": hessian_product, "hutchinson_ggn": gauss_newton_product}


def _pull_back(values: Vector, leaves: Vector, vector: Vector) -> Vector:
    """Compute the vector-Jacobian product; zeros for outputs that depend on nothing."""
    pairs = [(z, v) for z, v in zip(values, vector, strict=True) if z.requires_grad]
    if not pairs:
        return [torch.zeros_like(p) for p in leaves]
    z, v = zip(*pairs, strict=True)
    return torch.autograd.grad(z, leaves, v, retain_graph=True, materialize_grads=True)
