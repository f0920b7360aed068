"""An extreme eigenvalue of the pooled Hessian: Lanczos on rank 0, matrix-vector products on all ranks.

The Hessian of the pooled loss is the sum over ranks of (w_r/W) H_r. For every product, rank 0 broadcasts a vector, each
rank multiplies it with its own part by differentiating twice through a replay of the step, and the results are
all-reduced. The replay calls the bare module, so no hook of DDP is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from distcockpit.capture.batch_norm import batch_statistics
from distcockpit.losses.captured import CapturedMicroBatch
from distcockpit.losses.rerun import replayed_loss
from distcockpit.replay.devices import without_cudnn
from distcockpit.world import World

WHICH = ("LM", "LA")
STATUS = ("converged", "not_converged", "not_finite", "no_samples", "not_computed")


@dataclass(frozen=True)
class LargestEigenvalue:
    """Which eigenvalue, and how accurately.

    Args:
        which: "LM": the largest in magnitude, with its sign; "LA": the largest.
        tolerance: Bound on the residual of the eigenpair, relative to the eigenvalue; the error of the eigenvalue is of
            the order of its square.
        max_products: Maximum number of matrix-vector products.
        seed: Seed of the starting vector.
    """

    which: str = "LM"
    tolerance: float = 1e-4
    max_products: int = 500
    seed: int = 0


@dataclass(frozen=True)
class Eigenvalue:
    """The result of the iteration."""

    value: float  # NaN where there is none
    status: str  # one of STATUS
    products: int


Product = Callable[[Tensor], Tensor]


class _GiveUpError(Exception):
    """The iteration cannot continue."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


class NotTwiceError(RuntimeError):
    """A rank could not differentiate the step twice, and all ranks know."""


def largest_eigenvalue(
    wanted: LargestEigenvalue,
    world: World,
    model: nn.Module,
    loss_fn: nn.Module | None,
    parameters: Mapping[str, nn.Parameter],
    captured: Sequence[CapturedMicroBatch],
    weight: float,
    confirm: Callable[[], None],
) -> Eigenvalue:
    """Compute the eigenvalue on rank 0; the other ranks help, and get a placeholder.

    Args:
        wanted: Which eigenvalue.
        world: The ranks.
        model: The bare module.
        loss_fn: The loss module; ``None`` if the model returns its loss.
        parameters: The variables of the Hessian.
        captured: This rank's micro-batches.
        weight: W of all ranks.
        confirm: Makes sure that all ranks are about to begin; called once everything is allocated.

    Raises:
        NotTwiceError: On all ranks, if one of them could not differentiate the step twice.
    """
    size = sum(p.numel() for p in parameters.values())
    device = next(iter(parameters.values())).device
    with _local_products(model, loss_fn, parameters, captured, weight) as product:
        shared = _SharedProduct(world, product, size, device)
        confirm()
        if not weight:
            return Eigenvalue(float("nan"), "no_samples", 0)
        if world.rank:
            shared.help()
            return Eigenvalue(float("nan"), "not_converged", 0)
        try:
            return _lanczos(wanted, shared, size)
        finally:
            shared.stop()


def _lanczos(wanted: LargestEigenvalue, shared: _SharedProduct, size: int) -> Eigenvalue:
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # noqa: PLC0415 - slow to import

    count = 0

    def multiply(v: np.ndarray) -> np.ndarray:
        nonlocal count
        if count == wanted.max_products:
            raise _GiveUpError("not_converged")
        count += 1
        result = shared(np.ravel(v))
        if not np.isfinite(result).all():
            raise _GiveUpError("not_finite")
        return result

    start = np.random.default_rng(wanted.seed).standard_normal(size)
    try:
        if not multiply(start).any():  # a random vector in the null space: the matrix is zero
            return Eigenvalue(0.0, "converged", count)
        if size == 1:
            return Eigenvalue(float(multiply(np.ones(1))[0]), "converged", count)
        operator = LinearOperator((size, size), matvec=multiply, dtype=np.float64)
        value = eigsh(
            operator,
            k=1,
            which=wanted.which,
            v0=start,
            tol=wanted.tolerance,
            maxiter=wanted.max_products,
            return_eigenvectors=False,
        )[0]
    except _GiveUpError as reason:
        return Eigenvalue(float("nan"), reason.status, count)
    except ArpackError:
        return Eigenvalue(float("nan"), "not_converged", count)
    return Eigenvalue(float(value), "converged", count)


