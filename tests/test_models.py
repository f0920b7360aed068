"""Any model: individual gradients of architectures of all kinds, one process and real ranks, against autograd."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import architectures
import numpy as np
import oracle
import pytest
import torch
from architectures import CASES
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit.capture.coverage import CALLS
from distcockpit.gradients import parts
from distcockpit.quantities import (
    Alpha,
    GradHist1d,
    InnerTest,
    Loss,
    MeanGSNR,
    OutputActivation,
    OutputGradientGeometry,
    OutputNorm,
    Quantity,
)
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group

SHARDINGS = {"one": [6], "uneven 2": [4, 2], "uneven 4": [3, 1, 1, 1]}
STEPS = 2  # the second one runs with what the first one learned


@dataclass(frozen=True, kw_only=True)
class Moments(Quantity):
    """Per parameter: the squared norm of the mean gradient, and the mean of the squared norms."""

    source: ClassVar[str] = "the test"

    @property
    def needs(self) -> Needs:
        return Needs(mean_gradient=True, squared_norms=True)

    def group(self, model: Model) -> Group:
        fields = {k: Field(("parameter",), k, "loss^2", "") for k in ("of_mean", "mean_of")}
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> dict[str, Any]:
        return {"of_mean": batch.replicated(batch.squared_norm(batch.mean_gradient)), "mean_of": batch.squared_norms}

    def finalize(self, totals: Any, n: int) -> dict[str, Any]:
        return {"of_mean": totals["of_mean"], "mean_of": totals["mean_of"] / n}


Report = tuple[list[tuple[np.ndarray, dict[str, np.ndarray]]], dict[str, tuple[str, ...]]]


def train(rank: int, size: int, group: Any, name: str, store: str, shards: list[int]) -> Report:
    """Two tracked steps; returns the individual gradients of this rank's samples, and the routes."""
    case, net = CASES[name], architectures.built(name)
    model: Any = net if group is None else DistributedDataParallel(net, process_group=group, **case.ddp)
    first, loss_fn, found = sum(shards[:rank]), case.loss_fn(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = [Moments(), MeanGSNR(), InnerTest(), GradHist1d(range=(-0.5, 0.5), bins=41)]
    options = {"quantities": chosen, "schedule": every(1), **case.options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # DDP's own
        with DistCockpit(model, loss_fn, store=store, **options) as cockpit:
            for step in range(STEPS):
                batch = architectures.data(name, step, sum(shards))
                batch = architectures.part(name, batch, slice(first, first + shards[rank]))
                torch.manual_seed(10 * step + rank)
                buffers = {k: b.clone() for k, b in net.named_buffers()}
                losses, gradients = architectures.individual_gradients(name, net, batch, shards[rank])
                for k, b in net.named_buffers():
                    b.data.copy_(buffers[k])
                found.append((losses.numpy(), {k: g.numpy() for k, g in gradients.items()}))
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                with cockpit.track(step):
                    case.train(cockpit, batch, loss_fn).backward()
                optimizer.step()
            routes = special(cockpit)
    return found, routes


def special(cockpit: DistCockpit) -> dict[str, tuple[str, ...]]:
    """The parameters that take a slow route, and those for which a module is run as a whole."""
    rows = list(cockpit.coverage())
    return {
        "slow": tuple(sorted(row.parameter for row in rows if row.route == "slow exact fallback")),
        "whole": tuple(sorted(row.parameter for row in rows if row.route == "module run again")),
    }


def close(actual: Any, expected: Any, case: architectures.Case) -> None:
    scale = float(np.abs(expected).max())
    assert scale > 0 and np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=case.rtol, atol=case.rtol * 1e-3 * scale)


def check(name: str, ranks: Ranks | None, store: str, shards: list[int]) -> dict[str, tuple[str, ...]]:
    case = CASES[name]
    if len(shards) == 1 or ranks is None:
        reports = [train(0, 1, None, name, store, shards)]
    else:
        reports = ranks.run(len(shards), train, name, store, shards)
    run = open_run(store)
    for step in range(STEPS):
        parts = [found[step] for found, _ in reports]
        gradients = {k: np.concatenate([g[k] for _, g in parts]) for k in parts[0][1]}
        batch = oracle.Batch(np.concatenate([losses for losses, _ in parts]), gradients, {}, {})
        rows = {group: run[group].sel(step=step) for group in ("moments", "mean_gsnr", "inner_test", "grad_hist_1d")}
        assert list(rows["moments"]["parameter"].values) == list(gradients)
        close(rows["moments"]["mean_of"], [(g**2).sum() / batch.n for g in gradients.values()], case)
        close(rows["moments"]["of_mean"], [(g.mean(0) ** 2).sum() for g in gradients.values()], case)
        np.testing.assert_allclose(rows["mean_gsnr"]["mean_gsnr"], oracle.mean_gsnr(batch), rtol=10 * case.rtol)
        np.testing.assert_allclose(rows["inner_test"]["inner_test"], oracle.inner_test(batch), rtol=10 * case.rtol)
        counts = oracle.grad_hist_1d(batch, oracle.edges(-0.5, 0.5, 41))
        strays = np.abs(rows["grad_hist_1d"]["counts"].values - counts).sum() / counts.sum()
        assert strays < 20 * case.rtol, strays
    return reports[0][1]


def shardings(place: int, case: architectures.Case) -> list[str]:
    """One process and 4 ranks; two ranks, which add nothing but time, for every fourth model."""
    return ["one", *(["uneven 4"] if case.ranks else []), *(["uneven 2"] if case.ranks and place % 4 == 0 else [])]


@pytest.mark.parametrize(
    "name, sharding", [(name, k) for place, (name, case) in enumerate(CASES.items()) for k in shardings(place, case)]
)
def test_model(ranks: Ranks, tmp_path: Path, monkeypatch: Any, name: str, sharding: str) -> None:
    monkeypatch.setattr(parts, "FEW", 2)  # so that in one process, parts of the batch are run
    routes = check(name, ranks, str(tmp_path / "run"), SHARDINGS[sharding])
    assert routes == {"slow": CASES[name].slow, "whole": CASES[name].whole}


class Notes:
    """Batch sizes; no list, so that it is not among what replays restore."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.whole_only = False


class Gated(nn.Module):
    """A parameter of its own, attention with another layout, and random numbers."""

    def __init__(self, gate: str, can_be_mapped: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3)
        self.gate, self.can_be_mapped, self.notes = gate, can_be_mapped, Notes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.sizes.append(len(x))
        if not self.can_be_mapped:
            float(x.detach().sum())  # which `vmap` does not allow
        if self.notes.whole_only and len(x) < 19:
            if self.gate == "later":
                raise ValueError("not a part of the batch")
            x = 2 * x
        z = (
            torch.cat([x.flatten(0, 1)]) * self.scale
        )  # a call whose rows are no samples, and nothing tells whose they are
        z = z.view_as(x).transpose(0, 1)
        z = self.attention(z, z, z, need_weights=False)[0].transpose(0, 1)
        if self.gate == "noise":
            return z * torch.rand(len(x), 1, 6, dtype=x.dtype)
        if self.gate == "size of the batch":
            return z * len(x)
        return nn.functional.dropout(z, 0.4, self.training)


@pytest.mark.parametrize("can_be_mapped", [True, False], ids=["mapped", "in parts"])
@pytest.mark.parametrize("gate", ["dropout", "noise", "size of the batch", "later", "later, silently"])
def test_a_few_samples_at_a_time(tmp_path: Path, gate: str, can_be_mapped: bool) -> None:
    """Single samples, or parts, get the batch's random numbers; what depends on the size of the batch is not cut."""
    torch.manual_seed(0)
    n, gated, expected, sizes = 19, Gated(gate, can_be_mapped).double(), [], []
    net = nn.Sequential(gated, nn.Flatten(), nn.Linear(24, 5)).double()
    x, y, loss_fn = torch.randn(n, 4, 6, dtype=torch.float64), torch.arange(n) % 5, nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        for step in range(10):
            torch.manual_seed(step)
            losses = nn.functional.cross_entropy(net(x), y, reduction="none")
            after = torch.rand(3)
            rows = [torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for loss in losses]
            expected.append([sum(row[k].square().sum() for row in rows) / n for k in range(len(rows[0]))])
            torch.manual_seed(step)
            gated.notes.sizes = []
            gated.notes.whole_only = gate.startswith("later") and step > 4
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            sizes.append(gated.notes.sizes)
            gated.notes.sizes = []
            assert torch.equal(torch.rand(3), after), "the random numbers of the run are others"
    # The training, what is drawn and comes out, the parts. Some calls ask whether that works.
    parts_of = [1] if can_be_mapped else [8, 8, 3]
    usual = {"size of the batch": [n, n], "later": [n, n, parts_of[0], n]}.get(gate, [n, n, *parts_of])
    assert usual in sizes, sizes
    found = open_run(tmp_path / "run")["moments"]["mean_of"].values
    unknown = np.isnan(found[:, 0])  # that of the scale, where a part is not what it is in the whole batch
    assert unknown.any() == (gate == "later, silently") and not unknown[:2].any() and not np.isnan(found[:, 1:]).any()
    expected = np.array(expected)
    np.testing.assert_allclose(found[~unknown], expected[~unknown], rtol=1e-9)
    np.testing.assert_allclose(found[:, 1:], expected[:, 1:], rtol=1e-9)


def test_what_a_hook_keeps_can_be_used(tmp_path: Path) -> None:
    """Layers are run again after the step, and the user's hooks with them: what these keep are ordinary tensors."""
    torch.manual_seed(0)
    kept: dict[str, torch.Tensor] = {}
    net = nn.Sequential(architectures.Net(architectures.Attention(), 24))
    attention = net[0].body.attend
    attention.register_forward_hook(lambda module, args, output: kept.update(output=output[0]))
    loss_fn, x, y = nn.CrossEntropyLoss(), torch.randn(12, 4, 6), torch.arange(12) % 5
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            assert kept["output"].detach().square().mean().item() > 0 and len(str(kept["output"])) > 100


def test_parts_do_not_depend_on_what_is_asked_for() -> None:
    """What is known of a part holds for every sample in it, also where one sample at a time is asked for."""
    assert parts.pieces(slice(0, 19), 19) == [slice(0, 8), slice(8, 16), slice(16, 19)]
    assert parts.pieces(slice(9, 10), 19) == [slice(8, 16)] and parts.pieces(slice(15, 17), 19)[1] == slice(16, 19)


def test_which_rows_agree() -> None:
    nan, inf = torch.nan, torch.inf
    expected = {0: torch.tensor([1.0, nan, inf, 1000.0, 1.0]), 2: torch.ones(5, 2, 3)}
    found = {0: torch.tensor([1.1, nan, inf, 1000.5, nan]), 2: torch.ones(5, 2, 3)}
    assert parts.rows_agree(found, expected, slice(0, 5), 1e-3).tolist() == [True, True, True, True, False]
    found[2][3, 1, 1] = 2.0
    assert parts.rows_agree(found, expected, slice(0, 5), 1e-3).tolist() == [True, True, True, False, False]
    assert parts.rows_agree({0: torch.ones(3, 0)}, {0: torch.ones(3, 0)}, slice(0, 3), 1e-3).all()


def test_the_readme_says_what_works() -> None:
    """Made by `python tests/architectures.py`."""
    assert architectures.table() in (Path(__file__).parents[1] / "README.md").read_text()


def test_coverage(tmp_path: Path) -> None:
    net = nn.Sequential(
        architectures.ClassToken(), nn.Flatten(), nn.Linear(24, 7), nn.Linear(7, 5), nn.Conv1d(1, 1, 1, bias=False)
    )
    net[2].bias.requires_grad_(False)
    loss_fn, x, y = nn.CrossEntropyLoss(), torch.randn(6, 4, 6), torch.arange(6) % 5
    net.forward = lambda x: net[4](net[3](net[2](net[1](net[0](x))))[:, None])[:, 0]
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "exclude": ["3"]}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        before = cockpit.coverage()
        assert before["0.scale"].route == CALLS and not any(row.checked for row in before)
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        after = cockpit.coverage()
    routes = {row.parameter: row.route for row in after}
    assert routes == {
        "0.token": CALLS,
        "0.positions": "closed form",
        "0.scale": "closed form",
        "0.mix.weight": "closed form",
        "0.mix.bias": "closed form",
        "2.weight": "closed form",
        "2.bias": "not tracked",
        "3.weight": "not tracked",
        "3.bias": "not tracked",
        "4.weight": "closed form",
    }
    assert after["2.bias"].why == "frozen: requires_grad is False" and after["3.bias"].why.startswith("left out")
    assert after["0.scale"].layers == ("0",) and not after["0.scale"].why
    assert all(row.checked == (row.route != "not tracked") for row in after)
    text = str(after).splitlines()
    assert len(text) == 1 + len(after) and text[1].split()[:2] == ["0.token", "1x1x6"]
    assert list(after.to_dataframe().index) == list(routes)
    assert open_run(tmp_path / "run").attrs["coverage"] == {
        row.parameter: {"route": row.route, "layers": list(row.layers), "checked": row.checked, "why": row.why}
        for row in after
    }
    with pytest.raises(KeyError, match="no parameter 'nothing'"):
        after["nothing"]


