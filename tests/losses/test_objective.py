"""Losses as people write them by hand, found from the calls that compute them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import objectives
import oracle
import pytest
import torch
from objective_runs import data, expected, initialised
from objectives import OBJECTIVES, Data
from own_quantities import Moments
from ranks import Ranks
from repeated_runs import SAMPLES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distcockpit import DistCockpit, every, open_run
from distcockpit.gradients import known
from distcockpit.quantities import Alpha, GradHist1d, GradNorm, Loss, MeanGSNR, NormTest

BINS = np.linspace(-0.5, 0.5, 42)  # zero, where many are but for rounding, lies within one


SETTINGS: dict[str, tuple[list[int], int, float]] = {
    "1 rank": ([24], 1, 0),
    "1 rank, micro-batches, scaler": ([24], 3, 256),
    "2 ranks, micro-batches, formed in backward": ([17, 7], 2, 0),
    "4 ranks, scaler": ([13, 6, 4, 1], 1, 1024),
}
"""Samples of each rank, micro-batches, and the scale of mixed precision (0: none)."""


ALL = [Loss(), GradNorm(), NormTest(), MeanGSNR(), GradHist1d(range=(-0.5, 0.5), bins=41), Alpha()]


def train_objective(
    rank: int, size: int, group: Any, name: str, store: str, setting: str, quantities: Any = ALL
) -> list[dict[str, Tensor]]:
    """The parameters before each step, and after the last."""
    objective, (shards, micro_batches, scale) = OBJECTIVES[name], SETTINGS[setting]
    net = initialised(objective)
    model = net if group is None or not objective.syncs else DistributedDataParallel(net, process_group=group)
    optimizer, states = torch.optim.SGD(net.parameters(), lr=objective.rate), []
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    smaller = 0 if setting.endswith("formed in backward") else known.SMALLER
    options: dict[str, Any] = {"quantities": quantities, "schedule": every(1), "process_group": group}
    with (
        mock.patch("distcockpit.gradients.known.SMALLER", smaller),
        DistCockpit(model, optimizer=optimizer, store=store, **options) as cockpit,
    ):
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_as_people_write_it(ranks: Ranks, tmp_path: Path, name: str, setting: str) -> None:
    objective, size = OBJECTIVES[name], len(SETTINGS[setting][0])
    store = str(tmp_path / "run")
    states = (
        train_objective(0, 1, None, name, store, setting)
        if size == 1
        else ranks.run(size, train_objective, name, store, setting)[0]
    )
    batches = [expected(objective, state, step) for step, state in enumerate(states[:3])]
    run = open_run(store).load()
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


def test_means_over_tokens_and_samples_where_autograds_sums_would_do(ranks: Ranks, tmp_path: Path) -> None:
    """They hold both as each rank divided them."""
    name = "means over tokens and over samples"
    states = ranks.run(4, train_objective, name, str(tmp_path / "run"), "4 ranks, scaler", [GradNorm()])[0]
    norms = [np.linalg.norm(expected(OBJECTIVES[name], state, k).flat.mean(0)) for k, state in enumerate(states[:3])]
    np.testing.assert_allclose(open_run(tmp_path / "run")["grad_norm"]["total"], norms, rtol=1e-4)


def test_divisors_that_agree_at_some_steps(tmp_path: Path) -> None:
    """Class weights and samples: at the second step, and the third, the weights of all micro-batches are the same."""
    net = initialised(OBJECTIVES["class weights"])
    with DistCockpit(net, store=tmp_path / "run", quantities=[GradNorm()], schedule=every(1)) as cockpit:
        d, norms = data(0), []
        for step in range(6):
            y = d.y if step not in (1, 2) else torch.zeros_like(d.y)
            with cockpit.track(step):
                for x, labels in zip(d.x.split(8), y.split(8), strict=True):
                    part = Data(x, labels)
                    z = cockpit(x)
                    loss = F.cross_entropy(z, labels, weight=objectives.WEIGHT) + F.mse_loss(z, part.target)
                    (loss / 3).backward()
            weights = objectives.WEIGHT[y]
            z = net(d.x)
            total = (weights * F.cross_entropy(z, y, reduction="none")).sum() / weights.sum() + F.mse_loss(z, d.target)
            norms.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(net.parameters()))]).norm())
    np.testing.assert_allclose(open_run(tmp_path / "run")["grad_norm"]["total"], torch.stack(norms), rtol=1e-4)


class Checkpointed(objectives.Tokens):
    """Its body is computed again in the backward pass, which `torch.autograd.grad` cannot go through."""

    def forward(self, x: Tensor) -> Any:
        x = x.unflatten(1, (objectives.T, 4)).requires_grad_()
        return self.head(checkpoint(lambda x: torch.tanh(self.body(x)), x, use_reentrant=True))


def test_parts_that_cannot_be_told_apart(tmp_path: Path) -> None:
    """Means over tokens and over samples, in micro-batches."""
    net, d = Checkpointed(), data(0)
    tokens_and_samples = OBJECTIVES["means over tokens and over samples"].loss
    with DistCockpit(net, store=tmp_path / "run", schedule=every(1)) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                for x, y in zip(d.x.tensor_split(3), d.y.tensor_split(3), strict=True):
                    (tokens_and_samples(cockpit(x), Data(x, y), net) / 3).backward()
    run = open_run(tmp_path / "run")
    assert run["grad_norm"]["total"].isnull().all() and run["norm_test"].sizes["step"] == 3
    (notice,) = run.attrs["notices"]
    assert notice["topic"] == "mixed" and "cannot be separated" in notice["text"]


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
    torch.manual_seed(3)
    net = objectives.Net()
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
    with pytest.raises(RuntimeError, match=r"Quantities \['norm_test'\] need per-sample gradients"):
        train_coupled(0, 1, None, name, str(tmp_path / "by hand"), [NormTest()])


# -- against what the optimizer gets, on one process -------------------------------------------------------------------


def guarded(model: Any, d: Data) -> Tensor:
    """Flooding (Ishida et al. 2020) of a loss that is clamped."""
    return (F.cross_entropy(model(d.x), d.y).clamp(max=50) - 1.5).abs() + 1.5


def normalised(model: Any, d: Data) -> Tensor:
    return (F.cross_entropy(model(d.x), d.y, reduction="none") * (d.weight / d.weight.sum())).sum()


class Gathered(objectives.Net):
    """Returns its loss with an axis, as a replica of `DataParallel` does."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(super().forward(x), y).unsqueeze(0)


