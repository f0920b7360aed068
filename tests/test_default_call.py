"""``DistCockpit(model, optimizer=..., store=...)`` and nothing else: the preset is tracked on any loop, to its end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from steps import Steps, run_steps
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit.quantities import Alpha, MeanGSNR, NormTest

X, Y = torch.arange(48).view(8, 6) * 7 % 11, torch.arange(48).view(8, 6) * 5 % 11
V, C = torch.sin(torch.arange(40.0)).view(8, 5), torch.arange(8) % 3


class Gpt(nn.Module):
    """Returns scores and, where it is given targets, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(torch.tanh(self.tokens(x) + self.positions(torch.arange(x.shape[1]))))
        return z, F.cross_entropy(z.view(-1, 11), y.view(-1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def written_by_hand(model: Any) -> Tensor:
    return -model(V).log_softmax(1).gather(1, C[:, None]).mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "a model that returns its loss": (Gpt, lambda model: model(X, Y)[1]),
    "cross entropy": (mlp, lambda model: F.cross_entropy(model(V), C)),
    "label smoothing": (mlp, lambda model: F.cross_entropy(model(V), C, label_smoothing=0.1)),
    "mse": (mlp, lambda model: F.mse_loss(model(V), V[:, :3])),
    "bce": (mlp, lambda model: F.binary_cross_entropy_with_logits(model(V), V[:, :3].sigmoid())),
    "by hand": (mlp, written_by_hand),
    "a sum divided by N": (mlp, lambda model: F.cross_entropy(model(V), C, reduction="sum") / len(V)),
    "a mean of terms": (mlp, lambda model: F.cross_entropy(model(V), C, reduction="none").mean()),
    "half of it": (mlp, lambda model: 0.5 * F.cross_entropy(model(V), C)),
}


def train_default(net: nn.Module, loss: Callable[[Any], Tensor], store: Path, **options: Any) -> Steps:
    """Four steps on one batch."""

    def body(cockpit: DistCockpit, x: Tensor, y: Tensor) -> Tensor:
        value = loss(cockpit)
        value.backward()
        return value

    return run_steps(store, net, (V, C), 4, body=body, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("name", LOOPS)
def test_the_preset_is_tracked(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, loss = LOOPS[name]
    with caplog.at_level("WARNING"):
        done = train_default(make(), loss, tmp_path / "run")
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(np.linalg.norm(run["grad_norm"]["grad_norm"], axis=1), done.norms, rtol=1e-4)
    values = run["loss"]["loss"].values
    np.testing.assert_allclose(run["alpha"]["f_start"], values[:-1], rtol=1e-6)
    assert not run["alpha"]["alpha"].isnull().any() and not run["alpha"]["slope_end"].isnull().any()
    np.testing.assert_allclose(values, done.losses, rtol=1e-5)
    for quantity in ("norm_test", "inner_test", "ortho_test", "update_size", "distance"):
        assert len(run[quantity]["step"]) >= 3
        assert not run[quantity][quantity].isnull().any()
    assert not caplog.records and "notices" not in run.attrs


def test_what_is_asked_for_by_hand_is_an_error(tmp_path: Path) -> None:
    def loss(model: Any) -> Tensor:
        return F.mse_loss(model(V), V[:, :3]).sqrt()

    with pytest.raises(RuntimeError, match=r"Quantities \['by_hand'\] need per-sample gradients"):
        train_default(mlp(), loss, tmp_path / "a", quantities=[*presets.economy(), Alpha(name="by_hand")])
    train_default(mlp(), loss, tmp_path / "b")


class Changing(nn.Module):
    """A body with a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7).eval()
        self.head, self.extra = nn.Linear(7, 3), nn.Linear(7, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.norm(self.body(x)))
        return self.head(z) + self.extra(z)


class Change:
    """What a loop does differently from step 2 on; and what is tracked from there."""

    def __init__(self, net: Changing, optimizer: torch.optim.Optimizer, loss_fn: nn.Module) -> None:
        self.net, self.optimizer, self.loss_fn, self.accumulates = net, optimizer, loss_fn, False
        self.loss: Callable[[Any], Tensor] = lambda model: loss_fn(model(V), C)

    def batch_norm(self) -> None:
        self.net.norm.train()

    def exchanged_head(self) -> None:
        torch.manual_seed(1)
        self.net.head = nn.Linear(7, 3)

    def frozen(self) -> None:
        self.net.body.requires_grad_(False)

    def unfrozen(self) -> None:
        self.net.extra.requires_grad_(True)

    def parameter_group(self) -> None:
        self.net.extra.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.net.extra.parameters()), "lr": 0.3})

    def another_loss(self) -> None:
        self.loss = lambda model: F.mse_loss(model(V), V[:, :3])

    def mixup(self) -> None:
        self.loss = lambda model: 0.3 * self.loss_fn(z := model(V), C) + 0.7 * self.loss_fn(z, C.flip(0))

    def micro_batches(self) -> None:
        self.accumulates = True

    def told_twice(self) -> None:
        def loss(model: Any) -> Tensor:
            z = model(V)
            for _ in range(2):
                model.record_losses(F.cross_entropy(z, C, reduction="none"))
            return self.loss_fn(z, C)

        self.loss = loss

    def half_of_the_outputs(self) -> None:
        self.loss = lambda model: self.loss_fn(model(V)[:4], C[:4])

    def no_batch(self) -> None:
        """A call without samples that could be told apart."""
        self.loss = lambda model: model(V.mean(0, keepdim=True)).square().sum() + self.loss_fn(model(V), C)

    def gradient_in_the_loss(self) -> None:
        def loss(model: Any) -> Tensor:
            x = V.clone().requires_grad_()
            value = self.loss_fn(model(x), C)
            return value + torch.autograd.grad(value, x, create_graph=True)[0].square().sum()

        self.loss = loss


CHANGES = [name for name, kind in vars(Change).items() if callable(kind) and not name.startswith("_")]


def run_with_a_change(name: str, **options: Any) -> tuple[list[Tensor], list[float]]:
    """The parameters at the end, and norms of the gradients that the optimizer got."""
    net, loss_fn, norms = Changing(), nn.CrossEntropyLoss(), []
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    change = Change(net, optimizer, loss_fn)
    with DistCockpit(net, loss_fn, optimizer, schedule=every(1), **options) as cockpit:
        for step in range(6):
            if step == 2:
                getattr(change, name)()
            net.zero_grad()
            n_micros = 2 if change.accumulates else 1
            with cockpit.track(step):
                for _ in range(n_micros):
                    (change.loss(cockpit) / n_micros).backward()
            norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)) ** 0.5)
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()], norms


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_that_changes_goes_on(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Training is the same to the last bit; what is stored after the change is right, or not there."""
    quantities = [*presets.economy(), NormTest(name="by_hand"), *presets.layers()]
    with caplog.at_level("WARNING"):
        after, norms = run_with_a_change(name, store=tmp_path / "run", quantities=quantities)
    plain, _ = run_with_a_change(name, store="", enabled=False)
    assert all(torch.equal(a, b) for a, b in zip(after, plain, strict=True))
    run = open_run(tmp_path / "run")
    steps = run["grad_norm"]["step"].values.tolist()
    assert steps[:2] == [0, 1]
    stored, expected = run["grad_norm"]["total"].values, [norms[step] for step in steps]
    if name in ("gradient_in_the_loss", "batch_norm"):
        assert np.isnan(stored[2:]).all()
        assert ("create_graph" if name == "gradient_in_the_loss" else "is in training mode") in caplog.text
        assert not run["loss"]["loss"].isnull().any() or name == "gradient_in_the_loss"
        stored[2:] = expected[2:]
    np.testing.assert_allclose(stored, expected, rtol=1e-3)
    parts = {"exchanged_head", "frozen", "unfrozen", "parameter_group"}
    assert [part["first_step"] for part in run.attrs["segments"]] == ([0, 2] if name in parts else [0])
    if steps != list(range(6)):
        assert name == "told_twice"
        assert steps == [0, 1]
        assert [each["step"] for each in run.attrs["notices"] if each["topic"].startswith("skipped ")] == [2]
        assert "step 2 is not tracked" in caplog.text


def test_the_model_is_copied_and_saved_inside_of_a_step(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """An average of the weights begins, or a checkpoint is written, wherever the loop likes."""
    net = Changing()
    with DistCockpit(net, store=tmp_path / "run", schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss = F.cross_entropy(cockpit(V), C)
                copied = copy.deepcopy(net)
                torch.save(net, tmp_path / "model.pt")
                loss.backward()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded):
        assert torch.equal(other(V), net(V))
    assert open_run(tmp_path / "run")["norm_test"].sizes["step"] == 2
    assert not recwarn.list


def test_arguments_as_people_write_them(tmp_path: Path) -> None:
    given = {"a": "layers", "b": ["economy", "layers", "economy"], "c": MeanGSNR(), "d": ["layers", MeanGSNR()]}
    for name, quantities in given.items():
        net = Changing()
        with DistCockpit(net, store=tmp_path / name, quantities=quantities, schedule=2) as cockpit:
            for step in range(4):
                with cockpit.track(step):
                    F.cross_entropy(cockpit(V[: 1 if step else None]), C[: 1 if step else None]).backward()
        run = open_run(tmp_path / name)
        assert ("norm_test" in run) == (name == "b") and ("output_norm" in run) == (name != "c")
        if name in "cd":
            assert run["mean_gsnr"]["step"].values.tolist() == [0, 2]
            assert np.isnan(run["mean_gsnr"]["mean_gsnr"].values).tolist() == [False, True]


def test_a_preset_without_what_the_model_cannot_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Diagonals of the curvature want the loss module, and a chain of modules."""
    with caplog.at_level("WARNING"):
        train_default(Gpt(), LOOPS["a model that returns its loss"][1], tmp_path / "run", quantities="business")
    run = open_run(tmp_path / "run")
    assert run["norm_test"].sizes["step"] == 4 and "hess_trace" not in run and "tic_diag" not in run
    said = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert [text.split()[1] for text in said] == ["tic_diag", "hess_trace"]


def told_twice_on_one_rank(rank: int, size: int, group: Any, store: str) -> list[float]:
    """At step 2 the last rank tells its losses twice."""
    torch.manual_seed(0)
    net, loss_fn = mlp(), nn.CrossEntropyLoss()
    optimizer, norms = torch.optim.SGD(net.parameters(), lr=0.1), []
    options: dict[str, Any] = {"quantities": ["economy", NormTest(name="by_hand")], "schedule": every(1)}
    with DistCockpit(net, loss_fn, optimizer, store=store, process_group=group, **options) as cockpit:
        for step in range(5):
            optimizer.zero_grad()
            with cockpit.track(step):
                z = cockpit(V)
                for _ in range(2 if step == 2 and rank == size - 1 else 0):
                    cockpit.record_losses(F.cross_entropy(z, C, reduction="none"))
                loss_fn(z, C).backward()
            norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)))
            optimizer.step()
    return norms


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_is_left_out_on_all_ranks(ranks: Ranks, tmp_path: Path, size: int) -> None:
    said = ranks.run(size, told_twice_on_one_rank, str(tmp_path / "run"))
    assert all(len(norms) == 5 for norms in said)
    run = open_run(tmp_path / "run")
    assert run["by_hand"]["step"].values.tolist() == [0, 1, 3, 4] and not run["by_hand"]["norm_test"].isnull().any()
    assert run["alpha"]["step"].values.tolist() == [0, 3]
    (notice,) = run.attrs["notices"]
    assert notice["step"] == 2 and f"Rank {size - 1} could not finish tracked step 2" in notice["text"]


@pytest.mark.parametrize("quantities", ["economy", "full"])
def test_batch_norm_in_training_mode(tmp_path: Path, quantities: str, caplog: pytest.LogCaptureFixture) -> None:
    """Individual gradients are not defined, and a notice says what to do; all else is tracked."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))

    loss_fn, tracked = nn.CrossEntropyLoss(), net()
    with caplog.at_level("WARNING"):
        options = {"quantities": quantities, "loss_fn": loss_fn}
        done = train_default(tracked, lambda model: loss_fn(model(V), C), tmp_path / "run", **options)
    plain = net()
    train_default(plain, lambda model: loss_fn(model(V), C), tmp_path / "none", enabled=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(tracked.state_dict()[name], value)
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(run["loss"]["loss"], done.losses, rtol=1e-6)
    assert run["norm_test"]["norm_test"].isnull().all() and not run["update_size"]["update_size"].isnull().any()
    (notice,) = [each for each in run.attrs["notices"] if each["topic"] == "coupled"]
    assert notice["step"] == 0 and "track_batchnorm=True" in notice["text"] and "norm_test" in notice["text"]
    with pytest.raises(ValueError, match=r"Layer '1' \(BatchNorm1d\) is in training mode"):
        train_default(net(), lambda model: loss_fn(model(V), C), tmp_path / "hand", quantities=[NormTest()])


def test_the_loss_as_a_function(tmp_path: Path) -> None:
    """Curvature is that of the module that stands for it."""
    found = []
    for name, loss_fn in {"function": F.cross_entropy, "module": nn.CrossEntropyLoss()}.items():
        torch.manual_seed(0)
        store, options = tmp_path / name, {"quantities": "full", "loss_fn": loss_fn}
        train_default(mlp(), lambda model, f=loss_fn: f(model(V), C), store, **options)
        run = open_run(tmp_path / name)
        found.append((run["hess_trace"]["trace"].values, run["hess_max_ev"]["hess_max_ev"].values))
    for of_function, of_module in zip(*found, strict=True):
        assert np.isfinite(of_module).all()
        np.testing.assert_allclose(of_function, of_module, rtol=1e-6)