def test_the_notice_of_a_slow_route(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = architectures.built("mixture of experts"), nn.CrossEntropyLoss()
    batch = architectures.data("mixture of experts", 0, 6)
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(batch["x"]), batch["y"]).backward()
    (notice,) = [r.getMessage() for r in caplog.records if "slow" in r.getMessage()]
    for words in ("4 of 8 parameters", "one backward pass per sample", "'body' (Experts)", "fallback='error'"):
        assert words in notice


class OneSize(nn.Module):
    """Cannot be called with another number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = nn.Embedding(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 6
        return self.head((x + self.positions(torch.arange(6))).tanh().mean(1))


def test_a_model_of_one_batch_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As many positions as samples, and no way to look: the check of rows tells them apart."""
    torch.manual_seed(3)
    net, loss_fn, x, y = OneSize(), nn.CrossEntropyLoss(), torch.randn(6, 6, 6), torch.arange(6) % 5
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        assert cockpit.coverage()["positions.weight"].route == CALLS
    assert "could not be called with one more sample (AssertionError" in caplog.text
    compare_gsnr(tmp_path / "run", net, nn.functional.cross_entropy(net(x), y, reduction="none"))


def compare_gsnr(store: Path, net: nn.Module, losses: torch.Tensor) -> None:
    """The one row of a store, and autograd's sample by sample."""
    parameters, rows = dict(net.named_parameters()), []
    for loss in losses:
        rows.append([g.double().numpy() for g in torch.autograd.grad(loss, [*parameters.values()], retain_graph=True)])
    gradients = {name: np.stack([row[k] for row in rows]) for k, name in enumerate(parameters)}
    expected = oracle.mean_gsnr(oracle.Batch(np.zeros(len(losses)), gradients, {}, {}))
    np.testing.assert_allclose(open_run(store)["mean_gsnr"]["mean_gsnr"], [expected], rtol=1e-4)


