"""Sinks: TensorBoard and Weights & Biases get what the store gets, and may fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from waiting import until

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import GradHist1d, Loss
from distcockpit.sinks import Histogram, Sink, TensorBoard, WandB

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
