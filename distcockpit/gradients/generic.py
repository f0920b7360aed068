"""Any other module: run it again, and backpropagate the output gradients of single samples.

If the module can be mapped over single samples (`torch.func.vmap`), with their share of the batch's random numbers,
this takes about as long as the batch did. Otherwise it is run batched, and output gradients masked to single samples
are backpropagated; each sample then takes as long as the batch, so the module is run on a few samples at a time if that
gives the same results as the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from distcockpit.gradients import parts
from distcockpit.gradients.parts import Drawn
from distcockpit.gradients.uses import Blocks, MicroBatch, Use, UseRule, to_front
from distcockpit.replay.checkpointing import kept_activations
from distcockpit.replay.memory import is_out_of_memory
from distcockpit.replay.trees import map_tensors, tensors

Outputs = dict[int, Tensor]
"""By position among the tensors of an output, with the batch axis first."""

Route = Callable[[slice], list[Tensor]]
"""Maps a range of samples to their individual gradients, parameter by parameter."""

MAPPED, UNLIKE, WHOLE = "mapped", "unlike before", 2


@dataclass
class _Verdict:
    """Which route can be used to run a module; checked again at the 1st, 2nd, 4th, 8th, ... call."""

    calls: int = 0
    route: int = 0


class GenericRule(UseRule):
    """Exact for every module, and every call, that treats the samples of a batch independently."""

    def __init__(self) -> None:
        self._verdicts: WeakKeyDictionary[Module, dict[object, _Verdict]] = WeakKeyDictionary()

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """Use the fastest route that works; every forward pass has the random state of the original call."""
        again = _Again(use, names, {**values, **use.values})
        chosen = self._chosen(use, again)
        use.found[MAPPED] = chosen == 0
        route = again.routes[chosen]()

        def block(samples: slice) -> dict[str, Tensor]:
            nonlocal route, chosen
            try:
                return dict(zip(names, route(samples), strict=True))
            except Exception as error:
                if chosen == WHOLE or is_out_of_memory(error):
                    raise
                route, chosen = again.whole(few=True), WHOLE  # this call is unlike the one that was checked
                return dict(zip(names, route(samples), strict=True))

        return block

    def _chosen(self, use: Use, again: _Again) -> int:
        """Choose the first route that works."""
        if parts.batch_size(use) < 2:
            return WHOLE
        # A user's hook must not keep tensors that only exist inside of `vmap`.
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in use.layer.module.modules())
        call = (parts.batch_axes(use), tuple(use.before.training.values()), use.before.autocast, use.drew, hooked)
        verdict = self._verdicts.setdefault(use.layer.module, {}).setdefault(call, _Verdict())
        verdict.calls += 1
        if verdict.calls & (verdict.calls - 1) == 0:
            routes = range(int(hooked), WHOLE)
            before, verdict.route = verdict.route, next((k for k in routes if again.works(k)), WHOLE)
            if verdict.calls > 1 and verdict.route > before:
                use.found[UNLIKE] = (
                    f"'{use.layer.path}' ({type(use.layer.module).__name__}) no longer treats parts of a batch the "
                    "same as the whole batch; rows since the last check may be wrong. From now on it is run in a "
                    "slower way that is exact."
                )
        return verdict.route

    def elements_per_sample(self, use: Use) -> int:
        """Count the whole output for each sample, for masked output gradients; if mapped, what the call computes."""
        deltas = list(use.output_gradients.values())
        return sum(4 * delta[:1].numel() if use.found.get(MAPPED) else delta.numel() for delta in deltas)


GENERIC = GenericRule()


def rule_of(use: Use) -> UseRule:
    """Return the rule that serves a call: its closed form, or else running it again."""
    return use.closed or GENERIC


def notices_of(batches: Iterable[MicroBatch]) -> Iterator[tuple[str, str]]:
    """Yield what walks over these found worth saying: topics and texts."""
    for use in (use for batch in batches for use in batch.uses if UNLIKE in use.found):
        yield f"unlike {use.layer.path}", use.found[UNLIKE]


class _Again:
    """A module to be run again with its own leaves for some of its parameters.

    Args:
        use: The call.
        names: Local names of the parameters.
        values: The values of the model's parameters in that call, by full name.
    """

    def __init__(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        layer, module = use.layer, use.layer.module
        leaves = {layer.parameters[name]: _plain(values[layer.parameters[name]]).clone() for name in names}
        tensor_of = {full: leaves[full] if full in leaves else _plain(values[full]) for full in layer.names.values()}
        self._leaves = [leaf.requires_grad_() for leaf in leaves.values()]
        self._device, self._pull_back = self._leaves[0].device, _PullBack(self._leaves)
        self._use, self._module, self._size = use, module, parts.batch_size(use)
        self._state = {
            slot: tensor_of[layer.names[slot]] for slot in slots(module, "_parameters") if slot in layer.names
        }
        names_of = {id(buffer): name for name, buffer in module.named_buffers() if name in use.before.buffers}
        places = slots(module, "_buffers")
        self._buffers = {slot: names_of[id(buffer)] for slot, buffer in places.items() if id(buffer) in names_of}

    @property
    def routes(self) -> tuple[Callable[[], Route], ...]:  # bound methods that are kept would be a cycle
        """The ways to run it, fastest first."""
        return self.mapped, self.in_parts, self.whole

    def whole(self, few: bool = False) -> Route:
        """Run the whole batch at once; backpropagate a few samples at a time if more may be asked for."""
        outputs = self._run(self._use.args, self._use.kwargs)

        def gradients(samples: slice) -> list[Tensor]:
            ranges = parts.split(samples) if few else [samples]
            found = [self._pulled_back(outputs, slice(None), each.start, each.stop) for each in ranges]
            return [torch.cat(gradient) for gradient in zip(*found, strict=True)] if few else found[0]

        return gradients

    def mapped(self) -> Route:
        """Run single samples, many at once; NaN for samples whose outputs differ from those in the whole batch."""
        use, (drawn, expected) = self._use, self._expected()

        def one(rows: list[Tensor], deltas: dict[int, Tensor]) -> tuple[tuple[Tensor, ...], Outputs]:
            def run(*leaves: Tensor) -> Outputs:
                return self._outputs(*parts.of_one(use, rows), leaves)

            outputs, pull_back = torch.func.vjp(run, *(leaf.detach() for leaf in self._leaves))[:2]
            found = pull_back({p: delta.unsqueeze(0) for p, delta in deltas.items()})
            return found, {p: z.squeeze(0) for p, z in outputs.items()}

        def gradients(samples: slice) -> list[Tensor]:
            deltas = {p: use.output_gradients[p][samples].to(z.dtype) for p, z in expected.items()}
            rows = [_plain(t) for t in parts.rows_of(use, samples)]
            with self._as_in_the_call(drawn and drawn.for_part(samples)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some operations process single samples one by one
                found, outputs = torch.func.vmap(one, randomness="different")(rows, deltas)
            return self._where_equal(found, outputs, expected, samples)

        return gradients

    def in_parts(self) -> Route:
        """Run a few samples at a time; NaN for samples whose outputs differ from those in the whole batch."""
        drawn, expected = self._expected()
        latest: dict[int, Outputs] = {}  # by the start of the piece, as one sample at a time may be asked for

        def gradients(samples: slice) -> list[Tensor]:
            found = []
            for piece in parts.pieces(samples, self._size):
                if piece.start not in latest:
                    latest.clear()
                    mine = drawn and drawn.for_part(piece)
                    latest[piece.start] = self._run(*parts.inputs_of(self._use, piece), mine)
                first, last = max(samples.start, piece.start) - piece.start, min(samples.stop, piece.stop) - piece.start
                rows = {p: z[first:last] for p, z in latest[piece.start].items()}
                mine_in_all = slice(piece.start + first, piece.start + last)
                pulled = self._pulled_back(latest[piece.start], piece, first, last)
                found.append(self._where_equal(pulled, rows, expected, mine_in_all))
            return [torch.cat(gradient) for gradient in zip(*found, strict=True)]

        return gradients

    def _expected(self) -> tuple[Drawn | None, Outputs]:
        """Return what the whole batch draws and outputs."""
        drawn = Drawn(self._size) if self._use.drew else None
        return drawn, self._run(self._use.args, self._use.kwargs, drawn, with_graph=False)

    def _where_equal(
        self, gradients: Sequence[Tensor], rows: Outputs, expected: Outputs, samples: slice
    ) -> list[Tensor]:
        """Replace gradients by NaN for samples whose outputs differ from those of the whole batch."""
        low = self._use.before.autocast is not None or any(z.dtype.itemsize == 2 for z in expected.values())
        agree = parts.rows_agree(rows, expected, samples, 3e-2 if low else 1e-3)
        return [torch.where(agree.view(-1, *[1] * (g.dim() - 1)), g, torch.nan) for g in gradients]

    def works(self, route: int) -> bool:
        """True if the first and last few samples get the same individual gradients as with the whole batch."""
        if self.routes[route] == self.in_parts and self._size <= parts.FEW:
            return False
        try:
            by_parts, whole = self.routes[route](), self.whole()
            pieces = parts.pieces(slice(0, self._size), self._size)
            agree = []
            for piece in {pieces[0].start: pieces[0], pieces[-1].start: pieces[-1]}.values():
                expected = whole(piece)
                sizes = [b.abs().nan_to_num(nan=0.0, posinf=0.0).max() for b in expected]
                for a, b, size in zip(by_parts(piece), expected, sizes, strict=True):
                    is_close = (a - b).abs() <= 1e-3 * (size + b.abs()) + 1e-6 * torch.stack(sizes).max()
                    agree.append((is_close | torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)).all())
            return bool(torch.stack(agree).all())
        except Exception as error:  # it cannot be run on a part, whatever the error says
            if is_out_of_memory(error):
                raise
            return False

    def _pulled_back(self, outputs: Outputs, among: slice, first: int, last: int) -> list[Tensor]:
        """Return the individual gradients of samples ``first`` to ``last`` among those that the outputs belong to.

        Args:
            outputs: The outputs of the module.
            among: The samples of the batch that the outputs belong to.
            first: Index among these.
            last: Index after the last one.
        """
        rows = torch.arange(first, last, device=self._device)
        reached = {p: z for p, z in outputs.items() if z.requires_grad}
        deltas = self._use.output_gradients
        masked = [_one_sample_each(deltas[p][among].to(z.dtype), rows) for p, z in reached.items()]
        with self._use.before.attributes_restored():  # the user's tensor hooks may write to modules
            found = self._pull_back(list(reached.values()), masked) if reached else [None] * len(self._leaves)
        return [
            leaf.new_zeros(len(rows), *leaf.shape) if gradient is None else gradient
            for leaf, gradient in zip(self._leaves, found, strict=True)
        ]

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: Drawn | None = None, *, with_graph: bool = True
    ) -> Outputs:
        """Return the outputs that gradients reached in the call."""
        with self._as_in_the_call(drawn), torch.set_grad_enabled(with_graph):
            return self._outputs(args, kwargs, self._leaves)

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Tensor]) -> Outputs:
        """Return the same outputs, with these tensors in place of the leaves."""
        use, present = self._use, dict(zip(map(id, self._leaves), leaves, strict=True))
        copies = {name: buffer.clone() for name, buffer in use.before.buffers.items()}
        state = {slot: present.get(id(tensor), tensor) for slot, tensor in self._state.items()}
        state |= {slot: copies[name] for slot, name in self._buffers.items()}
        args, kwargs = map_tensors(_plain, (args, kwargs))
        output = tensors(functional_call(self._module, state, args, kwargs, tie_weights=False))
        return {p: to_front(output[p], use.axes[p]) for p in use.output_gradients}

    @contextmanager
    def _as_in_the_call(self, drawn: Drawn | None) -> Generator[None, None, None]:
        """Restore everything around the module as it was in the call."""
        sparse = [m for m in self._module.modules() if getattr(m, "sparse", False) is True]
        try:
            with self._use.before.restored(self._device), kept_activations(), drawn or nullcontext():
                for m in sparse:
                    m.sparse = False  # type: ignore[assignment]
                yield
        finally:
            for m in sparse:
                m.sparse = True  # type: ignore[assignment]


def slots(module: Module, kind: str) -> dict[str, Tensor]:
    """Return where a module and those below it hold parameters or buffers: each place once, even with several names."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, owner in module.named_modules()
        for name, tensor in getattr(owner, kind).items()
        if tensor is not None
    }