class Packed(nn.Module):
    """Sequences of lengths that are given, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.rnn, self.head = nn.Linear(4, 4), nn.GRU(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.mix(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])


def test_sequences_that_are_not_sorted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a longer batch and the lengths of before, packing silently takes the samples that have one."""
    torch.manual_seed(3)
    net, loss_fn, x, y = Packed(), nn.CrossEntropyLoss(), torch.randn(5, 7, 4), torch.arange(5)
    lengths = torch.tensor([3, 7, 2, 6, 5])
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x, lengths), y).backward()
    assert "one more sample" not in caplog.text
    compare_gsnr(tmp_path / "run", net, nn.functional.cross_entropy(net(x, lengths), y, reduction="none"))


class Pooled(nn.Module):
    """What it takes of the samples does not depend on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:3])


def test_it_is_told_when_nothing_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn, x, y = Pooled(), nn.CrossEntropyLoss(), torch.randn(5, 6), torch.arange(3)
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        with pytest.raises(ValueError, match="has no batch axis"), cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
    assert "could not be called with one more sample (none of its outputs grew)" in caplog.text


def test_more_samples_after_one(tmp_path: Path) -> None:
    """With one sample tokens of an expert may pass for samples; that is looked at again when there are more."""
    torch.manual_seed(8)
    net, loss_fn = architectures.built("mixture of experts"), nn.CrossEntropyLoss()
    options = {"quantities": [Moments()], "schedule": every(1)}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step, n in enumerate((1, 1, 6, 1, 3)):  # the third step is one at which not all is checked again
            batch = architectures.data("mixture of experts", step, n)
            _, gradients = architectures.individual_gradients("mixture of experts", net, batch, n)
            with cockpit.track(step):
                loss_fn(cockpit(batch["x"]), batch["y"]).backward()
            cockpit.flush()
            row = open_run(tmp_path / "run")["moments"].sel(step=step)["mean_of"]
            np.testing.assert_allclose(row, [(g**2).sum() / n for g in gradients.values()], rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_many_steps(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same batch, no learning: all rows are equal, also those of the first step; no alarm, no other route."""
    case, net, loss_fn = CASES[name], architectures.built(name), CASES[name].loss_fn()
    batch = architectures.data(name, 0, architectures.LENGTH)  # as many samples as positions
    outputs = [OutputNorm(), OutputActivation(), OutputGradientGeometry()]
    options = {"quantities": [Moments(), *outputs], "schedule": every(1), **case.options}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step in range(18):
            buffers = {k: b.clone() for k, b in net.named_buffers()}
            torch.manual_seed(1)
            with cockpit.track(step):
                case.train(cockpit, batch, loss_fn).backward()
            for k, b in net.named_buffers():
                b.data.copy_(buffers[k])
        routes = special(cockpit)
    assert routes == {"slow": case.slow, "whole": case.whole}
    assert not [r for r in caplog.records if "slow exact" not in r.getMessage()], caplog.text
    run = open_run(tmp_path / "run")
    for group in ("moments", "output_norm", "output_activation", "output_gradient_geometry"):
        for field, rows in run[group].data_vars.items():
            if field not in ("correlation", "previous_step"):
                first = np.broadcast_to(rows[:1], rows.shape)
                np.testing.assert_allclose(rows, first, rtol=case.rtol, atol=1e-7, err_msg=field)


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["ConvNeXt", "ResNet, track_batchnorm", "GPT-2", "BERT", "T5", "residual block in place"]
)
def test_rounding_is_no_hole(tmp_path: Path, name: str, precision: str) -> None:
    """Gradients that are zero but for rounding, as those of attention's key biases, raise no alarm."""
    case, net = CASES[name], architectures.built(name)
    net, loss_fn = net.bfloat16() if precision == "bfloat16" else net, case.loss_fn()
    options = {"quantities": [Moments()], "schedule": every(1), **case.options}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step in range(3):
            batch = architectures.data(name, step, 6)
            if precision == "bfloat16":
                batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
            with cockpit.track(step), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                case.train(cockpit, batch, loss_fn).backward()
        routes = special(cockpit)
    assert routes == {"slow": case.slow, "whole": case.whole}
    assert np.isfinite(open_run(tmp_path / "run")["moments"]["mean_of"]).all()


