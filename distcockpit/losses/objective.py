"""What a step differentiates, as seen in the autograd graph: terms, their divisors and coefficients, and penalties.

From the root of a backward pass, the graph is followed back through linear operations (sums, means, products with
numbers, stacking) to the calls that added up terms: a mean of something that still has the batch axis, or a loss of
``torch.nn.functional`` with a reduction. The gradient that reaches such a call is the coefficient of its terms. A
linear part that depends on no sample is a penalty. If the path is not linear, samples are coupled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from distcockpit.gradients.uses import Axis
from distcockpit.losses.captured import ForwardPass
from distcockpit.losses.reductions import LOSSES, Reduction, adds_up, number_of, reduction_of
from distcockpit.losses.rerun import without_hooks
from distcockpit.losses.samples import CoupledError, Owners, fits, owners_of
from distcockpit.replay.trees import tensors
from distcockpit.world import Pending

IDENTITIES = ("_DDPSinkBackward", "BackwardHookFunctionBackward")
"""Operations that pass each input through."""


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{k}" for name in names.split() for k in ("", *range(7)))


LINEAR = _nodes(
    "Add Sub Rsub Neg Stack Cat Sum Mean Nansum Clone Alias ToCopy Copy View UnsafeView ReshapeAlias Squeeze Unsqueeze "
    "Expand Permute Transpose T Repeat Select Slice Index IndexSelect MaskedSelect Gather Take Split UnsafeSplit "
    "SplitWithSizes Unbind Where MaskedFill AsStrided Diagonal Trace Flip ConstantPadNd Cumsum Movedim Narrow Unfold "
    "Roll Sort Topk Lerp"
) | {"torch::autograd::CopySlices", "torch::autograd::CopyBackwards"}
"""Operations that are linear in everything differentiated through them."""

STACKING = ("StackBackward0", "CatBackward0", "torch::autograd::CopySlices")

PIECEWISE = _nodes("Clamp ClampMin ClampMax Abs Relu NanToNum Maximum Minimum")
"""Operations that are linear almost everywhere, up to a constant: guards of a loss."""

PRODUCTS = _nodes("Mul Div Dot Vdot Mv Mm Bmm Addmv Addmm")
"""Operations that are linear in one argument, if the others depend on no sample."""


@dataclass(eq=False)
class LossPart:
    """Terms of the objective, and the gradient that reached them."""

    reduction: Reduction
    owners: Owners | None  # which samples the terms belong to; `None`: determined once the step has ended
    gradient: Tensor | None = None  # at the output of the call
    at_terms: Tensor | None = None  # at the terms
    arrived: list[Pending] = field(default_factory=list)  # the sum of each gradient, on its way to the host
    is_seen: bool = True  # whether the terms are known, rather than only their sum
    numbers: set[int] = field(default_factory=set)  # of the nodes that add them up
    edge: tuple[Any, int] | None = None  # the node that adds them up
    learned: dict[str, Tensor] = field(default_factory=dict)  # the gradient of the coefficient, by parameter

    def receive(self, gradient: Tensor) -> None:
        """Add a gradient that reached the call."""
        gradient = gradient.detach().double()
        self.gradient = gradient.clone() if self.gradient is None else self.gradient + gradient
        self.arrived.append(Pending(gradient.sum().reshape(1)))

    @property
    def coefficient(self) -> float:
        """The summed gradient at the output of the call; waits for the device."""
        return sum(float(each.result()[0]) for each in self.arrived)

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """The passes with samples that the terms belong to."""
        if self.reduction.inside is not None:
            return [self.reduction.inside]
        return [] if self.owners is None else list(self.owners.of)

    @property
    def paired(self) -> Sequence[ForwardPass]:
        """Those of them whose samples share terms."""
        if self.owners is None:
            return []
        maps = [(forward, of) for forward, of in self.owners.of.items() if isinstance(of, Tensor)]
        if len(maps) < len(self.owners.of):
            return self.passes
        if not maps:
            return []
        counts = torch.stack([of >= 0 for _, of in maps]).sum(0)
        return self.passes if bool((counts > 1).any()) else []

    def share(self, forward: ForwardPass) -> float:
        """Return the share of the terms that belongs to a pass."""
        return 1.0 if self.owners is None else self.owners.share(forward)

    def sums(self, forward: ForwardPass, terms: Tensor) -> Tensor | None:
        """Sum the terms by sample, float64 ``[B]``; ``None`` if it is unknown which sample each belongs to."""
        if self.reduction.inside is not None:
            return Owners({forward: self.reduction.axis}).sums(forward, terms)
        return None if self.owners is None else self.owners.sums(forward, terms)

    def receive_at_terms(self, gradient: Tensor) -> None:
        """Add a gradient that reached the terms."""
        gradient = gradient.detach()
        self.at_terms = gradient.clone() if self.at_terms is None else self.at_terms + gradient


@dataclass(eq=False)
class Penalty:
    """A differentiated part that depends on no sample."""

    name: str  # of its last operation
    gradients: dict[str, Tensor]  # of its sum, by parameter
    coefficient: Tensor | None = None  # the gradient that reached it

    def receive(self, gradient: Tensor) -> None:
        """Add a gradient that reached it."""
        gradient = gradient.detach()
        self.coefficient = gradient.clone() if self.coefficient is None else self.coefficient + gradient


@dataclass(eq=False)
class Root:
    """A tensor that was differentiated: its value times the gradient passed in."""

    value: Tensor
    parts: list[LossPart] = field(default_factory=list)
    penalties: list[Penalty] = field(default_factory=list)
    coupled: str = ""  # the call that couples samples
    mixing: str = ""  # a call that added up values of several samples
    has_learned_weights: bool = False  # whether its coefficients contain parameters
    is_low: bool = False  # whether it has low precision


OnGradient = Callable[[Any, Callable[[Sequence[Tensor | None]], None]], None]
"""Puts a hook on a node of the graph."""


class Objective:
    """Collects what a step differentiates.

    Args:
        passes: The forward passes of the step, which grow.
        axes: By name and index of a call in the loop: the batch axis of its terms, as found at earlier steps.
        thorough: Whether to determine these again.
        parameters: The parameters to look for penalties on, by name.
    """

    def __init__(
        self,
        passes: Sequence[ForwardPass],
        axes: dict[tuple[Any, ...], Axis],
        thorough: bool,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._passes, self._axes, self._thorough, self._parameters = passes, axes, thorough, parameters
        self._penalties: dict[Any, Penalty] = {}
        self._reductions: dict[int, Reduction] = {}  # by number of the node in the graph
        self._marks: dict[int, ForwardPass] = {}  # nodes that depend on samples
        self._of_samples: dict[int, bool] = {}
        self._parts: dict[Any, LossPart] = {}
        self._told: dict[int, Tensor] = {}
        self.roots: list[Root] = []
        self.n_roots = 0  # includes passes without samples
        self.looks = thorough
        self.has_gradients = False  # whether gradients were computed with create_graph

    @property
    def has_constants(self) -> bool:
        """True if the objective has more than its terms, as found at an earlier step."""
        return self._axes.get(("constants",)) is not None

    @has_constants.setter
    def has_constants(self, value: bool) -> None:
        self._axes["constants",] = 0 if value else None

    @property
    def may_split(self) -> bool:
        """True if the gradients of loss parts may be needed separately; not known before the first step ends."""
        return self._axes.get(("mixed",)) != 0

    def settle(self, *, is_mixed: bool) -> None:
        """End the step, and remember whether parts had divisors that differ between ranks in different ways."""
        self._axes["mixed",] = int(is_mixed or self._axes.get(("mixed",)) == 1)

    def splits(self, root: Root) -> bool:
        """True if the gradients of its parts are needed separately, and can be computed."""
        if not self.may_split or len(root.parts) < 2 or root.coupled or root.has_learned_weights:
            return False
        can = all(part.edge is not None and part.is_seen and part.reduction.adds for part in root.parts)
        return can and (("mixed",) in self._axes or len({part.reduction.divisor for part in root.parts}) > 1)

    # -- while the loop computes ---------------------------------------------------------------------------------------

    def mark(self, output: Any, forward: ForwardPass) -> None:
        """Mark outputs that depend on the samples of a pass."""
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                self._marks[number_of(tensor.grad_fn)] = forward

    def tell(self, losses: Tensor) -> None:
        """Register the losses given by the user."""
        if losses.grad_fn is not None:
            self._told[number_of(losses.grad_fn)] = losses

    def see(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Handle a torch function that the loop called."""
        if function in LOSSES or adds_up(args, kwargs, result):
            self.add(reduction_of(function, args, kwargs, result), result)

    def add(self, reduction: Reduction | None, result: Any) -> None:
        """Register terms that were added up."""
        node = next((t.grad_fn for t in tensors(result) if t.grad_fn is not None), None)
        if reduction is not None and node is not None:
            self._reductions[number_of(node)] = reduction
            reduction.is_product = node.name() in PRODUCTS
            if reduction.inside is not None:
                self._marks[number_of(node)] = reduction.inside

    # -- before the backward pass --------------------------------------------------------------------------------------

    def differentiate(self, tensor: Tensor, gradient: Tensor | None, on_gradient: OnGradient) -> Root | None:
        """Handle a tensor that is about to be differentiated.

        Args:
            tensor: The root.
            gradient: The gradient passed to it.
            on_gradient: Puts hooks on nodes.

        Returns:
            What is known about it; ``None`` if there are no samples.
        """
        self.n_roots += 1
        if tensor.grad_fn is None or not any(forward.batch_size for forward in self._passes):
            return None
        value = tensor.detach().double()
        root = Root(value.clone() if gradient is None else (value * gradient.detach().double()).sum())
        root.is_low = tensor.dtype in (torch.float16, torch.bfloat16)
        self.roots.append(root)
        seen: set[tuple[Any, int]] = set()
        waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
        if tensor.dim():
            self._reductions.setdefault(
                number_of(tensor.grad_fn),
                Reduction("backward", tensor, 1.0, False, edge=(number_of(tensor.grad_fn), tensor.output_nr)),
            )
        while waiting and not root.coupled:
            edge = waiting.pop()
            if edge in seen:
                continue
            seen.add(edge)
            if self._depends(edge[0]):
                waiting += self._pass(*edge, root, on_gradient)
            else:
                self._penalize(*edge, root, on_gradient)
        if root.has_learned_weights and not root.coupled:
            self._learn(tensor, gradient, root)
        return root

    def sets_aside(self, tensor: Tensor) -> None:
        """Exclude passes that are only differentiated for gradients that the optimizer does not get."""
        for forward in () if tensor.grad_fn is None else self._passes_behind(tensor.grad_fn):
            forward.is_aside = True

    def _pass(self, node: Any, position: int, root: Root, on_gradient: OnGradient) -> list[tuple[Any, int]]:
        """Return what lies behind a node that depends on samples, unless the path ends there."""
        number = number_of(node)
        reduction, name = self._reductions.get(number), node.name()
        edges = [(upstream, k) for upstream, k in node.next_functions if upstream is not None]
        if name in IDENTITIES:
            return [node.next_functions[position]]
        behind = [edge for edge in edges if self._depends(edge[0])]
        of_numbers = _is_number(node, position) and all(_is_number(*edge) for edge in behind)
        is_linear = name in LINEAR or (name in PIECEWISE and of_numbers) or (name in PRODUCTS and len(behind) == 1)
        if name.startswith("DivBackward") and behind[:1] != [node.next_functions[0]]:
            is_linear = False
        if number in self._told:
            reduction = Reduction("record_losses", self._told[number], 1.0, False, edge=(number, position))
        if reduction is not None and (is_linear or reduction.again is not None or reduction.edge == (number, position)):
            try:
                part = self._cut(reduction, node)
            except CoupledError:  # what it added up may itself be sums
                part, root.mixing = None, root.mixing if _are_losses(reduction.terms) else reduction.name
            if part is not None:
                root.parts.append(part)
                self._hook(part, node, position, on_gradient)
                return []
        if is_linear:
            root.has_learned_weights |= name in PRODUCTS and len(edges) > 1
            return edges if name in LINEAR else behind
        if reduction is None and not of_numbers and not root.mixing:
            return self._unseen(node, position, root, on_gradient)
        if reduction is not None and not root.mixing and reduction.again is not None:
            part = self._parts.setdefault(number, LossPart(reduction, Owners(dict.fromkeys(self._passes_behind(node)))))
            root.parts.append(part)
            self._hook(part, node, position, on_gradient)
            return []
        root.coupled = reduction.name if reduction is not None else root.mixing or name.partition("Backward")[0]
        return []

    def _cut(self, reduction: Reduction, node: Any) -> LossPart | None:
        """Return the terms as a part of the objective; ``None`` if they are not per-sample terms.

        Raises:
            CoupledError: If a term depends on several samples.
        """
        key = reduction.edge or id(reduction)
        if key in self._parts:
            return self._parts[key]
        owners = None
        if reduction.inside is None:
            number = sum(1 for part in self._parts.values() if part.owners is not None)
            place = (reduction.name, reduction.terms.dim(), number)
            known, mine = self._axes.get(place), self._passes_behind(node)
            alone = all(forward.batch_size < 2 for forward in mine)
            if alone and _stacks(reduction.terms):
                return None
            if known is not None and not self._thorough and all(fits(reduction.terms, known, f) for f in mine):
                owners = Owners(dict.fromkeys(mine, known))  # no differentiation needed
            else:
                terms = reduction.terms if reduction.again is None else reduction.again()
                owners = owners_of(terms, self._passes, known)
            are_losses = reduction.again is None and _are_losses(reduction.terms) and not alone
            if not owners.of or (are_losses and all(of is None for of in owners.of.values())):
                return None
            found = next(iter(owners.of.values()))
            if found is not None and not isinstance(found, Tensor):
                self._axes[place] = found
        self._parts[key] = LossPart(reduction, owners)
        return self._parts[key]

    def _learn(self, tensor: Tensor, gradient: Tensor | None, root: Root) -> None:
        """Differentiate coefficients that contain parameters, e.g. learned weights of several losses."""
        if unseen := [part.reduction.name for part in root.parts if part.edge is None]:
            root.coupled = unseen[0]  # a weight's gradient consists of terms that are not known
            return
        edges = [GradientEdge(*part.edge) for part in root.parts if part.edge is not None]
        leaves: Any = list(self._parameters.values())
        with torch.enable_grad(), without_hooks(leaves):
            coefficients = torch.autograd.grad(tensor, edges, gradient, True, create_graph=True)
            for part, coefficient in zip(root.parts, coefficients, strict=True):
                if coefficient.dim() or not part.reduction.adds:
                    root.coupled = part.reduction.name
                elif coefficient.requires_grad:
                    found = torch.autograd.grad(coefficient, leaves, retain_graph=True, allow_unused=True)
                    for name, each in zip(self._parameters, found, strict=True):
                        if each is not None:
                            part.learned[name] = part.learned[name] + each if name in part.learned else each.detach()

    def _unseen(self, node: Any, position: int, root: Root, on_gradient: OnGradient) -> list[tuple[Any, int]]:
        """Handle a function that adds up terms where no mode sees it, e.g. a custom `autograd.Function`."""
        passes = self._passes_behind(node)
        key = number_of(node), position
        if key not in self._parts:
            size = float(passes[0].batch_size) if passes else 1.0
            reduction = Reduction(node.name(), torch.empty(0, device="cpu"), size, True, False)
            self._parts[key] = LossPart(reduction, Owners(dict.fromkeys(passes)), is_seen=False)
            on_gradient(node, _picked(self._parts[key].receive, position))
        root.parts.append(self._parts[key])
        return []

    def _penalize(self, node: Any, position: int, root: Root, on_gradient: OnGradient) -> None:
        key = number_of(node) if _goes_on(node) else id(node), position
        if key not in self._penalties:
            like = node._input_metadata[position]
            one = torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
            names, leaves = list(self._parameters), list(self._parameters.values())
            if not leaves:
                raise RuntimeError(
                    "The loss contains a part that depends on no sample, such as a penalty on parameters, whose "
                    "gradient is not known: the model is sharded with fully_shard. Use the optimizer's weight_decay, "
                    "or differentiate the penalty outside of `track`."
                )
            with without_hooks(leaves):
                found = torch.autograd.grad(GradientEdge(node, position), leaves, one, True, allow_unused=True)
            gradients = {name: g.detach() for name, g in zip(names, found, strict=True) if g is not None}
            self._penalties[key] = Penalty(node.name().partition("Backward")[0].lower(), gradients)
            on_gradient(node, _picked(self._penalties[key].receive, position))
        root.penalties.append(self._penalties[key])

    def _hook(self, part: LossPart, node: Any, position: int, on_gradient: OnGradient) -> None:
        number = number_of(node)
        if number in part.numbers:
            return
        part.numbers.add(number)
        part.edge = node, position
        on_gradient(node, _picked(part.receive, position))
        if len(part.numbers) > 1:
            part.reduction.adds = False  # the same terms are added up in several ways
            return
        edge = part.reduction.edge
        for upstream, k in [(node, position), *node.next_functions]:
            if edge is not None and upstream is not None and (number_of(upstream), k) == edge:
                on_gradient(upstream, _picked(part.receive_at_terms, k))
                return

    def _depends(self, node: Any) -> bool:
        """True if a node depends on samples."""
        if node.name() == "torch::autograd::AccumulateGrad":
            return False
        known = self._of_samples
        seen, waiting = {number_of(node)}, [node]
        while waiting:
            each = waiting.pop()
            number = number_of(each)
            if number in self._marks or known.get(number):
                known[number_of(node)] = True
                return True
            if number in known:
                continue
            for upstream, _ in each.next_functions:
                if upstream is not None and number_of(upstream) not in seen and _goes_on(upstream):
                    seen.add(number_of(upstream))
                    waiting.append(upstream)
        known.update(dict.fromkeys(seen, False))
        return False

    def _passes_behind(self, node: Any) -> list[ForwardPass]:
        """Return the passes whose samples a node depends on."""
        found: dict[ForwardPass, None] = {}
        seen, waiting = {node}, [node]
        while waiting:
            each = waiting.pop()
            forward = self._marks.get(number_of(each))
            if forward is not None:
                found[forward] = None
                continue
            new = {upstream for upstream, _ in each.next_functions if upstream is not None and _goes_on(upstream)}
            waiting += new - seen
            seen |= new
        return [forward for forward in self._passes if forward in found]


def _are_losses(terms: Tensor) -> bool:
    """True if these are losses of whole batches, or a single one, rather than terms."""
    return terms.numel() == 1 or _stacks(terms)


def _stacks(terms: Tensor) -> bool:
    """True if these are stacked losses of a batch, or such that were written into one tensor."""
    return terms.grad_fn is not None and _stacked(terms.grad_fn)


def _stacked(node: Any) -> bool:
    edges = [(upstream, k) for upstream, k in node.next_functions if upstream is not None]
    return node.name() in STACKING and all(_is_number(*edge) or _stacked(edge[0]) for edge in edges)


def _goes_on(node: Any) -> bool:
    return node.name() != "torch::autograd::AccumulateGrad"


def _picked(receive: Callable[[Tensor], None], position: int) -> Callable[[Sequence[Tensor | None]], None]:
    def pick(gradients: Sequence[Tensor | None]) -> None:
        gradient = gradients[position] if position < len(gradients) else None
        if gradient is not None:
            receive(gradient)

    return pick


def _is_number(node: Any, position: int) -> bool:
    """True if the output of a node has one element."""
    metadata = node._input_metadata
    return position < len(metadata) and math.prod(metadata[position].shape) == 1