def beside_another(model: Any, d: Data) -> Tensor:
    """The backward pass of another network is none of the model's."""
    other = nn.Linear(objectives.C, 1)
    z = model(d.x)
    other(z.detach()).mean().backward()
    return F.cross_entropy(z, d.y)


ON_ONE: dict[str, Any] = {
    "weights that add up to 1": normalised,
    "the same by a product": lambda model, d: (
        F.cross_entropy(model(d.x), d.y, reduction="none") @ (d.weight / d.weight.sum())
    ),
    "divided, then summed": lambda model, d: (F.cross_entropy(model(d.x), d.y, reduction="none") / len(d.x)).sum(),
    "a guarded loss": guarded,
    "outputs that are only touched": lambda model, d: F.cross_entropy(z := model(d.x), d.y) + (0 * z).sum(),
    "nanmean": lambda model, d: torch.where(
        d.chosen, F.cross_entropy(model(d.x), d.y, reduction="none"), torch.nan
    ).nanmean(),
    "a loss with an axis": lambda model, d: model(d.x, d.y).sum(),
    "two passes in one root": lambda model, d: model(d.x).square().mean() + F.softplus(-model(-d.x)).mean(),
    "passes with different losses and sizes": lambda model, d: (
        F.cross_entropy(model(d.x[:10]), d.y[:10]) + 0.3 * model(d.x[10:]).square().mean()
    ),
    "beside another network": beside_another,
    "connectionist temporal classification": lambda model, d: F.ctc_loss(
        model(d.x).unsqueeze(0).repeat(4, 1, 1).log_softmax(-1),
        d.y[:, None].clamp(min=1),
        torch.full((len(d.x),), 4),
        torch.ones(len(d.x), dtype=torch.int64),
    ),
}


@pytest.mark.parametrize("name", ON_ONE)
def test_what_the_optimizer_gets(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    net = Gathered() if name == "a loss with an axis" else objectives.Net()
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.1), []
    options: dict[str, Any] = {"quantities": [Loss(), GradNorm(), NormTest(), Alpha()], "schedule": every(1)}
    with DistCockpit(net, optimizer=optimizer, store=tmp_path / "run", **options) as cockpit:
        for step in range(5):
            optimizer.zero_grad()
            with cockpit.track(step):
                loss = ON_ONE[name](cockpit, data(step))
                loss.backward()
            squares = sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)
            expected.append((loss.item(), float(squares) ** 0.5))
            optimizer.step()
    run = open_run(tmp_path / "run")
    losses, norms = zip(*expected, strict=True)
    np.testing.assert_allclose(run["loss"]["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(run["grad_norm"]["total"], norms, rtol=1e-4)
    np.testing.assert_allclose(run["alpha"]["f_start"], losses[:-1], rtol=1e-5)
    assert np.isfinite(run["norm_test"]["norm_test"]).all()


def test_a_term_that_joins_the_loss_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A penalty on weights is of no sample: it counts for each, and the log says so."""
    net, loss_fn = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)), nn.CrossEntropyLoss()
    with caplog.at_level("WARNING"):
        with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
            for step in range(4):
                with cockpit.track(step):
                    loss = loss_fn(cockpit(torch.randn(SAMPLES, 6)), torch.arange(SAMPLES) % 5)
                    (loss + (step > 0) * sum(p.square().sum() for p in net.parameters())).backward()
            for row in cockpit.coverage():
                assert row.route == "closed form" and row.checked
    (said,) = [r.getMessage() for r in caplog.records if "depends on no sample" in r.getMessage()]
    assert said.startswith("distcockpit: step 0:")