class Auxiliary(nn.Module):
    """Keeps a part of its loss to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)
        self.penalty = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(self.first(x))
        self.penalty = z.square().square().mean()
        return self.head(z)


def test_a_loss_that_the_outputs_do_not_tell(tmp_path: Path) -> None:
    net, loss_fn, x, y = Auxiliary(), nn.CrossEntropyLoss(), torch.randn(8, 6), torch.arange(8) % 5
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "track_batchnorm": True}
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", **options)
    with pytest.raises(RuntimeError, match="does not come from the model's outputs alone.*Return everything"):
        with cockpit.track(0):
            (loss_fn(cockpit(x), y) + net.penalty).backward()
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "without", **options)
    with cockpit.track(0):
        loss_fn(cockpit(x), y).backward()


class Centred(nn.Module):
    """Takes the mean over the batch away; has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(9, 6), nn.Embedding(4, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = (self.words(x) + self.positions(torch.arange(4))).tanh().mean(1)
        return self.head(z - z.mean(0))


@pytest.mark.parametrize("n", [2, 4, 6])
def test_samples_that_are_mixed(tmp_path: Path, n: int) -> None:
    """Also with as many samples as positions."""
    loss_fn = nn.CrossEntropyLoss()
    cockpit = DistCockpit(Centred(), loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1))
    with pytest.raises(ValueError, match=r"\(Centred\) mixes the samples"), cockpit.track(0):
        loss_fn(cockpit(torch.randint(9, (n, 4))), torch.arange(n) % 5).backward()


