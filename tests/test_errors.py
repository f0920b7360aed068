"""Bad input gets a clear error: what was given, the rule, and the way out; before the first step where possible."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import nn

from distcockpit import DistCockpit, StoreOptions, every, logspaced, open_run, presets
from distcockpit.quantities import (
    Alpha,
    GradAbsMax,
    GradHist1d,
    GradHist2d,
    HessTrace,
    MeanGSNR,
    ParamAbsMax,
)
from distcockpit.run import line_aggregation, range_aggregation

CE = nn.CrossEntropyLoss
DEFAULT_LOSS = CE()


def construct(path: Path, model: Any = None, loss_fn: Any = DEFAULT_LOSS, **options: Any) -> DistCockpit:
    return DistCockpit(cases.initialised("mlp") if model is None else model, loss_fn, store=path / "run", **options)


def frozen() -> nn.Module:
    return cases.initialised("mlp").requires_grad_(False)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class InPlace(Functional):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu_(self.first(x)))


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
    "loss that is no loss": (
        lambda p: construct(p, loss_fn=torch.cdist),
        TypeError,
        ["loss_fn=", "nn.CrossEntropyLoss()", "None"],
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


def test_an_existing_store_is_refused(tmp_path: Path) -> None:
    construct(tmp_path).close()
    with pytest.raises(FileExistsError, match=re.escape("mode='w'")):
        construct(tmp_path)
    construct(tmp_path, mode="w").close()


@pytest.mark.parametrize("mode", ["w-", "w"])
@pytest.mark.parametrize("content", ["note.txt", "zarr.json"])
def test_a_foreign_folder_is_never_deleted(tmp_path: Path, content: str, mode: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / content).write_text('{"attributes": {"format": "another"}}')
    with pytest.raises(FileExistsError, match="not a distcockpit run"):
        construct(tmp_path, mode=mode)
    assert (tmp_path / "run" / content).exists()
    (tmp_path / "empty").mkdir()
    DistCockpit(cases.initialised("mlp"), CE(), store=tmp_path / "empty", mode=mode).close()


def forward(net: nn.Module, step: int = 0) -> torch.Tensor:
    x, y = cases.data("mlp", "mean", step)
    return CE()(net(x), y)


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


first_order = [MeanGSNR()]
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


def test_batch_norm_message_comes_before_the_forward_pass(tmp_path: Path) -> None:
    net, loss_fn = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)).eval(), CE()
    cockpit = construct(tmp_path, net, loss_fn, schedule=every(1), quantities=first_order)
    net.train()
    with pytest.raises(RuntimeError, match="training mode"), cockpit.track(0):
        raise AssertionError("the body must not run")
    cockpit.close()


def test_batch_norm_that_trains_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)).eval(), CE()
    cockpit = construct(tmp_path, net, loss_fn, schedule=every(1), quantities=first_order)
    x, y = cases.data("mlp", "mean", 0)
    with cockpit.track(0):
        loss_fn(net(x), y).backward()
    net.train()
    with caplog.at_level("WARNING"), cockpit.track(1):
        loss_fn(net(x), y).backward()
    assert "step 1: mean_gsnr: NaN" in caplog.text and "training mode" in caplog.text
    net.eval()
    with cockpit.track(2):
        loss_fn(net(x), y).backward()
    cockpit.close()
    assert list(np.isnan(open_run(tmp_path / "run")["mean_gsnr"]["mean_gsnr"].values)) == [False, True, False]


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda c: c.log(3, step_size=1.0) or c.log(2, a=1.0), ValueError, ["step=2", "latest was 3"]),
        (lambda c: c.log(0, a="high"), TypeError, ["log(a='high')"]),
        (lambda c: c.log(0, a=torch.ones(3)), TypeError, ["shape (3,)"]),
        (lambda c: c.log(0, wall_time=1.0), ValueError, ["wall_time"]),
        (lambda c: c.log(0, **{"train/loss": 1.0}), ValueError, ["train/loss", "'/'"]),
        (lambda c: c.log(0, reduce="max", a=1.0), ValueError, ["reduce='max'", "mean"]),
        (lambda c: c.log(0, a=1.0) or c.flush() or c.log(0, b=1.0), ValueError, ["step=0", "flush()"]),
    ],
)
def test_log(tmp_path: Path, call: Any, kind: type[Exception], words: list[str]) -> None:
    with construct(tmp_path) as cockpit, pytest.raises(kind) as error:
        call(cockpit)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("aggregate, valid", [(line_aggregation, "IQR"), (range_aggregation, "min-max")])
def test_unknown_aggregation(tmp_path: Path, aggregate: Any, valid: str) -> None:
    construct(tmp_path).close()
    data = open_run(tmp_path / "run")["alpha"]["alpha"]
    with pytest.raises(ValueError, match=f"'average'.*{valid}"):
        aggregate(data, "average")
    with pytest.raises(ValueError, match="no epoch was stored"):
        aggregate(data)


# -- ranks that disagree ---------------------------------------------------------------------------------------------


def disagree(rank: int, size: int, group: Any, store: str, how: str) -> str:
    """What this rank is told."""
    torch.manual_seed(0)
    net, loss_fn = nn.Linear(12, 5 + (how == "shape" and rank == 1)), CE()
    bins = 10 + (how == "bins" and rank == 1)
    chosen: list[Any] = [GradHist1d(bins=bins), MeanGSNR()]
    if how == "quantities" and rank == 1:
        chosen.pop()
    if how == "arguments" and rank == 1:
        chosen = [GradHist1d(), GradHist1d()]
    schedule = (lambda step: step != 1 or rank == 0) if how == "schedule" else every(1)
    x, y = cases.data("mlp", "mean", 0)
    try:
        cockpit = DistCockpit(
            net, loss_fn, store=store, quantities=chosen, schedule=schedule, process_group=group, mode="w"
        )
        for step in range(3):
            with cockpit.track(step + (how == "steps" and rank == 1 and step == 1)):
                if how != "no backward" or rank == 0:
                    loss_fn(net(x), y).backward()
                else:
                    loss_fn(net(x), y)
            if how == "names":
                cockpit.log(step, reduce="mean", **{f"name_{rank}": 1.0})
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "how, words, own",
    [
        ("bins", ["rank 1 has quantity 'grad_hist_1d'", "'bins': '11'", "'bins': '10'"], None),
        ("quantities", ["rank 1 has quantity 'mean_gsnr' = nothing"], None),
        ("shape", ["rank 1 has parameter 0 = 'weight' (6, 12)", "rank 0 has parameter 0 = 'weight' (5, 12)"], None),
        ("arguments", ["could not be constructed on rank 1", "'grad_hist_1d'"], ["2 are named"]),
        ("steps", ["rank 0 tracks step 1, rank 1 tracks step 2"], None),
        ("schedule", ["rank 0 tracks step 1, rank 1 tracks step 2"], None),
        ("names", ["Rank 1 logged different names", "0/name_1", "0/name_0", "log(..., reduce=...)"], None),
        ("no backward", ["Rank 1 could not finish tracked step 0"], ["no backward"]),
    ],
)
def test_ranks_that_disagree(ranks: Ranks, tmp_path: Path, how: str, words: list[str], own: Any) -> None:
    first, second = ranks.run(2, disagree, str(tmp_path / "run"), how)
    assert all(word in first for word in words), first
    assert all(word in second for word in own or words), second


@dataclass(frozen=True, kw_only=True)
class ShapeOfRank(MeanGSNR):
    """Sums whose length depends on the rank, from the first step or a later one."""

    since: int = 0

    def local(self, batch: Any, memory: dict[str, Any]) -> dict[str, Any]:
        longer = batch.rank == 1 and batch.step >= self.since
        return {"part": batch.vector([1.0] * (3 + longer))}

    def finalize(self, totals: Any, n: int) -> None:
        return None


def sums_of_different_shapes(rank: int, size: int, group: Any, store: str, since: int) -> list[str]:
    net, loss_fn, said = cases.initialised("mlp"), CE(), []
    options: dict[str, Any] = {"quantities": [ShapeOfRank(since=since)], "schedule": every(1)}
    cockpit = DistCockpit(net, loss_fn, store=store, process_group=group, **options)
    for step in range(4):
        x, y = cases.data("mlp", "mean", step)
        try:
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
            said.append("")
        except RuntimeError as error:
            return [*said, str(error)]
    return said


@pytest.mark.parametrize("since", [0, 2])
def test_sums_of_different_shapes(ranks: Ranks, tmp_path: Path, since: int) -> None:
    """Gloo would end the process: 'op.preamble.length <= op.nbytes'."""
    for said in ranks.run(2, sums_of_different_shapes, str(tmp_path / "run"), since):
        assert said[:since] == [""] * since
        if since == 0:
            assert "the sum 'part' has shape (4,) on rank 1, but (3,) on rank 0" in said[0]
        else:
            assert "different steps: rank 0 tracks step 3, rank 1 compares the sums of step 2" in said[-1]
    ranks.stop(kill=True)


def test_options_of_the_store_by_themselves_work_with_a_warning(tmp_path: Path) -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"store_options=StoreOptions\(flush_seconds=7, fsync=True\)"),
        DistCockpit(cases.initialised("mlp"), store=tmp_path / "run", flush_seconds=7, fsync=True) as cockpit,
    ):
        cockpit.log(0, a=1.0)
    assert open_run(tmp_path / "run")["log"]["a"].values == [1.0]
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="flush_rows=0"):
        DistCockpit(cases.initialised("mlp"), store=tmp_path / "other", flush_rows=0)
