"""Parameters that are served by the calls of functions: what is recorded, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from distcockpit import DistCockpit, every, open_run
from distcockpit.capture.coverage import CALLS, CLOSED
from distcockpit.losses.loop import LoopWatch
from distcockpit.quantities import Alpha, GradNorm, MeanGSNR, NormTest

Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """Parameters of its own beside a linear layer, used as a test says."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.linspace(-0.5, 0.7, 6))
        self.q = nn.Parameter(torch.linspace(-0.3, 0.2, 24).view(1, 4, 6))
        self.w = nn.Parameter(torch.linspace(-0.2, 0.3, 36).view(6, 6))
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(24, 5)
        self.register_buffer("noise", torch.linspace(0, 1, 6))
        self.used = forward

    def forward(self, x: Tensor) -> Tensor:
        rest = 0 * (self.p.sum() + self.q.sum() + self.w.sum())  # those that a test does not use
        return self.head(torch.tanh(self.used(self, self.mix(x)) + rest).flatten(1))


def in_place(m: Model, z: Tensor) -> Tensor:
    z = z * 2
    z += m.p
    z.mul_(m.q)
    return z


def written_first(m: Model, z: Tensor) -> Tensor:
    """What is made of a parameter alone is written, too."""
    all_of_it = torch.zeros(4, 6)
    all_of_it[1:] = m.p
    return z * all_of_it


def written_to_a_view(m: Model, z: Tensor) -> Tensor:
    all_of_it = z * 2
    all_of_it.transpose(0, 1)[2:] = m.p
    return all_of_it + z


def written_to(m: Model, z: Tensor) -> Tensor:
    """A write into a part of a buffer returns nothing: the buffer is looked at."""
    all_of_it = torch.zeros(len(z), 4, 6)
    all_of_it[:, :2] = z[:, :2]
    all_of_it[:, 2:] = m.p
    return all_of_it + z


def overwritten(m: Model, z: Tensor) -> Tensor:
    """What the call was given is another after it, so that it cannot be run again."""
    z = z * 2
    y = (z * m.p).detach() + F.linear(z, m.w)
    with torch.no_grad():
        z.zero_()
    return y


def chunks(m: Model, z: Tensor) -> Tensor:
    first, second = torch.exp(m.w).chunk(2)
    return torch.cat([z @ first.T, z @ second.mT], -1)


