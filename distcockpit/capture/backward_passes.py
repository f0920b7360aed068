"""What each autograd run inside a step went through: sums of gradients are only meaningful if runs are consistent."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from distcockpit.gradients.uses import Use
from distcockpit.shards import is_sharded


class BackwardPasses:
    """Layers and losses in the order in which gradients reached them, by autograd run.

    Args:
        model: The bare module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reached: defaultdict[int, list[Use | object]] = defaultdict(list)
        self._cleared: list[nn.Parameter] = []  # reached by an earlier run, but without a gradient when a run began

    def reach(self, what: Use | object) -> None:
        """Record that a gradient arrived."""
        run = torch._C._current_graph_task_id()
        if run not in self._reached and not isinstance(what, Use):
            layers = {id(u.layer): u for uses in self._reached.values() for u in uses if isinstance(u, Use)}
            names = {name for use in layers.values() for name in use.layer.parameters.values()}
            if not is_sharded(self._model):  # where .grad may wait for the last micro-batch (no synchronisation)
                self._cleared += [p for p in map(self._model.get_parameter, names) if p.grad is None]
        self._reached[run].append(what)

    def check_layers(self) -> None:
        """Check whether runs through the same losses went through the same layers.

        Raises:
            RuntimeError: If not.
        """
        seen: dict[frozenset[int], frozenset[int]] = {}
        for run in self._reached.values():
            losses = frozenset(id(each) for each in run if not isinstance(each, Use))
            layers = frozenset(id(each) for each in run if isinstance(each, Use))
            if losses and seen.setdefault(losses, layers) != layers:
                raise RuntimeError(
                    "The loss was differentiated twice inside `track`, once with respect to only a part of the model "
                    "(torch.autograd.grad, or backward(inputs=...)), so layers would count a sample a different number "
                    "of times. Do that in a separate forward pass outside of `track`."
                )

    def check_kept(self) -> None:
        """Check whether gradients were discarded; `torch.autograd.grad` never leaves any to discard.

        Raises:
            RuntimeError: If so.
        """
        if any(parameter.grad is not None for parameter in self._cleared):
            raise RuntimeError(
                "Gradients of a backward pass inside `track` were thrown away (zero_grad) before another one, but its "
                "samples would still count. Put only what makes up the optimizer's step inside `track`."
            )
