"""DistCockpit as users call it: it changes nothing, costs nothing when off, and closes itself."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from construction import CE, construct
from default_loops import LOOPS, C, Changing, V, mlp, train_default
from ranks import Ranks
from small_batches import data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from waiting import HANG, run_program
from watched_runs import everything, hooks, network
from zarr.storage import MemoryStore

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit.quantities import Alpha, Loss, MeanGSNR


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


def test_order_of_calls(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), CE()
    x, y = cases.data("mlp", "mean", 0)
    cockpit = construct(tmp_path, net, loss_fn, schedule=every(1))
    with cockpit.track(5):
        loss_fn(net(x), y).backward()
        with pytest.raises(RuntimeError, match=r"track\(step=6\): step 5 has not ended"), cockpit.track(6):
            pass
    for step in (5, 4):
        with pytest.raises(ValueError, match=rf"track\(step={step}\): steps must increase, but the latest was 5"):
            with cockpit.track(step):
                pass
    with pytest.raises(TypeError, match=r"track\(step=6\.0\)"), cockpit.track(6.0):
        pass
    with cockpit.track(6):  # nothing above did harm
        loss_fn(net(x), y).backward()
    cockpit.close()
    cockpit.close()
    with pytest.raises(RuntimeError, match="closed"), cockpit.track(7):
        pass
    assert list(open_run(tmp_path / "run")["grad_hist_1d"]["step"].values) == [5, 6]


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda c: c.log(3, step_size=1.0) or c.log(2, a=1.0), ValueError, ["step=2", "latest was 3"]),
        (lambda c: c.log(0, a="high"), TypeError, ["log(a='high')"]),
        (lambda c: c.log(0, a=torch.ones(3)), TypeError, ["shape (3,)"]),
        (lambda c: c.log(0, wall_time=1.0), ValueError, ["wall_time"]),
        (lambda c: c.log(0, **{"train loss": 1.0}), ValueError, ["train loss", "'/'"]),
        (lambda c: c.log(0, reduce="max", a=1.0), ValueError, ["reduce='max'", "mean"]),
        (lambda c: c.log(0, a=1.0) or c.flush() or c.log(0, b=1.0), ValueError, ["step=0", "flush()"]),
    ],
)
def test_log(tmp_path: Path, call: Any, kind: type[Exception], words: list[str]) -> None:
    with construct(tmp_path) as cockpit, pytest.raises(kind) as error:
        call(cockpit)
    assert all(word in str(error.value) for word in words), error.value


class WithBatchNorm(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(108, 5)
        )


def curves(model: nn.Module, net: nn.Module, rank: int, size: int, cockpit: Any, loss_fn: Any) -> list[float]:
    """Train; the losses."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(8):
        x, y = cases.data("cnn", "mean", step)
        optimizer.zero_grad()
        with cockpit.track(step):
            loss = loss_fn(model(x[rank::size]), y[rank::size])
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, torch.rand(1).item()]


class Off:
    """No cockpit at all."""

    def track(self, step: int) -> Any:
        import contextlib

        return contextlib.nullcontext()


@pytest.mark.parametrize("kind", ["dropout", "batchnorm"])
def test_training_is_bit_identical(tmp_path: Path, kind: str) -> None:
    runs = []
    for watched in (False, True):
        net = network() if kind == "dropout" else WithBatchNorm()
        if watched:
            loss_fn = nn.CrossEntropyLoss()
            chosen = [q for q in everything() if kind == "dropout" or q.needs.curvature is None]
            options = {"quantities": chosen, "schedule": every(2), "track_batchnorm": kind == "batchnorm"}
            with DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", **options) as cockpit:
                losses = curves(net, net, 0, 1, cockpit, loss_fn)
            assert open_run(tmp_path / "run.zarr")["mean_gsnr"].sizes["step"] == 4
        else:
            losses = curves(net, net, 0, 1, Off(), nn.CrossEntropyLoss())
        runs.append((losses, net.state_dict()))
    (plain, plain_state), (tracked, tracked_state) = runs
    assert plain == tracked  # the random number behind the last step included
    for name, value in plain_state.items():
        assert torch.equal(value, tracked_state[name]), name


def loss_curve(rank: int, size: int, group: Any, store: str | None) -> list[float]:
    net = network()
    model = DistributedDataParallel(net, process_group=group)
    if store is None:
        return curves(model, net, rank, size, Off(), nn.CrossEntropyLoss())
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(model, loss_fn, store=store, quantities=everything(), schedule=every(2)) as cockpit:
        return curves(model, net, rank, size, cockpit, loss_fn)