def without_gradient(m: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        constant = 2 * m.p
    return z * constant + z * m.p.sin()


def written_without_gradient(m: Model, z: Tensor) -> Tensor:
    """Autograd knows nothing of the write, though what is written to has a gradient."""
    z = z * 1
    with torch.no_grad():
        z.mul_(m.p)
    return z + m.p.sin()


def drawn_for_each(m: Model, z: Tensor) -> Tensor:
    """Times that are drawn in the forward pass: a row for each sample, which nobody handed over."""
    times = torch.arange(len(z), dtype=z.dtype)[:, None, None] / 7
    return z + torch.cos(times * m.p)


class Doubled(torch.autograd.Function):
    """A function that no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


SERVED: dict[str, Forward] = {
    "made of a parameter, positions first": lambda m, z: (z.transpose(0, 1) * m.p.exp()).transpose(0, 1),
    "folded, with a function between": lambda m, z: ((z.flatten(0, 1) * m.p).tanh() * m.p).view_as(z),
    "folded, positions first": lambda m, z: (
        (z.transpose(0, 1).reshape(-1, z.shape[2]) * m.p).view(z.shape[1], len(z), -1).transpose(0, 1)
    ),
    "folded, positions first in memory": lambda m, z: (
        (z.transpose(0, 1).contiguous().transpose(0, 1).tanh().transpose(0, 1).view(-1, z.shape[2]) * m.p)
        .view(z.shape[1], len(z), -1)
        .transpose(0, 1)
    ),
    "of three": lambda m, z: torch.addcmul(z, z, m.p, value=0.5),
    "class token": lambda m, z: torch.cat([m.q[:, :1].expand(len(z), -1, -1), z[:, 1:]], 1),
    "in place": in_place,
    "derived": lambda m, z: z * F.softplus(-m.p.exp() + m.noise),
    "derived, twice": lambda m, z: (z + m.p.sin()) * m.p.sin(),
    "chunks": chunks,
    "stacked": lambda m, z: torch.stack([z, z * m.p]).sum(0),
    "transposed": lambda m, z: torch.einsum("bti,io->bto", z, m.w.t()),
    "without gradient": without_gradient,
    "written to without gradient": written_without_gradient,
    "keywords": lambda m, z: torch.add(input=z, other=m.q, alpha=3),
    "drawn for each": drawn_for_each,
    "positions": lambda m, z: z + F.embedding(torch.arange(4), m.w),
    "written to": written_to,
    "written to, at first by the parameter": written_first,
    "behind a function of one's own": lambda m, z: Doubled.apply(z) * m.p,
    "looked up": lambda m, z: z + F.embedding((z[..., 0] > 0).long(), m.w, padding_idx=-6),
}


PARENTS: dict[str, Forward] = {
    "folded by a copy": lambda m, z: (torch.cat([z.flatten(0, 1)]) * m.p).view_as(z),
    "folded in two ways": lambda m, z: (
        (torch.cat([z.flatten(0, 1) * m.p]) * m.p).view_as(z)
        + (z.transpose(0, 1).flatten(0, 1) * m.p).view(z.shape[1], len(z), -1).transpose(0, 1)
    ),
    "written to a view": written_to_a_view,
}


@torch.library.custom_op("distcockpit_tests::scaled", mutates_args=())
def scaled(x: Tensor, p: Tensor) -> Tensor:
    return x * p


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, p = ctx.saved_tensors
    return gradient * p, (gradient * x).sum((0, 1))


scaled.register_autograd(_back, setup_context=_keep)


class OfParameter(torch.autograd.Function):
    """A function that no mode sees, of a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, p = ctx.saved_tensors
        return gradient * p, (gradient * x).sum((0, 1))


UNSEEN: dict[str, Forward] = {
    "a custom operator": lambda m, z: scaled(z, m.p),
    "a function of one's own": lambda m, z: OfParameter.apply(z, m.p),
}
"""Served in whatever way."""


def data(step: int, n: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(n, 4, 6, generator=generator), torch.arange(n) % 5


def individual(net: nn.Module, x: Tensor, y: Tensor) -> oracle.Batch:
    parameters = dict(net.named_parameters())
    losses = F.cross_entropy(net(x), y, reduction="none")
    rows = [torch.autograd.grad(loss, [*parameters.values()], retain_graph=True) for loss in losses]
    gradients = {name: np.stack([row[k].double().numpy() for row in rows]) for k, name in enumerate(parameters)}
    return oracle.Batch(losses.detach().double().numpy(), gradients, {}, {})


@pytest.mark.parametrize("name", [*SERVED, *PARENTS, *UNSEEN])
def test_individual_gradients(tmp_path: Path, name: str) -> None:
    """Four steps, of which the third is one at which not everything is checked."""
    net, loss_fn = Model({**SERVED, **PARENTS, **UNSEEN}[name]), nn.CrossEntropyLoss()
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.5), []
    quantities = [MeanGSNR(), NormTest(), GradNorm(), Alpha()]
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=quantities, schedule=every(1)) as c:
        for step in range(4):
            x, y = data(step)
            batch = individual(net, x, y)
            expected.append((oracle.mean_gsnr(batch), oracle.norm_test(batch)))
            optimizer.zero_grad()
            with c.track(step):
                loss_fn(c(x), y).backward()
            optimizer.step()
            assert _get_current_function_mode() is None
        routes = {row.parameter: row for row in c.coverage()}
    run = open_run(tmp_path / "run")
    found = np.stack([run["mean_gsnr"]["mean_gsnr"], run["norm_test"]["norm_test"]], 1)
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert (run["alpha"]["status"] == 0).all()
    slow = [row for row in routes.values() if row.route == "slow exact fallback"]
    assert name in UNSEEN or bool(slow) == (name in PARENTS)
    assert name not in SERVED or all(routes[own].route in (CALLS, CLOSED) for own in "pqw")
    assert routes["mix.weight"].route == "closed form"


def test_training_is_the_same(tmp_path: Path) -> None:
    ends = []
    for enabled in (True, False):
        torch.manual_seed(0)
        net, loss_fn = Model(SERVED["class token"]), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        options = {"quantities": "economy", "schedule": every(1), "enabled": enabled}
        with DistCockpit(net, loss_fn, optimizer, store=tmp_path / f"run{enabled}", **options) as cockpit:
            for step in range(4):
                x, y = data(step)
                optimizer.zero_grad()
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(*ends)


