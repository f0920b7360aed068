"""Lightning, transformers, TensorBoard, Weights & Biases: the real ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from framework_jobs import MICROS, STEPS
from loops import shows
from test_examples import run
from torch import nn
from waiting import until

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, GradHist1d, GradNorm, Loss
from distcockpit.sinks import Histogram, Sink, TensorBoard, WandB

QUIET = {"PYTHONWARNINGS": "ignore"}  # theirs


def pooled(folder: Path, step: int, world_size: int) -> oracle.Batch:
    """The union of the micro-batches of all ranks; the mean of the loss is one over terms."""
    parts = [np.load(folder / f"{rank}-{step * MICROS + k}.npz") for rank in range(world_size) for k in range(MICROS)]
    losses, gradients = (np.concatenate([part[key] for part in parts]) for key in ("losses", "gradients"))
    per_sample = len(losses) / sum(float(part["terms"]) for part in parts)
    return oracle.Batch(losses * per_sample, {"": gradients * per_sample}, {}, {"": parts[0]["values"]})


@shows("Frameworks", "Lightning (`distcockpit.lightning`), with accumulation")
@shows("Frameworks", "Hugging Face `Trainer` (`distcockpit.transformers`), with accumulation and padded tokens")
@pytest.mark.parametrize("framework, world_size", [("lightning", 2), ("transformers", 2), ("transformers", 1)])
def test_framework(tmp_path: Path, framework: str, world_size: int) -> None:
    """The example on two ranks, two micro-batches per step, against autograd's individual gradients.

    Without ranks the Trainer scales the loss in place.
    """
    store = str(tmp_path / "run")
    launcher = ["torchrun", "--nproc_per_node=2"] if world_size > 1 else [sys.executable]
    command = [*launcher, "tests/framework_jobs.py", framework, store, str(tmp_path)]
    said = run(*command, allowed="Warning", **QUIET)
    assert f"{store}: {STEPS - 1} values of alpha on {world_size} ranks" in said
    tree = open_run(store)
    assert tree.attrs["world_size"] == world_size and tree.attrs["state"] == "closed"
    batches = [pooled(tmp_path, step, world_size) for step in range(STEPS)]
    assert len({batch.n for batch in batches}) == 1 and batches[0].n > 10 * world_size
    for step, batch in enumerate(batches):
        rows = {name: tree[name].sel(step=step) for name in ("loss", "inner_test", "norm_test", "grad_norm")}
        np.testing.assert_allclose(rows["loss"]["loss"], batch.losses.mean(), rtol=1e-5)
        np.testing.assert_allclose(rows["inner_test"]["inner_test"], oracle.inner_test(batch), rtol=1e-4)
        np.testing.assert_allclose(rows["norm_test"]["norm_test"], oracle.norm_test(batch), rtol=1e-4)
        np.testing.assert_allclose(rows["grad_norm"]["total"], np.linalg.norm(batch.flat.mean(0)), rtol=1e-4)
        assert rows["loss"]["batch_size"] == batch.n
    for step in range(STEPS - 1):
        row, expected = tree["alpha"].sel(step=step), oracle.alpha(*batches[step : step + 2])
        for name in ("alpha", "update_norm", "f_start", "f_end", "slope_start", "slope_end"):
            np.testing.assert_allclose(row[name], expected[name], rtol=2e-3, err_msg=name)


# -- the Trainer of transformers ---------------------------------------------------------------------------------------


class Small(nn.Module):
    """Models as in transformers: they compute their loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        n_outputs = 1 if kind in ("squares", "whole numbers") else 3
        self.kind, self.calls = kind, 0
        first = nn.Embedding(3, 5) if kind == "next token" else nn.Linear(6, 5)
        self.net = nn.Sequential(first, nn.Tanh(), nn.Linear(5, n_outputs))
        if kind == "next token":
            self.net[2].weight.data *= 0.01
            self.net[2].bias.data *= 0.01

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.net(x)
        losses = {
            "classes": lambda: nn.functional.cross_entropy(z, labels),
            "squares": lambda: nn.functional.mse_loss(z.squeeze(-1), labels),
            "several classes": lambda: nn.functional.binary_cross_entropy_with_logits(z, labels),
            # Near the loss of the same token: the nearest one is the model's.
            "next token": lambda: nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "whole numbers": lambda: nn.functional.mse_loss(z.squeeze(-1), labels.float()),
            "diverges": lambda: nn.functional.cross_entropy(z * (torch.nan if self.calls > 3 else 1), labels),
            "penalty": lambda: nn.functional.cross_entropy(z, labels) + z.square().mean(),
        }
        self.calls += 1
        return {"loss": losses[self.kind](), "logits": z}


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    labels: Any = torch.randint(3, (64,), generator=generator)
    if kind == "squares":
        labels = x.sum(1)
    if kind == "next token":
        x = labels = torch.randint(3, (64, 96), generator=generator)
    if kind == "several classes":
        labels = (x[:, :3] > 0).float()
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def fit_trainer(folder: Path, kind: str, resume: str | None = None, steps: int = 4, **options: Any) -> Small:
    from transformers import Trainer, TrainingArguments

    from distcockpit.transformers import DistCockpitCallback

    model = Small(kind)
    quantities = [Loss(), GradNorm(), Alpha()]
    callback = DistCockpitCallback(folder / "run", quantities=quantities, schedule=every(1), **options)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples(kind), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return model


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_the_trainer_that_diverges(tmp_path: Path) -> None:
    """It goes on, as without the callback, and rows say that there is no number."""
    fit_trainer(tmp_path, "diverges")
    losses = open_run(tmp_path / "run")["loss"]["loss"].values
    assert list(np.isnan(losses)) == [False, True, True, True]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["classes", "squares", "several classes", "whole numbers", "next token", "penalty"])