def test_loss_curve_on_four_ranks(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(4, loss_curve, None)
    tracked = ranks.run(4, loss_curve, str(tmp_path / "run.zarr"))
    assert plain == tracked


@pytest.mark.parametrize("switch", ["argument", "environment"])
def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    if switch == "environment":
        monkeypatch.setenv("DISTCOCKPIT", "off")
    net, loss_fn = network(), nn.CrossEntropyLoss()
    options = {"enabled": False} if switch == "argument" else {}
    with DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", **options) as cockpit:
        x, y = cases.data("cnn", "mean", 0)
        for step in (0, 0):  # nothing is checked either
            with cockpit.track(step):
                assert hooks(net) == 0
                loss_fn(cockpit(x), y).backward()
            cockpit.record_losses(torch.ones(3))
            cockpit.log(step, value=1.0)
        assert cockpit.latest() == {}
        cockpit.flush()
    assert not (tmp_path / "run.zarr").exists()


def test_a_closed_cockpit_is_forgotten(tmp_path: Path) -> None:
    """Its store, its thread and its model: nothing that was registered with Python holds them."""
    net, loss_fn = network(), nn.CrossEntropyLoss()
    x, y = cases.data("cnn", "mean", 0)
    store, before = MemoryStore(), set(threading.enumerate())  # other tests end without closing theirs
    cockpit = DistCockpit(net, loss_fn, store=store, quantities=[MeanGSNR()], schedule=every(1))
    with cockpit.track(0):
        loss_fn(net(x), y).backward()
    held = [weakref.ref(cockpit), weakref.ref(store), weakref.ref(net)]
    cockpit.close()
    del cockpit, net, store
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]
    assert not [each for each in threading.enumerate() if each.name == "distcockpit-writer" and each not in before]


def test_latest_and_flush(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    with DistCockpit(
        net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR(), Alpha()], schedule=every(1)
    ) as cockpit:
        assert cockpit.latest() == {}
        for step in range(2):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
            cockpit.log(step, loss=torch.tensor(2.0))
        cockpit.flush()
        latest = cockpit.latest()
        run = open_run(tmp_path / "run")
        assert latest["mean_gsnr"]["step"] == 1 and latest["alpha"]["step"] == 0
        assert latest["mean_gsnr"]["mean_gsnr"] == run["mean_gsnr"]["mean_gsnr"].values[1]
        assert run.attrs["state"] == "running" and list(run["log"]["loss"].values) == [2.0, 2.0]


# -- the store ---------------------------------------------------------------------------------------------------------


def test_steps_that_are_numpy_integers(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        for step in np.arange(3):
            with cockpit.track(step, epoch=np.float32(0.5)):
                loss_fn(net(x), y).backward()
            cockpit.log(step, a=np.float32(1.5))
    run = open_run(tmp_path / "run")
    assert run["mean_gsnr"].sizes["step"] == run["log"].sizes["step"] == 3 and run.attrs["state"] == "closed"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda c: c.log(1.5, a=1.0), r"log\(step=1.5\)"),
        (lambda c: c.log(True, a=1.0), r"log\(step=True\)"),
        (lambda c: c.log(2**63, a=1.0), "below 2"),
        (lambda c: c.log(0, epoch="x", a=1.0), r"log\(epoch='x'\)"),
        (lambda c: c.track(0, epoch="two"), r"track\(epoch='two'\)"),
        (lambda c: c.track(-1), r"track\(step=-1\)"),
        (lambda c: c.track(0, weight=float("nan")), r"track\(weight=nan\)"),
        (lambda c: c.track(0, batch_size=-2), r"track\(batch_size=-2\)"),
        (lambda c: c.log(0, **{"zarr.json": 1.0}), "zarr.json"),
        (lambda c: c.log(0, **{"..": 1.0}), r"\.\."),
        (lambda c: c.log(0, **{"a\\b": 1.0}), "letters"),
        (lambda c: c.close() or c.log(0, a=1.0), "closed"),
    ],
)
def test_what_log_and_track_refuse(tmp_path: Path, call: Any, words: str) -> None:
    net, _, _ = data()
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[MeanGSNR()]) as cockpit:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
            call(cockpit)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, loss: c.log(3, loss=loss, **{"train.rate": 0.5}),
        lambda c, loss: c.log({"loss": loss, "train/rate": 0.5}, step=3),
        lambda c, loss: c.log({"loss": loss, "train/rate": 0.5}, 3),
        lambda c, loss: c.log(3, {"train/rate": 0.5}, loss=loss),
        lambda c, loss: c.log({"train/rate": 0.5}, loss=loss),  # at the step of `track`
        lambda c, loss: c.log(step=3, loss=loss, **{"train/rate": 0.5}),
        lambda c, loss: c.log(data={"loss": loss, "train/rate": 0.5}, step=3),
    ],
)
def test_ways_to_log(tmp_path: Path, call: Any) -> None:
    net, x, y = data()
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[Loss()]) as cockpit:
        with cockpit.track(3):
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
        call(cockpit, loss)
    log = open_run(tmp_path / "run")["log"]
    assert log["step"].values.tolist() == [3] and set(log.data_vars) == {"loss", "train.rate"}
    assert log["loss"].values == [loss.item()] and log["train.rate"].values == [0.5]


