"""A tracked step in a loop: order, exchanges, memory, and loops that are refused."""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from construction import CE, construct, first_order
from conv_and_norm import data, network, without_waiting
from loops import shows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from waiting import HANG
from watched_runs import everything

from distcockpit import DistCockpit, StoreOptions, every, open_run, presets
from distcockpit.gradients import kernels
from distcockpit.quantities import Alpha, HessTrace, MeanGSNR
from distcockpit.store.keys import FolderKeys

# What makes the host wait for a device: a value is read, or the shape of a result depends on values.
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique", "unique_", "bincount", "equal")


class Operations(TorchDispatchMode):
    """The operations of torch on this thread, and what of them waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def waits(self) -> list[str]:
        return [name for name in self.names if name.startswith(WAITS)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [None, ["InnerTest", "GradNorm"], ["NormTest", "GradNorm"]])
def test_no_wait_for_the_device_inside_track(tmp_path: Path, monkeypatch: Any, names: list[str] | None) -> None:
    monkeypatch.setattr(kernels, "numba_cpu", None)  # what runs on an accelerator
    chosen = [quantity for quantity in without_waiting() if names is None or type(quantity).__name__ in names]
    net, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = {}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(7):
            x, y = data(step)
            with Operations() as operations, cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[step] = operations.waits
            assert operations.names
    assert seen[3]  # a step that checks everything reads its verdict, so the test can see a wait
    assert seen[2] == seen[4] == seen[5] == seen[6] == [], seen
    assert open_run(tmp_path / "r")["grad_norm"].sizes["step"] == 7


def test_an_untracked_step_does_nothing(tmp_path: Path) -> None:
    def operations(cockpit: DistCockpit, net: nn.Module, step: int) -> tuple[list[str], int]:
        x, y = data(step)
        hooks = 0
        with Operations() as seen, cockpit.track(step):
            loss = loss_fn(cockpit(x), y)
            for module in net.modules():
                hooks += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            hooks += sum(len(p._backward_hooks or ()) for p in net.parameters())
            loss.backward()
        return seen.names, hooks

    options = {"quantities": presets.economy(), "schedule": every(4)}
    net, off, loss_fn = network(), network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        DistCockpit(off, store="", enabled=False) as nothing,
        DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", **options) as cockpit,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for step in range(4):
            with_it, hooks = operations(cockpit, net, step)
            without, none = operations(nothing, off, step)
            assert none == 0
            if step < 2:  # the step itself, and the end of alpha's update
                assert hooks > 0 and len(with_it) > len(without)
            else:
                assert hooks == 0 and with_it == without


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    """The store hangs until the training is over: it would never be over if `track` waited for it."""
    net, loss_fn, steps = network(), nn.CrossEntropyLoss(), 30
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    is_over, waited, put = threading.Event(), [], FolderKeys.put

    def hangs(self: FolderKeys, items: Any) -> None:
        waited.append(is_over.wait(HANG))
        put(self, items)

    options = {"quantities": "economy", "schedule": every(1), "store_options": StoreOptions(flush_seconds=1e-3)}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", **options) as cockpit:
        monkeypatch.setattr(FolderKeys, "put", hangs)
        for step in range(steps):
            x, y = data(step)
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
        is_over.set()
    assert waited and all(waited)
    assert open_run(tmp_path / "r")["grad_norm"].sizes["step"] == steps


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class InPlace(Functional):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu_(self.first(x)))


def forward(net: nn.Module, step: int = 0) -> torch.Tensor:
    x, y = cases.data("mlp", "mean", step)
    return CE()(net(x), y)


def no_backward(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    loss_fn(net(x), y)


def other_loss(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    loss_fn(net(x), y)
    (net(x) ** 2).mean().backward()


def step_inside(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    loss_fn(net(x), y).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def no_model(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    pass


def wrong_record(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    net(x)
    cockpit.record_losses(torch.ones(3))


def early_record(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    cockpit.record_losses(torch.ones(24))


def functional(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    nn.functional.cross_entropy(net(x), y).backward()


class Fused(torch.autograd.Function):
    """A mean over samples that no graph shows."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        probabilities = z.softmax(1)
        ctx.save_for_backward(probabilities, y)
        return -probabilities.log().gather(1, y[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        probabilities, y = ctx.saved_tensors
        return factor * (probabilities - nn.functional.one_hot(y, probabilities.shape[1])) / len(y), None


def opaque(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    Fused.apply(net(x), y).backward()


def of_tokens(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    loss_fn(net(x.long().remainder(7)), y).backward()


def scalar(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    net(x).backward()


def functional_twice(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    functional(cockpit, net, x, y, loss_fn)
    functional(cockpit, net, x, y, loss_fn)


def plain(cockpit: DistCockpit, net: nn.Module, x: Any, y: Any, loss_fn: Any) -> None:
    loss_fn(net(x), y).backward()


class Hole(nn.Module):
    """Uses a child's weight in a penalty, and returns nothing but its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sigmoid(self.used(x))).square().mean() + self.used.weight.square().sum()


class Borrowed(nn.Module):
    """Uses a child's weight without calling the child, on rows that are not the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sigmoid(torch.cat([x, x]) @ self.used.weight)[: len(x)])


class Mixer(nn.Module):
    """Normalises over the batch by itself."""

    def __init__(self, embed: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 12) if embed else nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        z = z.mean(1) if isinstance(self.first, nn.Embedding) else z
        return self.head((z - z.mean(0)) / z.std(0))


STEPS: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {
    "no backward": (no_backward, CE(), {}, ["no backward before `track` ended", "torch.no_grad()"]),
    "loss that is not differentiated": (other_loss, CE(), {}, ["backward"]),
    "optimizer inside": (step_inside, CE(), {}, ["'0.weight' changed inside `track`", "after the `with` block"]),
    "no model": (no_model, CE(), {}, ["without a forward pass", "cockpit(x)"]),
    "shape of recorded losses": (wrong_record, None, {}, ["(3,)", "(24,)"]),
    "losses before the model": (early_record, None, {}, ["before the model", "cockpit(x)"]),
    "no individual losses": (opaque, None, {"quantities": [Alpha()]}, ["['alpha']", "record_losses"]),
    "weight of two": (functional_twice, None, {"track": {"weight": 3}}, ["weight=3", "2 micro-batches"]),
    "hole": (
        scalar,
        None,
        {"model": Hole()},
        ["'used.weight'", "Linear", "call of add", "has no batch axis", "exclude=['used']"],
    ),
    "slow route that is not wanted": (
        plain,
        CE(),
        {"model": Borrowed(), "fallback": "error"},
        ["'used.weight'", "call of matmul", "has no batch axis", "fallback='warn'", "exclude=['used']"],
    ),
    "samples that are mixed": (plain, CE(), {"model": Mixer(False)}, ["mixes the samples", "Mixer"]),
    "tokens that are mixed": (of_tokens, CE(), {"model": Mixer(True)}, ["mixes the samples", "Mixer"]),
    "curvature of a functional activation": (
        plain,
        CE(),
        {"model": Functional(), "quantities": [HessTrace()]},
        ["between 'first' and 'second'", "nn.ReLU", "Leave quantities with curvature out"],
    ),
    "curvature of a functional activation in place": (
        plain,
        CE(),
        {"model": InPlace(), "quantities": [HessTrace()]},
        ["'diag_h'", "InPlace", "chain of modules", "Leave quantities with curvature out"],
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_in_the_first_tracked_step(tmp_path: Path, case: str) -> None:
    body, loss_fn, options, words = STEPS[case]
    options = {"quantities": first_order, **options}
    net, track = options.pop("model", None) or cases.initialised("mlp"), options.pop("track", {})
    x, y = cases.data("mlp", "mean", 0)
    cockpit = construct(tmp_path, net, loss_fn, schedule=every(1), **options)
    with pytest.raises((RuntimeError, ValueError)) as error, cockpit.track(0, **track):
        body(cockpit, net, x, y, loss_fn)
    for word in words:
        assert word in str(error.value), f"{word!r} not in: {error.value}"
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())
    cockpit.close()
    assert open_run(tmp_path / "run").attrs["state"] == "closed"


@pytest.mark.parametrize("model", ["cnn", "attention", "tokens"])
def test_tracked_steps_keep_nothing_alive(tmp_path: Path, model: str) -> None:
    """Not even until the garbage collector comes: it comes seldom where few objects hold much memory."""
    net, loss_fn = cases.initialised(model), nn.CrossEntropyLoss()
    chosen = [q for q in everything() if not isinstance(q, HessTrace)]
    counts = []
    gc.collect()
    gc.disable()
    try:
        with DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", quantities=chosen, schedule=every(1)) as cockpit:
            for step in range(20):
                x, y = cases.data(model, "mean", step)
                with cockpit.track(step):
                    loss_fn(net(x), y).backward()
                if step in (4, 19):  # behind several steps that check themselves
                    cockpit.flush()
                    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
                    counts.append(Counter(f"{type(t).__name__} {t.dtype} {tuple(t.shape)}" for t in tensors))
                    del tensors
    finally:
        gc.enable()
    grown = counts[1] - counts[0]
    assert grown.total() < 15, grown  # not one for each of the steps in between


@shows("Refused with an error", "an optimizer that steps during the backward pass")
def test_an_optimizer_in_the_backward_pass(tmp_path: Path) -> None:
    net, (x, y), loss_fn = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0), nn.CrossEntropyLoss()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        with pytest.raises(RuntimeError, match="changed inside `track`.*during the backward pass.*not supported"):
            with cockpit.track(0):
                loss_fn(net(x), y).backward()


def test_where_lbfgs_is_tracked(tmp_path: Path) -> None:
    """Around the step is an error that says where; once inside, later calls at the same step are not tracked."""
    net, (x, y), loss_fn = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0), nn.CrossEntropyLoss()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", **options) as cockpit:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            return loss

        with pytest.raises(RuntimeError, match="put the `with` block inside the closure"), cockpit.track(0):
            optimizer.step(closure)
        for step in (1, 1, 2):
            with cockpit.track(step):
                closure()
        with pytest.raises(ValueError, match="steps must increase"), cockpit.track(1):
            closure()
    assert list(open_run(tmp_path / "run")["mean_gsnr"]["step"].values) == [1, 2]


def test_a_step_that_is_repeated_has_the_alpha_of_one_that_is_not(tmp_path: Path) -> None:
    """The calls at the start of the update are gone by then; their slopes are not."""
    rows = []
    for fails in (False, True):
        net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        store = tmp_path / f"{fails}"
        with DistCockpit(net, loss_fn, store=store, quantities=[Alpha()], schedule=every(1)) as cockpit:
            for step in range(4):
                x, y = cases.data("mlp", "mean", step)
                if fails and step == 2:
                    with pytest.raises(KeyError), cockpit.track(step):
                        loss_fn(net(x), y)
                        raise KeyError
                optimizer.zero_grad()
                with cockpit.track(step):
                    loss_fn(net(x), y).backward()
                optimizer.step()
        rows.append(open_run(store)["alpha"])
    for field in ("alpha", "slope_start", "slope_end", "update_norm", "status"):
        assert list(rows[0][field].values) == list(rows[1][field].values), field
    assert list(rows[0]["step"].values) == [0, 1, 2]