class Lookup(nn.Module):
    """Compares samples with the rows of a table, an argument of as many rows as there may be samples."""

    def __init__(self) -> None:
        super().__init__()
        self.of_samples, self.of_table = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.of_samples(x) @ self.of_table(table).T


@pytest.mark.parametrize("n", [5, 7])
def test_an_argument_that_looks_like_samples(tmp_path: Path, n: int) -> None:
    torch.manual_seed(4)
    net, loss_fn, x, table = Lookup(), nn.CrossEntropyLoss(), torch.randn(n, 6), torch.randn(5, 6)
    y = torch.arange(n) % 5
    options = {"quantities": [Moments()], "schedule": every(1)}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit, cockpit.track(0):
        loss_fn(cockpit(x, table), y).backward()
    squares = []
    for each, label in zip(x, y, strict=True):
        loss = loss_fn(net(each[None], table), label[None])
        squares.append([float(g.square().sum()) for g in torch.autograd.grad(loss, list(net.parameters()))])
    values = open_run(tmp_path / "run")["moments"]["mean_of"][0]
    np.testing.assert_allclose(values, np.mean(squares, 0), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_norm_of_other_types(tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = architectures.built("BatchNorm, track_batchnorm").to(dtype), nn.CrossEntropyLoss()
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "track_batchnorm": True}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        with cockpit.track(0):
            batch = architectures.data("BatchNorm, track_batchnorm", 0, 6)
            loss_fn(cockpit(batch["x"].to(dtype)), batch["y"]).backward()
    assert not caplog.records


def test_an_error_leaves_no_hook(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(6)
    net, loss_fn = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 5)), nn.CrossEntropyLoss()
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "track_batchnorm": True}
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", **options)
    with pytest.raises(RuntimeError, match="was called 2 times"), cockpit.track(0):
        loss_fn(cockpit(torch.randn(6, 6)), torch.arange(6) % 5).backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())


class MoreWithGradients(nn.Module):
    """Returns something more while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        z = self.inner(x)
        return [z, z.detach()] if torch.is_grad_enabled() else [z]


def test_outputs_that_differ_without_gradients(tmp_path: Path) -> None:
    loss_fn = nn.CrossEntropyLoss()
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with DistCockpit(MoreWithGradients(), loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(torch.randn(6, 6))[0], torch.arange(6) % 5).backward()
    assert open_run(tmp_path / "run")["mean_gsnr"].sizes["step"] == 3


def test_the_error_of_a_forgotten_batch_dim(tmp_path: Path) -> None:
    net, loss_fn = nn.GRU(4, 5), nn.CrossEntropyLoss()
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Loss(), Alpha()], schedule=every(1))
    with (
        pytest.raises(ValueError, match=r"mixes the samples of a batch.*pass batch_dim="),
        cockpit.track(0),
    ):
        loss_fn(cockpit(torch.randn(7, 4, 4))[0][-1], torch.arange(4)).backward()