class WithTeacher(nn.Module):
    """Learns from an encoder that takes its fast path, which asks whether there is a mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.teacher = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(32, 5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.append(self.teacher(x))
        return self.head((self.seen[-1] * self.scale).flatten(1))


def test_a_teacher_keeps_its_fast_path(tmp_path: Path) -> None:
    """Inside the model, and in the loop."""
    net, loss_fn, x = WithTeacher(), nn.CrossEntropyLoss(), torch.randn(6, 4, 8)
    net(x)
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                with torch.no_grad():
                    net.seen.append(net.teacher(x))
                loss_fn(cockpit(x), torch.arange(6) % 5).backward()
        assert cockpit.coverage()["scale"].route == CLOSED
    assert len(net.seen) >= 5 and all(torch.equal(seen, net.seen[0]) for seen in net.seen if len(seen) == 6)


def test_a_parametrization_cached_around_the_step(tmp_path: Path) -> None:
    """What was made of the parameter before the step is not seen; the module that owns it is run again."""
    net, loss_fn = Model(lambda m, z: z * m.p), nn.CrossEntropyLoss()
    parametrize.register_parametrization(net, "p", nn.Softplus())
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[NormTest()], schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = data(step)
            expected = oracle.norm_test(individual(net, x, y))
            net.zero_grad()
            with parametrize.cached():
                net.p.sum()
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
            cockpit.flush()
            found = float(open_run(tmp_path / "run")["norm_test"]["norm_test"][-1])
            np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_a_step_looked_ahead(tmp_path: Path) -> None:
    """Arguments of `functional_call` that the loop makes from parameters and from gradients, which are constants."""
    net, loss_fn = Model(lambda m, z: z * m.p.exp()), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[NormTest()], schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = data(step)
            net.zero_grad()
            loss_fn(net(x), y).backward()
            names, parameters = zip(*net.named_parameters(), strict=True)
            gradients = [p.grad.clone() for p in parameters]

            def ahead(gradients: Any, parameters: Any = parameters, names: Any = names) -> dict[str, Tensor]:
                return {k: p - 0.5 * g for k, p, g in zip(names, parameters, gradients, strict=True)}

            losses = F.cross_entropy(functional_call(net, ahead(gradients), (x,)), y, reduction="none")
            rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
            each = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).double()
            noise = (each.square().sum(1).mean() - each.mean(0).square().sum()) / (len(x) - 1)
            with cockpit.track(step):
                out = functional_call(net, ahead(p.grad for p in parameters), (x,))
                for p in parameters:
                    p.grad = None
                loss_fn(out, y).backward()
            cockpit.flush()
            found = float(open_run(tmp_path / "run")["norm_test"]["norm_test"][-1])
            np.testing.assert_allclose(found, float((noise / each.mean(0).square().sum()).sqrt()), rtol=2e-4)


class Rerouted(Model):
    """Its forward calls it again, as frameworks do that take their own methods through it; each use counts once."""

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        return self(x, again=False) if again else super().forward(x)


def test_a_call_of_the_model_within_a_call(tmp_path: Path) -> None:
    net, loss_fn = Rerouted(SERVED["class token"]), nn.CrossEntropyLoss()
    expected = []
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = data(step)
            expected.append(oracle.mean_gsnr(individual(net, x, y)))
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
        assert cockpit.coverage()["q"].route in (CALLS, CLOSED)
    np.testing.assert_allclose(open_run(tmp_path / "run")["mean_gsnr"]["mean_gsnr"], expected, rtol=2e-4)


class OfTheUser(TorchFunctionMode):
    """A mode that was there before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_an_error_in_the_forward_leaves_no_mode_behind(tmp_path: Path) -> None:
    fails = [True]

    def forward(m: Model, z: Tensor) -> Tensor:
        if fails.pop():
            raise ZeroDivisionError
        fails.append(False)
        return z + m.q

    net, loss_fn, (x, y) = Model(forward), nn.CrossEntropyLoss(), data(0)
    with (
        OfTheUser(),
        DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit,
        cockpit.track(0),
    ):
        with pytest.raises(ZeroDivisionError):
            cockpit(x)
        assert [type(mode) for mode in _get_current_function_mode_stack()] == [OfTheUser, LoopWatch]
        fails.append(False)
        loss_fn(cockpit(x), y).backward()
        assert [type(mode) for mode in _get_current_function_mode_stack()] == [OfTheUser, LoopWatch]
    expected = oracle.mean_gsnr(individual(net, x, y))
    np.testing.assert_allclose(open_run(tmp_path / "run")["mean_gsnr"]["mean_gsnr"], [expected], rtol=2e-4)


def test_a_mode_that_begins_inside_of_a_step_outlives_it(tmp_path: Path) -> None:
    net, loss_fn, (x, y), mine = Model(lambda m, z: z * m.p), nn.CrossEntropyLoss(), data(0), OfTheUser()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
            mine.__enter__()
        assert _get_current_function_mode_stack() == [mine]
        mine.__exit__(None, None, None)
    assert _get_current_function_mode() is None


class Checkpointed(nn.Module):
    """Modules that the backward pass calls again, one of them with parameters of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.reentrant = Model(lambda m, z: z * m.p + m.q), reentrant
        self.body = nn.Sequential(self.block, nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpoints_call_again_is_seen_and_the_mode_comes_off(tmp_path: Path, reentrant: bool) -> None:
    net, loss_fn, expected = Checkpointed(reentrant), nn.CrossEntropyLoss(), []
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[NormTest()], schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = data(step)
            expected.append(oracle.norm_test(individual(net.body, x, y)))
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
                assert [type(mode) for mode in _get_current_function_mode_stack()] == [LoopWatch]
            assert _get_current_function_mode() is None
        routes = {row.parameter: row.route for row in cockpit.coverage()}
    assert routes["block.p"] == CALLS and routes["block.mix.weight"] == CLOSED
    np.testing.assert_allclose(open_run(tmp_path / "run")["norm_test"]["norm_test"], expected, rtol=2e-4)
