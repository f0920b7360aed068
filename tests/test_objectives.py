"""The loss is found as the loop computes it, told nothing: the table of `objectives.py`, on 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import objectives
import oracle
import pytest
import torch
from objectives import OBJECTIVES, Data, Objective
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, GradHist1d, GradNorm, Loss, MeanGSNR, NormTest

BINS = np.linspace(-0.5, 0.5, 42)  # zero, where many are but for rounding, lies within one

SETTINGS: dict[str, tuple[list[int], int, float]] = {
    "1 rank": ([24], 1, 0),
    "1 rank, micro-batches, scaler": ([24], 3, 256),
    "2 ranks, micro-batches": ([17, 7], 2, 0),
    "4 ranks, scaler": ([13, 6, 4, 1], 1, 1024),
}
"""Samples of each rank, micro-batches, and the scale of mixed precision (0: none)."""


def data(step: int) -> Data:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(objectives.N, 12, generator=generator)
    x[-1, 3] = 1.0  # chosen by masks; it may be alone on its rank
    return Data(x, torch.randint(0, objectives.C, (objectives.N,), generator=generator))


def initialised(objective: Objective) -> nn.Module:
    torch.manual_seed(3)
    return objective.model()


def train(rank: int, size: int, group: Any, name: str, store: str, setting: str) -> list[dict[str, Tensor]]:
    """The parameters before each step, and after the last."""
    objective, (shards, micro_batches, scale) = OBJECTIVES[name], SETTINGS[setting]
    net = initialised(objective)
    model = net if group is None or not objective.syncs else DistributedDataParallel(net, process_group=group)
    optimizer, states = torch.optim.SGD(net.parameters(), lr=objective.rate), []
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    quantities = [Loss(), GradNorm(), NormTest(), MeanGSNR(), GradHist1d(range=(-0.5, 0.5), bins=41), Alpha()]
    options: dict[str, Any] = {"quantities": quantities, "schedule": every(1), "process_group": group}
    with DistCockpit(model, optimizer=optimizer, store=store, **options) as cockpit:
        for step in range(3):
            states.append({k: v.clone() for k, v in net.state_dict().items()})
            everything = data(step)
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            parts = zip(
                everything.x[mine].tensor_split(micro_batches),
                everything.y[mine].tensor_split(micro_batches),
                strict=True,
            )
            optimizer.zero_grad()
            with cockpit.track(step):
                for x, y in parts:
                    tokens = float((everything.tokens != -100).sum())
                    d = Data(x, y, micro_batches, size, tokens)
                    roots = objective.loss(objective.call(cockpit, d), d, net)
                    divisor = micro_batches if objective.divides else 1
                    if isinstance(roots, Tensor):
                        objective.backward(scaler.scale(roots / divisor))
                    else:
                        objective.backward([scaler.scale(root / divisor) for root in roots])
            for p in net.parameters():
                if group is not None and not objective.syncs:
                    torch.distributed.all_reduce(p.grad, group=group)
                    p.grad /= size
            scaler.step(optimizer)
            scaler.update()
        states.append({k: v.clone() for k, v in net.state_dict().items()})
    return states


class Whole(nn.Module):
    """For the oracle: the model, with what the loop makes of one sample; it tells the model that was called."""

    def __init__(self, objective: Objective, called: list[nn.Module]) -> None:
        super().__init__()
        self.net = initialised(objective)
        self.call, self.note = objective.call, called.append

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        other = copy.copy(self)
        other._modules = {"net": copy.deepcopy(self.net, memo)}
        return other

    def forward(self, x: Tensor) -> Any:
        self.note(self.net)
        d = Data(x, torch.zeros(len(x), dtype=torch.int64))
        passes = self.call in (objectives.pairs, objectives.triplets)
        return self.call(self.net, d) if passes else self.net(x)


def expected(objective: Objective, state: dict[str, Tensor], step: int) -> oracle.Batch:
    """The batch as one process sees it, a sample at a time."""
    everything, called = data(step), []

    def terms(out: Any, i: Tensor) -> tuple[Tensor, Any]:
        return objective.terms(out, Data(everything.x[i].double(), everything.y[i]), called[-1])

    whole, places = Whole(objective, called), torch.arange(objectives.N)
    return oracle.batch(whole, {f"net.{k}": v for k, v in state.items()}, terms, everything.x, places)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_as_people_write_it(ranks: Ranks, tmp_path: Path, name: str, setting: str) -> None:
    objective, size = OBJECTIVES[name], len(SETTINGS[setting][0])
    store = str(tmp_path / "run")
    states = train(0, 1, None, name, store, setting) if size == 1 else ranks.run(size, train, name, store, setting)[0]
    batches = [expected(objective, state, step) for step, state in enumerate(states[:3])]
    run = open_run(store)
    for step, batch in enumerate(batches):
        at = {quantity: run[quantity].sel(step=step) for quantity in ("loss", "grad_norm", "norm_test", "mean_gsnr")}
        np.testing.assert_allclose(at["loss"]["loss"], batch.losses.mean(), rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(at["grad_norm"]["total"], np.linalg.norm(batch.flat.mean(0)), rtol=1e-4)
        np.testing.assert_allclose(at["norm_test"]["norm_test"], oracle.norm_test(batch), rtol=1e-4)
        np.testing.assert_allclose(at["mean_gsnr"]["mean_gsnr"], oracle.mean_gsnr(batch), rtol=1e-3)
        counts, sure = run["grad_hist_1d"]["counts"].sel(step=step).values, oracle.grad_hist_1d(batch, BINS)
        assert np.abs(counts - sure).sum() <= 4 and counts.sum() == sure.sum()
    for step in range(2):
        row, sure = run["alpha"].sel(step=step), oracle.alpha(batches[step], batches[step + 1])
        for field in ("f_start", "f_end", "slope_start", "slope_end", "f_start_variance", "slope_end_variance"):
            np.testing.assert_allclose(row[field], sure[field], rtol=2e-3, atol=1e-6, err_msg=field)
        if sure["alpha"] != -1:
            np.testing.assert_allclose(row["alpha"], sure["alpha"], rtol=2e-2, atol=1e-3)


# -- what is no sum over samples ---------------------------------------------------------------------------------------


def dice(z: Tensor, d: Data) -> Tensor:
    p = z.sigmoid()
    return 1 - 2 * (p * d.bits).sum() / (p.sum() + d.bits.sum())


def over_the_batch(z: Tensor, d: Data) -> Tensor:
    return ((z - z.mean(0)) ** 2).mean()


def gradient_penalty(model: Any, d: Data) -> Tensor:
    x = d.x.clone().requires_grad_()
    z = model(x)
    (at_inputs,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return F.cross_entropy(z, d.y) + at_inputs.square().sum(1).mean()


COUPLED: dict[str, tuple[Any, str]] = {
    "Dice": (lambda model, d: dice(model(d.x), d), r"\(Div\)"),
    "contrastive": (
        lambda model, d: F.cross_entropy(torch.tanh(model(d.x)) @ torch.tanh(model(d.x)).T, torch.arange(len(d.x))),
        r"\(cross_entropy\)",
    ),
    "statistics of the batch": (lambda model, d: over_the_batch(model(d.x), d), r"\(mean\)"),
    "a root of a mean": (lambda model, d: F.mse_loss(model(d.x), d.target).sqrt(), r"\(Sqrt\)"),
    "the largest loss": (
        lambda model, d: F.cross_entropy(model(d.x), d.y, reduction="none").max(),
        r"\(max\)",
    ),
    "a gradient penalty": (gradient_penalty, "create_graph"),
}


def train_coupled(rank: int, size: int, group: Any, name: str, store: str, quantities: Any) -> list[Tensor]:
    net = initialised(Objective(None, None))  # type: ignore[arg-type]
    optimizer, d = torch.optim.SGD(net.parameters(), lr=0.1), data(0)
    n = [24] if size == 1 else [15, 9]
    mine = slice(sum(n[:rank]), sum(n[: rank + 1]))
    options: dict[str, Any] = {"store": store, "enabled": bool(store), "quantities": quantities}
    with DistCockpit(net, optimizer=optimizer, schedule=1, process_group=group, **options) as cockpit:
        for step in range(4):
            optimizer.zero_grad()
            with cockpit.track(step):
                COUPLED[name][0](cockpit, Data(d.x[mine], d.y[mine])).backward()
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples(ranks: Ranks, tmp_path: Path, name: str, size: int) -> None:
    """A preset goes on with what there is, and says why; what was asked for by hand is an error at the first step."""
    store = str(tmp_path / "run")
    if size == 1:
        after = train_coupled(0, 1, None, name, store, "economy")
    else:
        after = ranks.run(size, train_coupled, name, store, "economy")[0]
    if size == 1:
        plain = train_coupled(0, 1, None, name, "", None)
        assert all(torch.equal(a, b) for a, b in zip(after, plain, strict=True))
    run = open_run(store)
    (notice,) = [each for each in run.attrs["notices"] if each["topic"] == "coupled"]
    assert notice["step"] == 0 and re.search(COUPLED[name][1], notice["text"])
    for quantity, field in [("loss", "loss"), ("norm_test", "norm_test"), ("grad_norm", "total"), ("alpha", "alpha")]:
        assert run[quantity].sizes["step"] >= 3 and run[quantity][field].isnull().all(), quantity
    meanings = run["alpha"]["status"].attrs["flag_meanings"].split()
    assert {meanings[int(status)] for status in run["alpha"]["status"]} == {"no_individual_gradients"}
    assert not run["update_size"]["update_size"].isnull().any()
    assert run["rank_health"]["nonfinite_gradients"].values.max() == 0
    with pytest.raises(RuntimeError, match=r"Quantities \['norm_test'\] need individual gradients"):
        train_coupled(0, 1, None, name, str(tmp_path / "by hand"), [NormTest()])


def test_the_page_on_losses_lists_them() -> None:
    page = Path(__file__).parents[1] / "docs" / "losses.md"
    assert page.read_text().endswith(objectives.table())