def _plain(tensor: Tensor) -> Tensor:
    """Return a detached tensor that is not channels-last.

    torch 2.13 crashes in the backward of a group norm with a channels-last input, and cannot vectorise such a backward.
    """
    tensor = tensor.detach()
    channels_last = tensor.dim() in (4, 5) and not tensor.is_contiguous()
    return tensor.contiguous() if channels_last else tensor


class _PullBack:
    """Vector-Jacobian products of many vectors, at once if every operation supports it, else one by one."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._at_once = True

    def __call__(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if self._at_once:
            try:
                return self._grad(outputs, vectors, is_grads_batched=True)
            except RuntimeError:  # usually a custom backward
                self._at_once = False
        rows = [self._grad(outputs, [v[k] for v in vectors]) for k in range(len(vectors[0]))]
        return [
            None if row[0] is None else torch.stack([g for g in row if g is not None])
            for row in zip(*rows, strict=True)
        ]

    def _grad(
        self, outputs: Sequence[Tensor], vectors: Sequence[Tensor], is_grads_batched: bool = False
    ) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            outputs,
            self._leaves,
            vectors,
            is_grads_batched=is_grads_batched,
            retain_graph=True,
            allow_unused=True,
        )


def _one_sample_each(delta: Tensor, rows: Tensor) -> Tensor:
    """Return shape ``[n, *delta.shape]``: copy k of ``delta`` with everything but sample ``rows[k]`` set to zero."""
    masked = delta.new_zeros(len(rows), *delta.shape)
    masked[torch.arange(len(rows), device=rows.device), rows] = delta[rows]
    return masked