class _SharedProduct:
    """The product with the pooled Hessian. Rank 0 calls it; the other ranks call ``help``."""

    def __init__(self, world: World, product: Product, size: int, device: torch.device) -> None:
        self._world, self._product = world, product
        self._message = torch.zeros(size + 1, dtype=torch.float64, device=device)  # last element: whether to continue
        self._reply = torch.zeros_like(self._message)  # last element: whether a rank failed
        self._over = False

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        self._message[:-1] = torch.from_numpy(vector).to(self._message.device)
        self._message[-1] = 1
        self._world.broadcast(self._message)
        return self._answer().cpu().numpy()

    def help(self) -> None:
        """Take part in products until rank 0 stops."""
        while self._world.broadcast(self._message)[-1]:
            self._answer()

    def stop(self) -> None:
        """Release the other ranks, unless they have already stopped."""
        if not self._over:
            self._world.broadcast(self._message.zero_())

    def _answer(self) -> Tensor:
        """Compute the pooled product.

        Raises:
            NotTwiceError: On all ranks, if this rank or another one failed.
        """
        answer, problem = self._reply.zero_(), None
        try:
            answer[:-1] = self._product(self._message[:-1])
        except Exception as error:
            problem = error
            answer[-1] = 1
        failed = self._world.all_reduce(answer)[-1]
        if failed:
            self._over = True
            raise NotTwiceError(
                "The Hessian's eigenvalue could not be computed: "
                + (f"{problem} " if problem else f"{int(failed)} other rank(s) failed; see the errors on those ranks. ")
                + "HessMaxEV needs a model that can be differentiated twice: otherwise, leave it out of the quantities."
            ) from problem
        return answer[:-1]


@contextmanager
def _local_products(
    model: nn.Module,
    loss_fn: nn.Module | None,
    parameters: Mapping[str, nn.Parameter],
    captured: Sequence[CapturedMicroBatch],
    weight: float,
) -> Generator[Product, None, None]:
    """Yield this rank's part of the product: the sum over its micro-batches of ``(w/W) H v``.

    With one micro-batch the graph of the gradient is built once; with several it is rebuilt for each product, so that
    no more than one micro-batch is in memory, which is the point of micro-batches.
    """
    leaves = list(parameters.values())
    micros = [micro for micro in captured if micro.weight]
    with ExitStack() as stack:
        kept: list[list[Tensor]] = []

        def product(vector: Tensor) -> Tensor:
            parts = vector.split([p.numel() for p in leaves])
            direction = [v.view_as(p).to(p.dtype) for v, p in zip(parts, leaves, strict=True)]
            if len(micros) == 1 and not kept:
                kept.append(stack.enter_context(_gradient(model, loss_fn, leaves, micros[0])))
            total = torch.zeros_like(vector)
            for micro in micros:
                with ExitStack() as passing:
                    gradient = kept[0] if kept else passing.enter_context(_gradient(model, loss_fn, leaves, micro))
                    total += _differentiate(gradient, leaves, direction) * (micro.scale.divisor / weight)
            return total

        yield product


@contextmanager
def twice_differentiable_loss(
    model: nn.Module, loss_fn: nn.Module | None, micro: CapturedMicroBatch
) -> Generator[tuple[Tensor, list[Tensor]], None, None]:
    """Yield the unscaled loss of a micro-batch, and its model outputs, in a graph that can be differentiated twice.

    Attention and recurrent layers use kernels that have a second derivative. Batch norms in training mode treat batch
    statistics as constants.
    """
    statistics = batch_statistics(micro.passes[0], model)
    with (
        sdpa_kernel(SDPBackend.MATH),
        without_cudnn(),
        replayed_loss(model, loss_fn, micro, statistics) as (loss, outputs),
    ):
        yield loss, outputs


@contextmanager
def _gradient(
    model: nn.Module, loss_fn: nn.Module | None, leaves: Sequence[nn.Parameter], micro: CapturedMicroBatch
) -> Generator[list[Tensor], None, None]:
    """Yield the gradient of the unscaled loss of a micro-batch, to be differentiated again."""
    with twice_differentiable_loss(model, loss_fn, micro) as (loss, _):
        gradient = list(torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True))
        check_twice_differentiable(gradient)
        yield gradient


def check_twice_differentiable(gradient: Sequence[Tensor]) -> None:
    """Check whether a function without a second derivative was involved.

    torch marks it with a node that raises when it is run. A gradient with respect to given inputs never runs that node,
    because no input lies behind it, and would be silently wrong.

    Raises:
        RuntimeError: If so.
    """
    nodes = [g.grad_fn for g in gradient if g.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("the step uses a function marked with @once_differentiable.")
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        nodes += following


def _differentiate(gradient: Sequence[Tensor], leaves: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:
    pairs = [(g, v) for g, v in zip(gradient, direction, strict=True) if g.requires_grad]
    if not pairs:
        return torch.cat([torch.zeros_like(p, dtype=torch.float64).reshape(-1) for p in leaves])
    outputs, vectors = zip(*pairs, strict=True)
    result = torch.autograd.grad(outputs, leaves, vectors, retain_graph=True, materialize_grads=True)
    return torch.cat([r.double().reshape(-1) for r in result])
