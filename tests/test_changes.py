"""Models and surroundings that change while a run is watched, and corner cases of the closed forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from steps import run_steps
from torch import Tensor, nn

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.gradients.embedding import EmbeddingRule
from distcockpit.gradients.rounding import RoundedNorms
from distcockpit.gradients.statistics import GradientSum, SquaredNorms

Change = Callable[[int, nn.Module], None]


def go(
    store: Path, net: nn.Module, shapes: tuple, chosen: list, steps: int, change: Change | None = None, **options: Any
) -> tuple[Any, list[list[Tensor]]]:
    """The run, and the gradients that the parameters had after each step."""
    torch.manual_seed(0)
    done = run_steps(
        store,
        net,
        lambda step: tuple(torch.randn(shape) for shape in shapes),
        steps,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        before=None if change is None else lambda step: change(step, net),
        quantities=chosen,
        **options,
    )
    return done.run, done.gradients


def assert_norms(run: Any, gradients: list[list[Tensor]]) -> None:
    for step, each in enumerate(gradients):
        norms = [float(g.norm()) for g in each]
        np.testing.assert_allclose(run["grad_norm"]["grad_norm"][step], norms, rtol=1e-5, atol=1e-7)


class Gate(nn.Module):
    """Loses its batch axis, behind a dropout, at a step that does not check everything."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.last, self.dropout, self.on = nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.5), False
        self.register_buffer("grid", torch.ones(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(x + self.p(self.grid if self.on else x)))


class Late(nn.Module):
    """Positions join at such a step."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.last, self.dropout, self.on = nn.Embedding(4, 6), nn.Linear(6, 3), nn.Dropout(0.5), False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(x + torch.tanh(self.e(torch.arange(4))) if self.on else x))


@pytest.mark.parametrize("model", [Gate, Late])
def test_what_changes_between_checks_is_run_again_with_its_own_random_numbers(tmp_path: Path, model: type) -> None:
    def change(step: int, net: Any) -> None:
        net.on = step >= 2

    chosen = [q.NormTest(), q.GradNorm()]
    assert_norms(*go(tmp_path / "r", model(), ((6, 4, 6), (6, 4, 3)), chosen, 4, change))


@pytest.mark.parametrize("chosen", [[q.GradNorm()], [q.GradNorm(), q.NormTest()]])
def test_parameters_are_replaced(tmp_path: Path, chosen: list) -> None:
    def change(step: int, net: nn.Module) -> None:
        if step == 2:
            net.load_state_dict({k: 2 * v for k, v in net.state_dict().items()}, assign=True)

    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    assert_norms(*go(tmp_path / "r", net, ((4, 5), (4, 2)), chosen, 3, change))


def test_precision_set_for_each_backend(tmp_path: Path) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert_norms(*go(tmp_path / "r", nn.Linear(5, 2), ((4, 5), (4, 2)), [q.GradNorm()], 1))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_autocast_around_track_changes_nothing(tmp_path: Path) -> None:
    slopes = []
    for around in (False, True):
        torch.manual_seed(1)
        net, loss_fn = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3)), nn.MSELoss()
        optimizer, x, y = torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(8, 9), torch.randn(8, 3)
        low = torch.autocast("cpu", torch.bfloat16)
        store = tmp_path / str(around)
        with DistCockpit(net, loss_fn, optimizer, store=store, quantities=[q.Alpha()], schedule=every(1)) as cockpit:
            for step in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=around), cockpit.track(step), low:
                    loss_fn(cockpit(x).float(), y).backward()
                optimizer.step()
        slopes.append(float(open_run(store)["alpha"]["slope_start"][0]))
    assert slopes[0] == slopes[1]


def test_convolutions_that_are_adapted_keep_the_closed_form(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1))
    net[0].stride, net[0].dilation, net[0].padding = (1, 1), (2, 2), (2, 2)
    chosen = [q.NormTest(), q.GradNorm(), q.InnerTest()]
    assert_norms(*go(tmp_path / "r", net, ((4, 2, 6, 6), (4, 2, 6, 6)), chosen, 1, fallback="error"))


class Spectrum(nn.Module):
    """An output of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x * self.w)