@pytest.mark.parametrize("arguments", [(1, 2), ({"a": 1.0}, {"b": 1.0})])
def test_log_takes_one_step_and_one_dictionary(tmp_path: Path, arguments: Any) -> None:
    with DistCockpit(data()[0], None, store=tmp_path / "run", quantities=[Loss()]) as cockpit:
        with pytest.raises(TypeError, match=r"log\({'loss': 0.5}, step=10\)"):
            cockpit.log(*arguments)


def test_a_store_named_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """Also the default: the same program runs twice. All ranks know its name."""
    monkeypatch.chdir(tmp_path)
    with DistCockpit(data()[0]) as cockpit:
        cockpit.log(0, a=1.0)
    (path,) = tmp_path.glob("runs/*.zarr")
    assert re.fullmatch(r"\d{8}-\d{6}", path.stem) and open_run(cockpit.store)["log"]["a"].values.tolist() == [1.0]
    with pytest.raises(ValueError, match="always new"):
        DistCockpit(data()[0], store=tmp_path / "{time}", mode="a")
    first, second = ranks.run(2, name_of_store, str(tmp_path / "two-{time}.zarr"))
    assert first == second and open_run(first).attrs["state"] == "closed"


def name_of_store(rank: int, size: int, group: Any, store: str) -> str:
    with DistCockpit(nn.Linear(2, 2), store=store, process_group=group) as cockpit:
        return cockpit.store


ENDS = """
import re
import subprocess
import sys
import torch
from distcockpit import DistCockpit, every
net = torch.nn.Linear(4, 2)
cockpit = DistCockpit(net, store=sys.argv[1], quantities="economy", schedule=every(2))
for step in range(50):
    with cockpit.track(step):
        cockpit(torch.randn(8, 4)).square().sum(1).mean().backward()
    net.zero_grad()
if sys.argv[2] == "closed":
    cockpit.close()
elif sys.argv[2] == "fails":
    raise KeyError("which")
elif sys.argv[2] == "with":
    with cockpit:
        sys.exit(3)
elif sys.argv[2] == "terminated":
    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)
elif sys.argv[2] == "killed":
    cockpit.flush()
    os = __import__("os")
    os._exit(1)
"""


@pytest.mark.parametrize(
    "how, state, reason",
    [
        ("closed", "closed", ""),
        ("forgets", "closed", ""),
        ("fails", "ended", "KeyError: 'which'"),
        ("with", "ended", "SystemExit: 3"),
        ("terminated", "ended", "terminated (SIGTERM)"),
        ("killed", "killed", ""),
    ],
)
def test_how_a_run_ended(tmp_path: Path, how: str, state: str, reason: str) -> None:
    """In the store, and in the line at the end."""
    store = tmp_path / "run"
    command = [sys.executable, "-c", ENDS, str(store), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    run = open_run(store)
    assert (run.attrs["state"], run.attrs["reason"]) == (state, reason)
    rows = sum(node.sizes["step"] for name, node in run.children.items() if name != "log")
    told = [line for line in done.stderr.splitlines() if "50 steps in" in line]
    if how in ("terminated", "killed"):
        assert not told
        return
    assert "50 of them tracked" in told[0] and "% of the time" in told[0]
    assert f"{rows} rows in {store}." in told[0] and told[0].endswith(f"distcockpit report {store} -o report.html")
    assert ("ended early: " + reason in told[0]) == bool(reason)
    assert ("ooks wrong" in told[0]) == (how == "closed")  # not as the interpreter exits, where nothing can be imported


@pytest.mark.parametrize("factor, words", [(0.0, "Nothing looks wrong"), (0.95, "What looks wrong: steps overshoot")])
def test_the_line_at_the_end_says_what_looks_wrong(
    tmp_path: Path, factor: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=factor)
    generator = torch.Generator().manual_seed(0)
    with caplog.at_level("INFO"), DistCockpit(net, store=tmp_path, quantities=[Alpha()], schedule=every(1)) as cockpit:
        for step in range(30):
            optimizer.zero_grad()
            with cockpit.track(step):
                cockpit(torch.randn(8, 4, generator=generator)).square().sum(1).mean().backward()
            optimizer.step()
    (told,) = [text for text in caplog.messages if "30 steps in" in text]
    assert words in told


def test_a_loop_that_never_calls_track_is_told_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with caplog.at_level("INFO"), DistCockpit(net, None, optimizer, store=tmp_path / "run") as cockpit:
        cockpit(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert "no step was tracked" in caplog.text and "with cockpit.track(step):" in caplog.text


def test_the_last_row_of_the_log_survives_a_forgotten_close(tmp_path: Path) -> None:
    script = f"""
from torch import nn
from distcockpit import DistCockpit
cockpit = DistCockpit(nn.Linear(2, 2), None, store={str(tmp_path / "run")!r}, quantities="economy")
for step in range(5):
    cockpit.log(step, value=step)
"""
    run_program(sys.executable, "-c", script)
    assert list(open_run(tmp_path / "run")["log"]["value"].values) == [0, 1, 2, 3, 4]
