"""Export to other tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from commands import ran
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from written import Written

from distcockpit import open_run
from distcockpit import quantities as q
from distcockpit.run import to_dataframe
from distcockpit.view.export import export_csv


def test_export_to_csv_and_parquet(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = open_run(store)
    for kind, read in (("csv", pd.read_csv), ("parquet", pd.read_parquet)):
        out, _ = ran(capfd, "export", store, "-o", tmp_path / kind, "--format", kind)
        assert f"{len(run.children)} files" in out
        for name, node in run.children.items():
            expected = to_dataframe(node)
            found = read(tmp_path / kind / f"{name}.{kind}")
            found = found.set_index("step") if kind == "csv" else found
            assert list(found.index) == list(expected.index) and list(found.columns) == list(expected.columns)
            numbers = [c for c in expected if c != "wall_time"]
            np.testing.assert_allclose(found[numbers], expected[numbers], rtol=1e-6)


def test_export_to_tensorboard(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran(capfd, "export", store, "-o", tmp_path / "events")
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    run = open_run(store)
    loss = events.Scalars("loss/loss")
    assert [e.step for e in loss] == list(run["loss"]["step"].values)
    np.testing.assert_allclose([e.value for e in loss], run["loss"]["loss"], rtol=1e-6)
    seconds = run["loss"]["wall_time"].values.astype("datetime64[ns]").astype(np.int64) / 1e9
    np.testing.assert_allclose([e.wall_time for e in loss], seconds, atol=1e-3)
    norm = events.Scalars("grad_norm/grad_norm/0.weight")
    np.testing.assert_allclose(
        [e.value for e in norm], run["grad_norm"]["grad_norm"].sel(parameter="0.weight"), rtol=1e-6
    )
    histogram = events.Histograms("grad_hist_1d/counts")[-1].histogram_value
    np.testing.assert_array_equal(histogram.bucket, run["grad_hist_1d"]["counts"][-1])
    np.testing.assert_allclose(histogram.bucket_limit, run["grad_hist_1d"]["edges"][-1, 1:])


def test_exporting_twice_to_tensorboard_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = Written(tmp_path / "run", [q.Loss()]).rows(3).close()
    ran(capfd, "export", small, "-o", tmp_path / "events")
    assert "already holds event files" in ran(capfd, "export", small, "-o", tmp_path / "events", code=2)[1]


def test_export_of_some(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran(capfd, "export", store, "-o", tmp_path / "some", "--format", "csv", "--quantity", "alpha", "--quantity", "loss")
    assert sorted(p.name for p in (tmp_path / "some").iterdir()) == ["alpha.csv", "loss.csv"]
    _, err = ran(capfd, "export", store, "-o", tmp_path / "some", "--quantity", "beta", code=2)
    assert "--quantity 'beta': is not in the run, which has ['" in err


def test_texts_in_tables_are_no_formulas(tmp_path: Path) -> None:
    texts = np.array(["=cmd|' /C calc'!A0", "+1", "-1", "@x", "plain", "a\x1b[31m"])
    data = xr.Dataset({"text": ("step", texts), "value": ("step", np.arange(6.0) - 3)}, {"step": np.arange(6)})
    export_csv(xr.DataTree.from_dict({"group": data}), tmp_path, lambda name: None)
    table = pd.read_csv(tmp_path / "group.csv")
    assert list(table["text"]) == ["'=cmd|' /C calc'!A0", "'+1", "'-1", "'@x", "plain", "a\ufffd[31m"]
    assert list(table["value"]) == [-3, -2, -1, 0, 1, 2]  # numbers are numbers
