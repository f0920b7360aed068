"""Which axis is the batch: batches that are not the first axis, that look like something else, or that are folded."""

from __future__ import annotations

from pathlib import Path

import architectures
import numpy as np
import oracle
import pytest
import torch
from own_quantities import Moments
from torch import nn

from distcockpit import DistCockpit, every, open_run
from distcockpit.capture.coverage import CALLS
from distcockpit.quantities import Alpha, Loss, MeanGSNR


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


class MoreWithGradients(nn.Module):
    """Returns something more while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        z = self.inner(x)
        return [z, z.detach()] if torch.is_grad_enabled() else [z]


@pytest.mark.smoke
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
