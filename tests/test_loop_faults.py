"""Loops at the edge of what hooks can follow: right, or an error that says what to do. One process each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from loops import shows
from steps import run_steps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from waiting import HANG

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, CompressionError, GradNorm, HessMaxEV, HessTrace, Loss, MeanGSNR, NormTest

BATCH = 6


def six_samples(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 3, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 3)


def norm_test(rows: list[tuple[Tensor, ...]]) -> float:
    g = np.stack([np.concatenate([part.double().numpy().ravel() for part in row]) for row in rows])
    return float(np.sqrt(g.var(0, ddof=1).sum() / len(g)) / np.linalg.norm(g.mean(0)))


def expected(net: nn.Module, losses: Tensor) -> float:
    """The norm test of single losses, by autograd."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    return norm_test([torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses])


def track_body(
    folder: Path, net: nn.Module, loss_fn: Any, body: Callable[[Any], None], steps: int = 1, **options: Any
) -> Any:
    options = {"quantities": [NormTest()], **options}
    done = run_steps(
        folder / "run", net, (None, None), steps, loss_fn=loss_fn, body=lambda cockpit, x, y: body(cockpit), **options
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    return done.run


def check_norm_test(
    folder: Path, net: nn.Module, loss_fn: Any, body: Callable[[Any], None], losses: Tensor, **options: Any
) -> None:
    truth = expected(net, losses)
    found = track_body(folder, net, loss_fn, body, **options)["norm_test"]["norm_test"].values
    np.testing.assert_allclose(found, truth, rtol=1e-4)


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


# -- passes and losses -------------------------------------------------------------------------------------------------


def test_a_loss_of_two_passes_beside_their_own(tmp_path: Path) -> None:
    net, mse, (x, _) = linear(), nn.MSELoss(), six_samples()
    other, target = six_samples(1)[0], six_samples(2)[0]

    def body(c: Any) -> None:
        a, b = c(x), c(other)
        (mse(a, target) + mse(b, target) + mse(a, b)).backward()

    track_body(tmp_path, net, mse, body)


@pytest.mark.parametrize("order", ["losses last", "in between"])
def test_passes_that_feed_each_other(tmp_path: Path, order: str) -> None:
    """A sample is what went through both: its loss is the sum of both."""
    net, loss_fn, (x, y) = linear(), nn.CrossEntropyLoss(), six_samples()
    y2 = six_samples(1)[1]

    def body(c: Any) -> None:
        if order == "losses last":
            a = c(x)
            b = c(a)
            (loss_fn(a, y) + loss_fn(b, y2)).backward()
        else:
            a = c(x)
            loss = loss_fn(a, y)
            (loss + loss_fn(c(torch.tanh(a) + 0), y2)).backward()

    a = net(x)
    losses = each(a, y) + each(net(a if order == "losses last" else torch.tanh(a)), y2)
    check_norm_test(tmp_path, net, loss_fn, body, losses)


def test_a_recurrence_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loss_fn, (x, y) = nn.CrossEntropyLoss(), six_samples()

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.head = nn.Linear(7, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.both(torch.cat([x, h], 1)))
            return self.head(h), h

    net = Cell()

    def run(model: Any, loss: Any) -> Tensor:
        h, total = torch.zeros(BATCH, 4), 0.0
        for t in range(3):
            z, h = model(x + t, h)
            total = total + loss(z, (y + t) % 3)
        return total

    check_norm_test(tmp_path, net, loss_fn, lambda c: (run(c, loss_fn) / 3).backward(), run(net, each))


def test_losses_told_twice(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = linear(), nn.CrossEntropyLoss(), six_samples()

    def twice(c: Any) -> None:
        z = c(x)
        c.record_losses(each(z, y))
        c.record_losses(each(z, (y + 1) % 3))

    with pytest.raises(RuntimeError, match="record_losses was called twice"):
        track_body(tmp_path / "a", net, None, twice)
    with pytest.raises(ValueError, match=r"divisor=0\): must be positive"):
        track_body(tmp_path / "c", net, None, lambda c: c.record_losses(loss_fn(c(x), y), divisor=0))


def test_an_empty_batch_with_two_passes(tmp_path: Path) -> None:
    net, loss_fn = linear(), nn.CrossEntropyLoss(reduction="sum")
    x, y = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)

    def body(c: Any) -> None:
        a, b = c(x), c(x)
        (loss_fn(a, y) + loss_fn(b, y)).backward()

    assert np.isnan(track_body(tmp_path, net, loss_fn, body)["norm_test"]["norm_test"].values).all()


# -- checkpointing -----------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, own: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4)) if own else None
        self.reentrant: bool | None = reentrant

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        z = z if self.scale is None else z * self.scale

        def inside(z: Tensor) -> Tensor:
            return torch.tanh(self.middle(z if self.scale is None else z + self.scale))

        return self.last(inside(z) if self.reentrant is None else checkpoint(inside, z, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_beside_a_parameter_on_a_slow_route(
    tmp_path: Path, reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, loss_fn, (x, y) = Checkpointed(reentrant, own=True), nn.CrossEntropyLoss(), six_samples()
    net.reentrant = None
    losses = each(net(x), y)
    truth = expected(net, losses)
    net.reentrant = reentrant
    run = track_body(tmp_path, net, loss_fn, lambda c: loss_fn(c(x), y).backward(), steps=2)
    np.testing.assert_allclose(run["norm_test"]["norm_test"], truth, rtol=1e-4)
    assert "could not check" not in caplog.text


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of the call without gradients
def test_reentrant_checkpointing_and_several_passes(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = Checkpointed(True), nn.CrossEntropyLoss(), six_samples()

    def at_once(c: Any) -> None:
        first = loss_fn(c(x), y)
        (first + loss_fn(c(x + 1), y)).backward()

    def one_by_one(c: Any) -> None:
        for part in (x, x + 1):
            loss = loss_fn(c(part), y) / 2
            with torch.no_grad():
                c(part)  # does not make the pass forgotten
            loss.backward()

    with pytest.raises(
        RuntimeError, match="use_reentrant=True does, while several forward passes.*use_reentrant=False"
    ):
        track_body(tmp_path / "a", net, loss_fn, at_once)
    net.zero_grad()
    net.reentrant = None
    losses = torch.cat([each(net(x), y), each(net(x + 1), y)])
    truth = expected(net, losses)
    net.reentrant = True
    found = track_body(tmp_path / "b", net, loss_fn, one_by_one)["norm_test"]["norm_test"].values
    np.testing.assert_allclose(found, truth, rtol=1e-4)


# -- calls of the model in the model -----------------------------------------------------------------------------------


class Rerouted(nn.Module):
    """With labels it computes its loss by calling itself, after a prediction without gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last, self.kind = nn.Linear(3, 4), nn.Linear(4, 3), kind
        self.scale = nn.Parameter(torch.ones(4)) if kind == "rerouted" else 1.0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.kind == "predicts inside" and y is not None:
            z = self.first(x)
            with torch.no_grad():
                self(x)
            return F.cross_entropy(self.last(z * self.scale), y)
        if y is None:
            z = torch.tanh(self.first(x)) * self.scale
            if self.kind == "checkpointed":
                return checkpoint(self.last, torch.tanh(z), use_reentrant=True)
            return self.last(z)
        if self.kind == "checkpointed":
            return F.cross_entropy(self(x), y)
        with torch.no_grad():
            pseudo = self(x)
        return F.cross_entropy(self(x) + pseudo, y)


@pytest.mark.parametrize("kind", ["rerouted", "predicts inside", "checkpointed"])
def test_a_model_that_calls_itself(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    net, (x, y) = Rerouted(kind), six_samples()
    if kind == "checkpointed":
        losses = each(net.last(torch.tanh(torch.tanh(net.first(x)))), y)
    elif kind == "rerouted":
        losses = each(net(x) + net(x).detach(), y)
    else:
        losses = each(net.last(net.first(x) * net.scale), y)
    check_norm_test(tmp_path, net, None, lambda c: c(x, y).backward(), losses, steps=3)
    assert kind != "checkpointed" or "slow" not in caplog.text


def test_a_forward_that_fails_and_is_tried_again(tmp_path: Path) -> None:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Tensor:
            z = self.inner(x)
            if len(x) > 4:
                raise torch.OutOfMemoryError("too many")
            return z

    net, loss_fn, (x, y) = Hungry(), nn.CrossEntropyLoss(), six_samples()

    def body(c: Any) -> None:
        try:
            loss_fn(c(x), y).backward()
        except torch.OutOfMemoryError:
            loss_fn(c(x[:4]), y[:4]).backward()

    check_norm_test(tmp_path, net, loss_fn, body, each(net(x[:4]), y[:4]))


# -- compiled parts ----------------------------------------------------------------------------------------------------


def test_a_compiled_loss_module_stays_what_it_was(tmp_path: Path) -> None:
    plain = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    compiled, net, (x, y) = torch.compile(plain, backend="eager"), linear(), six_samples()
    run = track_body(tmp_path, net, compiled, lambda c: compiled(c(x), y).backward(), quantities=[Loss()])
    assert plain.reduction == "mean" and plain.weight.tolist() == [1, 2, 3]
    np.testing.assert_allclose(run["loss"]["loss"][0], float(plain(net(x), y).detach()), rtol=1e-6)


def test_compiled_submodules(tmp_path: Path) -> None:
    torch.manual_seed(4)
    first, last = nn.Linear(3, 4), nn.Linear(4, 3)
    net = nn.Sequential(torch.compile(first, backend="eager"), nn.Tanh(), torch.compile(last, backend="eager"))
    loss_fn, (x, y) = nn.CrossEntropyLoss(), six_samples()
    check_norm_test(tmp_path, net, loss_fn, lambda c: loss_fn(c(x), y).backward(), each(last(torch.tanh(first(x))), y))


@pytest.mark.filterwarnings("ignore")  # of the compiler
@shows("Refused with an error", "`track` inside a compiled function")
def test_track_inside_a_compiled_function(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = linear(), nn.CrossEntropyLoss(), six_samples()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[NormTest()], schedule=every(1)) as cockpit:

        def step() -> None:
            with cockpit.track(0):
                loss_fn(cockpit(x), y).backward()

        with pytest.raises(RuntimeError, match="around the call of the compiled function, not inside it"):
            torch.compile(step, backend="eager")()


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_targets_that_are_overwritten(tmp_path: Path) -> None:
    torch.manual_seed(5)
    net, mse, (x, _) = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)), nn.MSELoss(), six_samples()
    targets = six_samples(1)[0]
    quantities = [HessTrace(), HessTrace(curvature="hutchinson", name="hutchinson"), HessMaxEV()]

    def fresh(c: Any) -> None:
        for part, target in zip(x.split(3), targets.split(3), strict=True):
            (mse(c(part), target) / 2).backward()

    def reused(c: Any) -> None:
        bx, bt = torch.empty(3, 3), torch.empty(3, 3)
        for part, target in zip(x.split(3), targets.split(3), strict=True):
            bx.copy_(part)
            bt.copy_(target)
            (mse(c(bx), bt) / 2).backward()
            bt.fill_(100.0)

    a = track_body(tmp_path / "a", net, mse, fresh, quantities=quantities)
    b = track_body(tmp_path / "b", net, mse, reused, quantities=quantities)
    for name, field in (("hess_trace", "total"), ("hutchinson", "total"), ("hess_max_ev", "hess_max_ev")):
        np.testing.assert_allclose(b[name][field], a[name][field], rtol=1e-4)


@pytest.mark.filterwarnings("ignore")  # MaskedTensor is a prototype
@pytest.mark.parametrize("kind", ["masked argument", "sparse output"])
def test_tensors_without_plain_memory(tmp_path: Path, kind: str) -> None:
    from torch.masked import masked_tensor

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Any) -> Any:
            if kind == "sparse output":
                z = self.inner(x)
                return z, z.to_sparse()
            return self.inner(x.get_data() * x.get_mask())

    net, loss_fn, (x, y) = Net(), nn.CrossEntropyLoss(), six_samples()

    def body(c: Any) -> None:
        z = c(x)[0] if kind == "sparse output" else c(masked_tensor(x, x > 0))
        loss_fn(z, y).backward()

    check_norm_test(tmp_path, net, loss_fn, body, each(net.inner(x if kind == "sparse output" else x * (x > 0)), y))


# -- what is left in .grad, and optimizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_zeroed_inside_without_new_ones(tmp_path: Path, to_none: bool) -> None:
    """A parameter that is used at every second step; NaN where zeroing and adding cannot be told apart."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: Tensor, step: int) -> Tensor:
            return self.first(x) + (self.second(x) if step % 2 == 0 else 0)

    net, loss_fn, (x, y) = Net(), nn.CrossEntropyLoss(), six_samples()
    with DistCockpit(
        net, loss_fn, store=tmp_path / "run", quantities=[CompressionError()], schedule=every(1)
    ) as cockpit:
        for step in range(4):
            with cockpit.track(step):
                net.zero_grad(set_to_none=to_none)
                loss_fn(cockpit(x, step), y).backward()
    total = open_run(tmp_path / "run")["compression_error"]["total"].values
    assert (total[::2] < 1e-6).all()
    assert (total[1::2] < 1e-6).all() if to_none else np.isnan(total[1::2]).all()


def test_names_of_optimizers(tmp_path: Path) -> None:
    """One by name, one without tracked parameters, none."""
    net, loss_fn = nn.Sequential(linear(), nn.Tanh(), linear()), nn.CrossEntropyLoss()
    first, last = (torch.optim.SGD(net[k].parameters(), lr=0.1) for k in (0, 2))
    everything = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"quantities": [Alpha(), GradNorm()], "schedule": every(1)}
    with DistCockpit(net, loss_fn, {"a": first, "b": last}, store=tmp_path / "a", exclude=["2"], **options):
        pass
    assert {"alpha", "alpha_a"} <= set(open_run(tmp_path / "a").children) and "alpha_b" not in open_run(tmp_path / "a")
    own = [Alpha(optimizer="all")]
    with DistCockpit(net, loss_fn, {"all": everything}, store=tmp_path / "b", quantities=own, schedule=every(1)):
        pass
    assert "alpha_all" in open_run(tmp_path / "b")
    for nothing in ([], {}):
        with pytest.raises(ValueError, match="holds no optimizer"):
            DistCockpit(net, loss_fn, nothing, store=tmp_path / "c", **options)


def test_resuming_with_optimizers_in_another_order(tmp_path: Path) -> None:
    def train(folder: Path, names: tuple[str, ...], state: Any, steps: range, net: nn.Module, optimizers: Any) -> Any:
        given = {name: optimizers[name] for name in names}
        options = {"quantities": [Alpha()], "schedule": every(1), "mode": "a"}
        loss_fn = nn.CrossEntropyLoss()
        with DistCockpit(net, loss_fn, given, store=folder, **options) as cockpit:
            cockpit.load_state_dict(state)
            for step in steps:
                x, y = six_samples(step)
                net.zero_grad()
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
                for optimizer in given.values():
                    optimizer.step()
            return cockpit.state_dict()

    def begin() -> tuple[nn.Module, dict[str, Any]]:
        net = nn.Sequential(linear(), nn.Tanh(), linear())
        halves = {"a": net[0], "b": net[2]}
        return net, {k: torch.optim.SGD(m.parameters(), lr=0.3) for k, m in halves.items()}

    net, optimizers = begin()
    train(tmp_path / "whole", ("a", "b"), {}, range(4), net, optimizers)
    net, optimizers = begin()
    state = train(tmp_path / "run", ("a", "b"), {}, range(2), net, optimizers)
    train(tmp_path / "run", ("b", "a"), state, range(2, 4), net, optimizers)
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    for name in ("alpha", "alpha_a", "alpha_b"):
        for field in ("alpha", "slope_start", "slope_end", "update_norm"):
            np.testing.assert_allclose(run[name][field], whole[name][field], rtol=1e-9, err_msg=f"{name} {field}")
    with pytest.raises(ValueError, match=r"optimizers \['a', 'b'\], this one has \['a', 'c'\]"):
        train(tmp_path / "other", ("a", "c"), state, range(2, 3), net, {"a": optimizers["a"], "c": optimizers["b"]})


def test_a_thread_that_evaluates_during_the_forward_pass(tmp_path: Path) -> None:
    """It calls the same modules; what it computes is none of the step's."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    twin, due = cases.initialised("sigmoid"), list[str]()

    inside, go_on = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def run() -> None:
        with torch.no_grad():
            net(torch.randn(5, 12))

    def evaluate(*_: Any) -> None:
        if threading.current_thread() in threads:  # stays in the middle of the model until the step's pass is over
            inside.set()
            assert go_on.wait(HANG)
        elif due:
            due.clear()
            threads.append(threading.Thread(target=run))
            threads[-1].start()
            assert inside.wait(HANG)

    net[1].register_forward_hook(evaluate)
    quantities = [GradNorm(), MeanGSNR()]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=quantities, schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = cases.data("sigmoid", "mean", step)
            net.zero_grad()
            due.append("once")
            inside.clear()
            go_on.clear()
            with cockpit.track(step):
                z = cockpit(x)
                go_on.set()
                threads[-1].join()
                loss_fn(z, y).backward()
    tree = open_run(tmp_path / "run")
    for step in range(3):
        batch = oracle.batch(twin, twin.state_dict(), cases._nll, *cases.data("sigmoid", "mean", step))
        row = {name: tree[name].sel(step=step) for name in ("grad_norm", "mean_gsnr")}
        np.testing.assert_allclose(row["grad_norm"]["total"], np.linalg.norm(batch.flat.mean(0)), rtol=1e-4)
        np.testing.assert_allclose(row["mean_gsnr"]["mean_gsnr"], oracle.mean_gsnr(batch), rtol=1e-4)


def test_a_module_that_is_exchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[GradNorm()], schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = cases.data("sigmoid", "mean", step)
            if step == 2:
                old, net[0] = net[0], nn.Linear(12, net[0].out_features)
                net[0].weight, net[0].bias = old.weight, old.bias
            net.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    assert "step 2: the model is not the one that was tracked before: '0' is replaced by another module" in caplog.text
    norms = open_run(tmp_path / "run")["grad_norm"]["grad_norm"]
    np.testing.assert_allclose(norms[2], [p.grad.norm() for p in net.parameters()], rtol=1e-5)