class Modulus(nn.Module):
    """Makes them real."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.last = Spectrum(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.spectrum(x).abs())


def test_complex_gradients_at_outputs(tmp_path: Path) -> None:
    run, _ = go(tmp_path / "r", Modulus(), ((4, 5), (4, 2)), [q.RankHealth()], 2)
    assert (run["rank_health"]["first_nonfinite_gradient"] == 0).all()


class Scaled(nn.Module):
    """A parameter without axes, and a layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none, self.last = nn.Parameter(torch.tensor(0.7)), nn.Linear(5, 0), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * self.scale) + self.none(x).sum()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_parameters_without_axes_or_elements_are_counted(tmp_path: Path) -> None:
    chosen = [q.GradHist2d(), q.GradHist1d(adapt=q.GradAbsMax()), q.NormTest()]
    run, _ = go(tmp_path / "r", Scaled(), ((4, 5), (4, 2)), chosen, 2)
    for name in ("grad_hist_1d", "grad_hist_2d"):
        assert (run[name]["counts"].sum([d for d in run[name]["counts"].dims if d != "step"]) == 4 * (1 + 10 + 2)).all()


class Odd(q.Quantity):
    """A row that does not fit in its second field."""

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"a": q.Field(), "b": q.Field((), dtype="int64"), "c": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {"step": batch.replicated(batch.step)}

    def finalize(self, totals: Any, n: int) -> dict:
        step = float(totals["step"])
        return {"a": step, "b": float("nan") if step == 1 else step, "c": step}


def test_a_row_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    run, _ = go(tmp_path / "r", nn.Linear(5, 2), ((4, 5), (4, 2)), [Odd()], 4)
    for field in ("a", "b", "c", "step"):
        assert list(run["odd"][field].values) == [0, 2, 3]


class Curved(q.Quantity):
    """This rank's range of the diagonal, alone."""

    @property
    def needs(self) -> q.Needs:
        return q.Needs(curvature=q.HessTrace().needs.curvature, pooled_curvature=True)

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"axes": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        (flat,) = batch.shard.curvature.values()
        assert flat.shape == (10,) and flat.dtype == torch.float64
        return {"axes": torch.tensor(float(flat.dim()))}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"axes": totals["axes"]}


def test_one_parameter_is_flat_too(tmp_path: Path) -> None:
    run, _ = go(tmp_path / "r", nn.Sequential(nn.Linear(5, 2, bias=False)), ((4, 5), (4, 2)), [Curved()], 1)
    assert run["curved"]["axes"][0] == 1


@pytest.mark.parametrize("n_micros", [1, 2])
def test_short_sequences_of_wide_layers_are_not_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_micros: int
) -> None:
    """Where two T x T matrices are cheaper than one of the parameter's shape, norms come from them; sums of several
    micro-batches from their factors, that of one from autograd."""
    used = set()
    for kind in (GradientSum, SquaredNorms, RoundedNorms):

        def sequence(self: Any, *args: Any, kind: Any = kind, original: Any = kind.sequence) -> None:
            used.add(kind)
            original(self, *args)

        monkeypatch.setattr(kind, "sequence", sequence)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3))
    loss_fn, x, y = nn.CrossEntropyLoss(), torch.randn(6, 2, 40), torch.arange(6) % 3
    state = {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [q.NormTest(), q.OrthoTest(), q.GradNorm()]
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(3):  # the last one checks nothing
            used.clear()
            with cockpit.track(step):
                for part in range(n_micros):
                    loss_fn(cockpit(x[part::n_micros]), y[part::n_micros]).div(n_micros).backward()
    assert used == ({RoundedNorms} if n_micros == 1 else {GradientSum, SquaredNorms})
    terms = nn.CrossEntropyLoss(reduction="sum")
    batch = oracle.batch(net, state, lambda z, t: (terms(z, t), 1.0), x, y)
    run = open_run(tmp_path / "r")
    for name in ("norm_test", "ortho_test"):
        np.testing.assert_allclose(run[name][name][2], getattr(oracle, name)(batch), rtol=1e-5)
    norms = [np.linalg.norm(g.mean(0)) for g in batch.gradients.values()]
    np.testing.assert_allclose(run["grad_norm"]["grad_norm"][2], norms, rtol=1e-5)


class Words(nn.Module):
    """An embedding, with a padding index or without."""

    def __init__(self, rows: int, padding: int | None) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(rows, 4, padding_idx=padding), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.embed(x)).flatten(1))