def test_losses_of_the_trainer(tmp_path: Path, kind: str) -> None:
    """The mean over both micro-batches of the first step."""
    from transformers import Trainer

    seen: list[dict[str, torch.Tensor]] = []
    usual = Trainer.compute_loss

    def watching(self: Any, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.append({k: v.clone() for k, v in inputs.items()})
        return usual(self, model, inputs, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "compute_loss", watching)
        fit_trainer(tmp_path, kind)
    twin, batch = Small(kind), {k: torch.cat([s[k] for s in seen[:2]]) for k in ("x", "labels")}
    loss = twin(**batch)["loss"]
    gradients = torch.autograd.grad(loss, list(twin.parameters()))
    tree = open_run(tmp_path / "run")
    np.testing.assert_allclose(tree["loss"]["loss"][0], loss.item(), rtol=1e-5)
    norm = float(torch.cat([g.reshape(-1) for g in gradients]).norm())
    np.testing.assert_allclose(tree["grad_norm"]["total"][0], norm, rtol=1e-5)
    assert tree["loss"].sizes["step"] == 4 and (tree["loss"]["batch_size"] == 8).all()
    assert (tree["alpha"]["status"].values < 2).all()


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    fit_trainer(tmp_path / "whole", "classes")
    fit_trainer(tmp_path, "classes", steps=2)
    fit_trainer(tmp_path, "classes", resume=str(tmp_path / "out" / "checkpoint-2"))
    whole, resumed = (open_run(folder / "run") for folder in (tmp_path / "whole", tmp_path))
    assert list(resumed["loss"]["step"].values) == [0, 1, 2, 3]
    for name in ("loss", "grad_norm", "alpha"):
        for field in whole[name].data_vars:
            np.testing.assert_allclose(resumed[name][field], whole[name][field], rtol=1e-6, err_msg=field)


# -- Lightning ---------------------------------------------------------------------------------------------------------


def fit_lightning(
    folder: Path,
    module: Any,
    steps: int = 4,
    resume: str | None = None,
    micros: int = 2,
    callback: Any = None,
    **options: Any,
) -> Any:
    import lightning.pytorch as pl

    from distcockpit.lightning import DistCockpitCallback

    data = [(s["x"], s["labels"]) for s in samples("classes")][:16]  # two steps per epoch
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    options = {"quantities": [Loss(), GradNorm(), Alpha()], "schedule": every(1), **options}
    callback = callback or DistCockpitCallback(folder / "run", **options)
    saving = pl.callbacks.ModelCheckpoint(folder / "out", save_last=True, every_n_train_steps=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=micros, callbacks=[callback, saving], **quiet
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return callback


def lightning_module(kind: str) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
            if kind == "own parameter":
                self.temperature = nn.Parameter(torch.ones(3))
            if kind != "function":
                self.loss_fn = nn.CrossEntropyLoss()
            self.automatic_optimization, self.skipped = kind != "manual", False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.temperature if kind == "own parameter" else self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            x, y = batch
            if kind == "skips" and self.global_step == 1 and batch_idx == 1 and not self.skipped:
                self.skipped = True
                return None
            if kind == "raises" and self.global_step == 1 and batch_idx == 3:
                raise ValueError("the user's own")
            if kind == "function":
                losses = nn.functional.cross_entropy(self(x), y, reduction="none")
                (callback,) = [c for c in self.trainer.callbacks if hasattr(c, "cockpit")]
                callback.cockpit.record_losses(losses)
                return losses.mean()
            return self.loss_fn(self(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["usual", "function", "own parameter"])
def test_lightning_modules(tmp_path: Path, kind: str) -> None:
    """The loss by a module or a function; parameters of the LightningModule itself; checkpoints."""
    fit_lightning(tmp_path / "whole", lightning_module(kind))
    fit_lightning(tmp_path, lightning_module(kind), steps=2)
    fit_lightning(tmp_path, lightning_module(kind), resume=str(tmp_path / "out" / "last.ckpt"))
    whole, resumed = (open_run(folder / "run") for folder in (tmp_path / "whole", tmp_path))
    twin, x = lightning_module(kind), torch.stack([s["x"] for s in samples("classes")[:8]])
    y = torch.stack([s["labels"] for s in samples("classes")[:8]])
    np.testing.assert_allclose(whole["loss"]["loss"][0], float(nn.functional.cross_entropy(twin(x), y)), rtol=1e-5)
    assert ("temperature" in whole.attrs["parameters"]) == (kind == "own parameter")
    assert list(resumed["loss"]["step"].values) == list(whole["loss"]["step"].values) == [0, 1, 2, 3]
    for name in ("loss", "grad_norm", "alpha"):
        for field in whole[name].data_vars:
            np.testing.assert_allclose(resumed[name][field], whole[name][field], rtol=1e-6, err_msg=field)


@pytest.mark.filterwarnings("ignore")
def test_lightning_skips_a_batch_and_trains_again(tmp_path: Path) -> None:
    """``None`` skips a batch; the same callback for another training begins anew."""
    callback = fit_lightning(tmp_path, lightning_module("skips"), micros=1, mode="w")
    sizes = open_run(tmp_path / "run")["loss"]["batch_size"].values
    assert sorted(sizes) == [0, 4, 4, 4]
    fit_lightning(tmp_path, lightning_module("usual"), micros=1, callback=callback)
    assert list(open_run(tmp_path / "run")["loss"]["batch_size"].values) == [4, 4, 4, 4]


@pytest.mark.filterwarnings("ignore")
def test_errors_under_lightning(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="automatic_optimization=False.*Use DistCockpit in its training_step"):
        fit_lightning(tmp_path / "a", lightning_module("manual"), micros=1)
    with pytest.raises(ValueError, match=r"model='nett'\): Module has no such submodule; it has \['net', 'loss_fn'\]"):
        fit_lightning(tmp_path / "c", lightning_module("usual"), model="nett")
    module = lightning_module("raises")
    with pytest.raises(ValueError, match="the user's own"):
        fit_lightning(tmp_path / "b", module)
    assert list(open_run(tmp_path / "b" / "run")["loss"]["step"].values) == [0]
    assert not any(m._forward_hooks for m in module.modules())


# -- sinks -------------------------------------------------------------------------------------------------------------


def train_with(sinks: Any, folder: Path, steps: int = 3) -> Any:
    net, loss_fn = nn.Linear(6, 3), nn.CrossEntropyLoss()
    quantities = [Loss(), GradHist1d(range=(-1, 1), bins=10)]
    with DistCockpit(
        net, loss_fn, store=folder / "run", quantities=quantities, schedule=every(1), sinks=sinks
    ) as cockpit:
        for step in range(steps):
            x, y = torch.randn(8, 6), torch.randint(3, (8,))
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            cockpit.log(step, accuracy=0.5 + step)
    return open_run(folder / "run")


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tree = train_with([TensorBoard(tmp_path / "events")], tmp_path)
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    told = {(e.step, e.value) for e in events.Scalars("loss/loss")}
    assert told == {(s, np.float32(v)) for s, v in zip(range(3), tree["loss"]["loss"].values, strict=True)}
    assert [e.value for e in events.Scalars("log/accuracy")] == [0.5, 1.5, 2.5]
    histograms = events.Histograms("grad_hist_1d/counts")
    for event, counts in zip(histograms, tree["grad_hist_1d"]["counts"].values, strict=True):
        assert list(event.histogram_value.bucket) == list(counts) and event.histogram_value.num == counts.sum()


def history_of(path: Path) -> list[dict[str, str]]:
    """The rows in a file of W&B: records in the blocks of LevelDB's log, after seven bytes."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data, rows, whole, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block is filled up
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            try:
                record.ParseFromString(whole)
            except DecodeError:  # it is being written
                break
            whole = b""
            if record.WhichOneof("record_type") == "history":
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ours", [True, False], ids=["a run of its own", "a run of the user's"])
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ours: bool) -> None:
    """Offline: the records are read back from W&B's own file."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"mode": "offline", "dir": str(tmp_path), "project": "test"}
    theirs = None if ours else wandb.init(**options)
    tree = train_with([WandB(**options) if ours else WandB(theirs)], tmp_path)
    if theirs is not None:
        theirs.log({"mine": 1.0})
        theirs.finish()
    assert "receives no more rows" not in caplog.text
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    enough = 3 if ours else 1

    def all_rows() -> list[dict[str, str]]:
        """`close` waits for a sink no longer than `store_seconds`."""
        found = history_of(path)
        losses, counts = (sum(key in row for row in found) for key in ("loss/loss", "grad_hist_1d/counts/values"))
        return found if losses >= enough and counts >= enough else []

    history = until(all_rows)
    losses = {int(row["loss/step"]): float(row["loss/loss"]) for row in history if "loss/loss" in row}
    expected = dict(enumerate(tree["loss"]["loss"].values))
    assert losses == (pytest.approx(expected) if ours else pytest.approx({2: expected[2]}))
    counts = [json.loads(row["grad_hist_1d/counts/values"]) for row in history if "grad_hist_1d/counts/values" in row]
    stored = tree["grad_hist_1d"]["counts"].values.tolist()
    assert counts == (stored if ours else stored[-1:])
    assert ours or any(row.get("mine") == "1" for row in history)


class Failing(Sink):
    """Fails at its second row."""

    def __init__(self, fails: str) -> None:
        self.fails, self.calls = fails, []

    def start(self) -> None:
        if self.fails == "start":
            raise ImportError("no such service")

    def write(self, name: str, step: int, wall_time: float, numbers: Any, histogram: Histogram | None) -> None:
        self.calls.append((name, step))
        if self.fails == "write" and len(self.calls) > 1:
            raise ConnectionError("gone")

    def close(self) -> None:
        self.calls.append("closed")


def test_sinks_that_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Failing("write"), Failing("")
    tree = train_with([bad, good], tmp_path)
    assert tree["loss"].sizes["step"] == 3 and tree.attrs["state"] == "closed"
    assert len(bad.calls) == 2 and len(good.calls) == 3 * 3 + 1 and good.calls[-1] == "closed"
    assert "Failing is disabled after an error and receives no more rows: gone" in caplog.text
    first = Failing("")
    with pytest.raises(ImportError, match="no such service"):
        train_with([first, Failing("start")], tmp_path / "b")
    assert first.calls == ["closed"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"sinks=\[TensorBoard\(.*the folder cannot be written"):
        train_with([TensorBoard(tmp_path / "file")], tmp_path / "b")
    assert not (tmp_path / "b" / "run").exists()  # so that the next try is not in its own way
    with pytest.raises(TypeError, match=r"sinks=\['tensorboard'\]: must be a list of sinks"):
        train_with(["tensorboard"], tmp_path / "c")
    with pytest.raises(TypeError, match="options only apply to a run that WandB starts itself"):
        WandB(object(), project="a")


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_the_page_with_the_lines_of_each_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three lines each, and they work."""
    import lightning.pytorch as pl
    import transformers
    from accelerate import Accelerator

    page = (Path(__file__).parents[1] / "docs/frameworks.md").read_text()
    blocks = dict(re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", page, re.MULTILINE | re.DOTALL))
    assert list(blocks) == ["PyTorch", "Accelerate", "Lightning", "transformers"]
    rows = samples("classes")
    pairs = torch.utils.data.DataLoader([(row["x"], row["labels"]) for row in rows], batch_size=4)  # type: ignore[arg-type]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        max_steps=3,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    net = nn.Sequential(nn.Linear(6, 3))
    for name, block in blocks.items():
        monkeypatch.chdir(tmp_path)
        assert 2 <= len(re.findall(r"# \+$", block, re.MULTILINE)) <= 3, name
        scope: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "loader": pairs, "model": net, "data": rows}
        scope |= {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "accelerator": Accelerator(cpu=True)}
        if name == "Lightning":
            scope |= {"module": lightning_module("usual")}
            quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            scope["Trainer"] = lambda **given: pl.Trainer(**given, **quiet)  # noqa: B023
        if name == "transformers":
            scope |= {"model": Small("classes"), "Trainer": transformers.Trainer, "arguments": arguments}
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        exec(compile(block, f"{name} in frameworks.md", "exec"), scope)
        tree = open_run("runs/run.zarr")
        assert tree["alpha"].sizes["step"] >= 1 and tree.attrs["state"] == "closed", name
