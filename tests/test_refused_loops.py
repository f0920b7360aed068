"""Loops that are refused: what the error says, and that the way out which it names works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from loops import shows
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, Loss, MeanGSNR


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


def wrap_in_fsdp(rank: int, size: int, group: Any, store: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    said = []
    for part in (False, True):
        net = cases.initialised("deep")
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(net.middle if part else net, mesh=mesh)
        try:
            DistCockpit(net, nn.CrossEntropyLoss(), store=store, quantities=[MeanGSNR()])
        except TypeError as error:
            said.append(str(error))
    net = cases.initialised("deep")
    net.last.weight = nn.Parameter(distribute_tensor(net.last.weight, mesh, [Shard(1)]))
    try:
        DistCockpit(net, nn.CrossEntropyLoss(), store=store, quantities=[MeanGSNR()])
    except TypeError as error:
        said.append(str(error))
    return said


@shows("Refused with an error", "FSDP2 (`fully_shard`), whole or in part, and tensor parallelism")
def test_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    for whole, part, tensor in ranks.run(4, wrap_in_fsdp, str(tmp_path / "run")):
        assert (
            whole.startswith("model=FSDPDeep is sharded with fully_shard (FSDP2)")
            and "DistributedDataParallel" in whole
        )
        assert part.startswith("Module 'middle' of the model is sharded with fully_shard (FSDP2)")
        assert tensor.startswith("Parameter 'last.weight' is a DTensor")


@pytest.mark.parametrize(
    "optimizer, kind, words",
    [
        (lambda net: [torch.optim.SGD(net.parameters()), 3], TypeError, "optimizer=3: must be a torch.optim.Optimizer"),
        (lambda net: {"a/b": torch.optim.SGD(net.parameters()), "c": None}, ValueError, "optimizer={'a/b': ...}"),
        (
            lambda net: {"a": torch.optim.SGD(net.parameters()), "b": torch.optim.SGD(net[0].parameters())},
            ValueError,
            "'a' and 'b' both hold parameter '0.weight'",
        ),
        (
            lambda net: [torch.optim.SGD(net.parameters()), torch.optim.SGD(nn.Linear(2, 2).parameters())],
            ValueError,
            "holds none of the model's parameters",
        ),
    ],
)
def test_optimizers_that_are_refused(tmp_path: Path, optimizer: Any, kind: type[Exception], words: str) -> None:
    net = cases.initialised("sigmoid")
    with pytest.raises(kind, match=words):
        DistCockpit(net, None, optimizer(net), store=tmp_path / "run", quantities=[MeanGSNR()])


def test_alpha_of_an_optimizer_that_is_not_there(tmp_path: Path) -> None:
    net = cases.initialised("sigmoid")
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(ValueError, match=r"Alpha\(optimizer='muon'\): no optimizer of this name"):
        DistCockpit(net, None, optimizer, store=tmp_path / "run", quantities=[Alpha(optimizer="muon")])


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        ({"weight": -1}, ValueError, r"record_losses\(weight=-1\): must be at least 0"),
        ({"weight": "ten"}, TypeError, r"record_losses\(weight='ten'\): must be a number"),
        (
            {"divisor": 3.0},
            ValueError,
            r"record_losses\(divisor=3.0\): the divisor of per-sample losses is measured",
        ),
    ],
)
def test_what_record_losses_refuses(tmp_path: Path, arguments: dict, kind: type[Exception], words: str) -> None:
    net, (x, y) = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0)
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[Loss()], schedule=every(1)) as cockpit:
        with pytest.raises(kind, match=words), cockpit.track(0):
            cockpit.record_losses(F.cross_entropy(net(x), y, reduction="none"), **arguments)