@pytest.mark.parametrize("rows", [3, 50])  # fewer than a sample has words, and more
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("range", [(-0.5, 0.5), (0.01, 1.0)])
def test_embeddings_are_not_formed(tmp_path: Path, rows: int, padding: int | None, range: tuple) -> None:
    torch.manual_seed(0)
    net, loss_fn = Words(rows, padding), nn.CrossEntropyLoss()
    x, y = torch.randint(rows, (6, 5)), torch.arange(6) % 3
    x[:, 1] = x[:, 0]  # a word that comes twice
    state = {k: v.clone() for k, v in net.state_dict().items()}
    adapted = q.GradHist1d(name="adapted", adapt=q.GradAbsMax(), bins=10)
    chosen = [q.NormTest(), q.MeanGSNR(), q.GradHist1d(range=range, bins=20), adapted]
    options = {"quantities": chosen, "schedule": every(1), "fallback": "error"}
    with DistCockpit(net, loss_fn, store=tmp_path / "r", **options) as cockpit:
        for step in (0, 1, 2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(EmbeddingRule, "blocks", None)  # no block of it may be asked for
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
    terms = nn.CrossEntropyLoss(reduction="sum")
    batch = oracle.batch(net, state, lambda z, t: (terms(z, t), 1.0), x, y)
    run = open_run(tmp_path / "r")
    for name in ("norm_test", "mean_gsnr"):
        np.testing.assert_allclose(run[name][name][-1], getattr(oracle, name)(batch), rtol=1e-4)
    counts = oracle.grad_hist_1d(batch, oracle.edges(*range, 20))
    np.testing.assert_array_equal(run["grad_hist_1d"]["counts"][-1], counts)
    largest = max(np.abs(g).max() for g in batch.gradients.values())
    np.testing.assert_allclose(run["adapted"]["edges"][-1, -1], largest, rtol=1e-5)
    assert run["adapted"]["counts"][-1].sum() == counts.sum()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_the_longer_end_of_a_padding(tmp_path: Path) -> None:
    net, chosen = nn.Sequential(nn.Conv1d(2, 3, 4, dilation=3, padding="same")), [q.NormTest(), q.GradNorm()]
    assert_norms(*go(tmp_path / "r", net, ((4, 2, 9), (4, 3, 9)), chosen, 2, fallback="error"))


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 2, 3)])
def test_gradients_from_autograd_with_factors_and_micro_batches(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Without variances G comes from autograd; each micro-batch has a scale of its own."""
    torch.manual_seed(0)
    net, loss_fn = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), nn.CrossEntropyLoss()
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    state = {k: v.clone() for k, v in net.state_dict().items()}
    options = {"quantities": [q.GradNorm(), q.InnerTest()], "schedule": every(1)}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    with DistCockpit(net, loss_fn, store=tmp_path / "r", **options) as cockpit:
        for step in range(3):
            net.zero_grad()
            with cockpit.track(step):
                for part, target in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
                    scaler.scale(loss_fn(cockpit(part), target)).backward()
    terms = nn.CrossEntropyLoss(reduction="sum")
    batch = oracle.batch(net, state, lambda z, t: (terms(z, t), 1.0), x, y)
    run = open_run(tmp_path / "r")
    norms = [np.linalg.norm(g.mean(0)) for g in batch.gradients.values()]
    np.testing.assert_allclose(run["grad_norm"]["grad_norm"][2], norms, rtol=1e-5)
    np.testing.assert_allclose(run["inner_test"]["inner_test"][2], oracle.inner_test(batch), rtol=1e-5)
