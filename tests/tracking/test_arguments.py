"""Wrong arguments: each error names the argument, its value, the rule and the way out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from construction import CE, construct, first_order
from conv_and_norm import network
from odd_loops import linear
from panel_runs import track_batches
from small_batches import data
from torch import nn

from distcockpit import DistCockpit, StoreOptions, every, logspaced, open_run, presets
from distcockpit import quantities as q
from distcockpit.quantities import Alpha, GradAbsMax, GradHist1d, GradHist2d, GradNorm, HessTrace, MeanGSNR, ParamAbsMax


@pytest.mark.parametrize("budget", ["", "lots", "-1MiB", 0, -5, "0", "12XB", "1e9"])
def test_a_budget_that_is_none(tmp_path: Path, budget: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget=.*must be a positive number of bytes, or a string"):
        DistCockpit(network(), nn.CrossEntropyLoss(), store=tmp_path / "r", memory_budget=budget)


@pytest.mark.parametrize("budget", [None, True, 1.5])
def test_a_budget_of_another_kind(tmp_path: Path, budget: Any) -> None:
    with pytest.raises(TypeError, match="memory_budget=.*must be a positive number of bytes, or a string"):
        DistCockpit(network(), nn.CrossEntropyLoss(), store=tmp_path / "r", memory_budget=budget)


def frozen() -> nn.Module:
    return cases.initialised("mlp").requires_grad_(False)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(3, 3))


CONSTRUCTION: dict[str, tuple[Callable[[Path], Any], type[Exception], list[str]]] = {
    "no trainable parameters": (lambda p: construct(p, frozen()), ValueError, ["Sequential", "requires_grad"]),
    "no module": (lambda p: construct(p, lambda x: x), TypeError, ["model=", "torch.nn.Module"]),
    "unsupported wrapper": (lambda p: construct(p, nn.DataParallel(nn.Linear(2, 2))), TypeError, ["DataParallel"]),
    "batch norm in training mode": (
        lambda p: construct(p, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), quantities=first_order),
        ValueError,
        ["'1'", "BatchNorm1d", "training mode", "track_batchnorm=True"],
    ),
    "sync batch norm": (
        lambda p: construct(
            p, nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), track_batchnorm=True, quantities=first_order
        ),
        ValueError,
        ["'1'", "SyncBatchNorm"],
    ),
    "layer without second derivatives": (
        lambda p: construct(p, cases.initialised("tokens"), quantities=[HessTrace()]),
        ValueError,
        ["'hess_trace'", "'0'", "Embedding", "diag_h", "another curvature"],
    ),
    "embedding that writes to its weight": (
        lambda p: construct(p, nn.Sequential(nn.Embedding(3, 3, max_norm=1.0))),
        ValueError,
        ["'0'", "Embedding", "max_norm=1.0", "exclude=['0']"],
    ),
    "embedding that counts over the batch": (
        lambda p: construct(p, nn.Sequential(nn.EmbeddingBag(3, 3, scale_grad_by_freq=True))),
        ValueError,
        ["'0'", "EmbeddingBag", "scale_grad_by_freq=True", "exclude=['0']"],
    ),
    "scripted module": (
        lambda p: construct(p, nn.Sequential(scripted(), nn.Linear(3, 3))),
        ValueError,
        ["'0'", "scripted", "exclude=['0']"],
    ),
    "parameters without shape": (
        lambda p: construct(p, nn.LazyLinear(3)),
        ValueError,
        ["'weight' has no shape yet", "once with a batch"],
    ),
    "fallback": (lambda p: construct(p, fallback="slow"), ValueError, ["fallback='slow'", "warn", "error"]),
    "batch_dim": (lambda p: construct(p, batch_dim=-1), ValueError, ["batch_dim=-1", "from the front"]),
    "kind of batch_dim": (lambda p: construct(p, batch_dim="0"), TypeError, ["batch_dim='0'", "integer"]),
    "curvature with class weights": (
        lambda p: construct(p, loss_fn=CE(weight=torch.ones(5)), quantities=[HessTrace()]),
        ValueError,
        ["CrossEntropyLoss(weight=", "diag_h"],
    ),
    "curvature with ignore_index": (
        lambda p: construct(p, loss_fn=CE(ignore_index=3), quantities=[HessTrace(curvature="diag_ggn_exact")]),
        ValueError,
        ["ignore_index=3", "diag_ggn_exact"],
    ),
    "curvature without a loss": (
        lambda p: construct(p, loss_fn=None, quantities=[HessTrace()]),
        ValueError,
        ["None", "CrossEntropyLoss", "MSELoss"],
    ),
    "curvature of a shared layer": (
        lambda p: construct(p, cases.initialised("reused"), quantities=[HessTrace()]),
        ValueError,
        ["'second.weight'", "shared", "'first'"],
    ),
    "model without values": (
        lambda p: DistCockpit(nn.Linear(2, 2, device="meta"), None, store=p / "run"),
        ValueError,
        ["'weight' is on the meta device", "to_empty"],
    ),
    "model that is in part without values": (
        lambda p: DistCockpit(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), None, store=p / "run"),
        ValueError,
        ["'1.weight' is on the meta device"],
    ),
    "loss that is no loss": (
        lambda p: construct(p, loss_fn="cross_entropy"),
        TypeError,
        ["loss_fn='cross_entropy'", "nn.CrossEntropyLoss()", "None"],
    ),
    "optimizer of another model": (
        lambda p: construct(p, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())),
        ValueError,
        ["SGD", "model's parameters"],
    ),
    "unknown preset": (
        lambda p: construct(p, quantities="ecnomy"),
        ValueError,
        ["'ecnomy'", "economy", "business", "full"],
    ),
    "a preset misspelt": (lambda p: construct(p, quantities="ecomony"), ValueError, ["Did you mean 'economy'?"]),
    "a quantity's name": (lambda p: construct(p, quantities=["grad_norm"]), ValueError, ["Pass [GradNorm()]"]),
    "a name misspelt": (lambda p: construct(p, quantities=["alpah", "x"]), ValueError, ["Pass [Alpha()]"]),
    "no quantities": (lambda p: construct(p, quantities=[]), ValueError, ["at least one", "enabled=False"]),
    "class for an object": (lambda p: construct(p, quantities=[MeanGSNR]), TypeError, ["MeanGSNR()"]),
    "two of one name": (
        lambda p: construct(p, quantities=[HessTrace(), HessTrace(curvature="diag_ggn_exact")]),
        ValueError,
        ["'hess_trace'", "HessTrace(name=...)"],
    ),
    "unknown curvature": (
        lambda p: HessTrace(curvature="diag_hessian"),
        ValueError,
        ["'diag_hessian'", "diag_h", "diag_ggn_exact", "diag_ggn_mc"],
    ),
    "no samples": (lambda p: HessTrace(mc_samples=0), ValueError, ["mc_samples=0"]),
    "bad name": (lambda p: MeanGSNR(name="a/b"), ValueError, ["'a/b'", "letters"]),
    "the name of the user's group": (lambda p: MeanGSNR(name="log"), ValueError, ["'log'"]),
    "schedule that is no callable": (lambda p: MeanGSNR(schedule=10), TypeError, ["10", "every(10)"]),
    "default schedule": (lambda p: construct(p, schedule="10"), TypeError, ["schedule='10'", "every(10)"]),
    "negative epsilon": (lambda p: MeanGSNR(epsilon=-1.0), ValueError, ["epsilon=-1.0"]),
    "no bins": (lambda p: GradHist1d(bins=0), ValueError, ["bins=0"]),
    "empty range": (lambda p: GradHist1d(range=(1, 1)), ValueError, ["range=(1, 1)", "low < high"]),
    "range that is no pair": (lambda p: GradHist1d(range=3), ValueError, ["range=3", "(low, high)"]),
    "adaptation of another kind": (
        lambda p: GradHist1d(adapt=ParamAbsMax()),
        TypeError,
        ["adapt=ParamAbsMax", "GradAbsMax"],
    ),
    "axes swapped": (lambda p: GradHist2d(adapt=(ParamAbsMax(), GradAbsMax())), TypeError, ["ParamAbsMax"]),
    "one value for two axes": (lambda p: GradHist2d(bins=40), ValueError, ["bins=40", "(gradient, parameter)"]),
    "negative padding": (lambda p: GradAbsMax(padding=-0.1), ValueError, ["padding=-0.1"]),
    "no size": (lambda p: GradAbsMax(min_size=0.0), ValueError, ["min_size=0.0"]),
    "period": (lambda p: every(0), ValueError, ["n=0", "at least 1"]),
    "offset": (lambda p: every(2, -1), ValueError, ["offset=-1"]),
    "start of logspaced": (lambda p: logspaced(0, 10), ValueError, ["start=0"]),
    "stop of logspaced": (lambda p: logspaced(5, 5), ValueError, ["stop=5", "start=5"]),
    "num of logspaced": (lambda p: logspaced(1, 5, 1), ValueError, ["num=1"]),
    "nothing included": (lambda p: construct(p, include=["layer*"]), ValueError, ["include=['layer*']", "'0'"]),
    "half of a shared parameter": (
        lambda p: construct(p, cases.initialised("reused"), exclude=["second"]),
        ValueError,
        ["'first.weight'", "'second'", "both"],
    ),
    "mode": (lambda p: construct(p, mode="r"), ValueError, ["mode='r'", "w-"]),
    "on_error": (lambda p: construct(p, on_error="ignore"), ValueError, ["on_error='ignore'", "warn"]),
    "remote store": (
        lambda p: DistCockpit(
            cases.initialised("mlp"),
            CE(),
            store="s3://bucket/run",
            storage_options={"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"},
            store_options=StoreOptions(store_seconds=2),
        ),
        OSError,
        ["'s3://bucket/run'", "could not be written"],
    ),
    "store of another kind": (
        lambda p: DistCockpit(cases.initialised("mlp"), CE(), store={}),
        TypeError,
        ["store={}", "path"],
    ),
    "preset by name": (lambda p: presets.preset("all"), ValueError, ["'all'"]),
    "unknown public name": (lambda p: __import__("distcockpit").Cockpit, AttributeError, ["DistCockpit"]),
    "nothing to open": (lambda p: open_run(p / "nothing"), FileNotFoundError, ["there is no run here"]),
    "a folder that is no run": (lambda p: open_run(Path(__file__).parent), ValueError, ["not a distcockpit run"]),
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_before_the_first_step(tmp_path: Path, case: str) -> None:
    act, kind, words = CONSTRUCTION[case]
    with pytest.raises(kind) as error:
        act(tmp_path)
    for word in words:
        assert word in str(error.value), f"{word!r} not in: {error.value}"
    assert not (tmp_path / "run").exists()


def test_options_of_the_store_by_themselves_work_with_a_warning(tmp_path: Path) -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"store_options=StoreOptions\(flush_seconds=7, fsync=True\)"),
        DistCockpit(cases.initialised("mlp"), store=tmp_path / "run", flush_seconds=7, fsync=True) as cockpit,
    ):
        cockpit.log(0, a=1.0)
    assert open_run(tmp_path / "run")["log"]["a"].values == [1.0]
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="flush_rows=0"):
        DistCockpit(cases.initialised("mlp"), store=tmp_path / "other", flush_rows=0)


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


# -- the line at the start ---------------------------------------------------------------------------------------------


def test_the_line_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distcockpit")
    chosen = [q.Loss(), q.GradHist1d(bins=100, schedule=every(100))]
    track_batches(tmp_path / "run", cases.initialised("mlp"), [cases.data("mlp", "mean", 0)], chosen, schedule=every(4))
    line, _ = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]  # and that at the end
    # Rows of loss and learning rate: the value, and 4 coordinates; of the histogram: 101 edges, 100 counts, 5 more.
    size = 250 * 5 * 8 + 250 * 5 * 8 + 10 * (101 + 100 + 5 + 4) * 8
    assert f"up to {size / 1000:.3g} kB of rows per 1,000 steps" in line and str(tmp_path / "run") in line
    assert "Memory: up to 268 MB (memory_budget) + inputs and output gradients of layers." in line
    assert "every(4): loss" in line and "every(100): grad_hist_1d" in line and "learning_rate" in line


def test_the_line_at_the_start_counts_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the initial parameters that are tracked, and of all trained parameters before an update."""
    caplog.set_level(logging.INFO, "distcockpit")
    net = nn.Sequential(nn.Linear(100, 10, bias=False), nn.Linear(10, 50, bias=False), nn.Linear(50, 5, bias=False))
    net[0].requires_grad_(False)
    settings = {"loss_fn": nn.MSELoss(), "exclude": ["2"], "memory_budget": "1MB"}
    for chosen, copied in (([q.Distance()], 2000), ([q.UpdateSize()], 3000), ([q.Distance(), q.Alpha()], 5000)):
        DistCockpit(net, store=tmp_path / str(copied), quantities=chosen, **settings).close()
        line, _ = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]  # and that at the end
        caplog.clear()
        assert f"up to 1 MB (memory_budget) + {copied / 1000:.3g} kB for copies of parameters" in line


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
    "options, words",
    [
        ({"store_options": StoreOptions(flush_seconds="a")}, "flush_seconds='a'"),
        ({"store_options": StoreOptions(flush_seconds=-1)}, "flush_seconds=-1"),
        ({"store_options": 3}, "store_options=3: must be a StoreOptions"),
        ({"flush_second": 3}, r"no argument 'flush_second'. Did you mean 'flush_seconds'"),
        ({"quantity": 3}, r"no argument 'quantity'. Did you mean 'quantities'"),
        ({"grad_scaler": 3}, "grad_scaler=3"),
        ({"track_batchnorm": "no"}, "track_batchnorm='no'"),
        ({"include": "0"}, "include='0'"),
        ({"exclude": ["nonexistent"]}, "'nonexistent' matches no layer"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
    ],
)
def test_what_the_constructor_refuses(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DistCockpit(data()[0], None, store=tmp_path / "run", **options)


def test_a_loss_function_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As without it: the loss is found as the loop computes it; curvature of it is unknown."""

    def mine(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum(1).mean()

    losses = []
    for k, loss_fn in enumerate((mine, None)):
        net = cases.initialised("mlp")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with DistCockpit(
            net, loss_fn, optimizer, store=tmp_path / str(k), quantities="full", schedule=every(1)
        ) as cockpit:
            for step in range(3):
                x, _ = cases.data("mlp", "mean", step)
                optimizer.zero_grad()
                with cockpit.track(step):
                    mine(cockpit(x), torch.ones(len(x), 5)).backward()
                optimizer.step()
        losses.append(open_run(tmp_path / str(k)))
    assert set(losses[1].children) - set(losses[0].children) == {"hess_max_ev"}
    for name in ("loss", "alpha"):
        seen, expected = (run[name][name].values for run in losses)
        assert np.array_equal(seen, expected, equal_nan=True) and np.isfinite(seen).any()
    assert "loss_fn=mine" in caplog.text
