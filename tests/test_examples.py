"""The examples and launch scripts run."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from commands import ROOT, get, run, terminal, watching

from distcockpit import open_run, presets
from distcockpit.cli import main

SHORT = ("--steps", "12", "--every", "4")


def cockpit(*arguments: str) -> str:
    return run(sys.executable, "-m", "distcockpit", *arguments)


def check_rows(tree: xr.DataTree, said: str, preset: str) -> None:
    """Every quantity of a preset has rows, and values."""
    for name in {q.name for q in presets.PRESETS[preset]()}:
        rows = 1 if name == "parameter_condition" else 3  # every 100th step, in the preset
        assert f"{name} ({rows})" in said
        for field, array in tree[name].data_vars.items():
            assert array.dtype.kind != "f" or np.isfinite(array.isel(step=-1)).any(), (name, field)


@pytest.mark.smoke
def test_digits_on_four_ranks_and_every_command(tmp_path: Path) -> None:
    store = str(tmp_path / "digits.zarr")
    said = run("launch/local.sh", "examples/digits.py", "--store", store, "--quantities", "full", *SHORT)
    assert "on 4 ranks" in said and "alpha (3)" in said and store in said
    tree = open_run(store)
    assert tree.attrs["world_size"] == 4 and tree.attrs["state"] == "closed"
    assert (tree["alpha"]["batch_size"] == 128).all()
    check_rows(tree, said, "full")
    said = cockpit("info", store)
    for name in tree.children:
        assert name in said
    for command, output in (("plot", "digits.png"), ("report", "digits.html")):
        cockpit(command, store, "-o", str(tmp_path / output))
        assert (tmp_path / output).stat().st_size > 20_000
    assert "all committed rows" in cockpit("verify", store)
    shutil.copytree(store, tmp_path / "copy.zarr")
    for command in (
        ["compare", store, str(tmp_path / "copy.zarr"), "-o", str(tmp_path / "both.html")],
        ["export", store, "-o", str(tmp_path / "events"), "--quantity", "alpha", "--quantity", "grad_norm"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)  # without a process of their own
        assert not ended.value.code
    with watching(store) as (address, _):
        status, page = get(address)
    assert status == 200 and "<title>digits" in page
    seen, code = terminal(
        [sys.executable, "-m", "distcockpit", "watch", "--terminal", store], ("grad_norm/total", None)
    )
    assert code == 130 and "up to step 11" in seen


@pytest.mark.smoke
def test_digits_as_a_world_of_one(tmp_path: Path) -> None:
    store = str(tmp_path / "digits.zarr")
    options = ("--model", "cnn", "--optimizer", "adamw", "--quantities", "economy")
    said = run(sys.executable, "examples/digits.py", "--store", store, *options, *SHORT)
    assert "on 1 ranks" in said
    tree = open_run(store)
    assert set(tree.children) == {*(q.name for q in presets.economy()), "learning_rate", "log"}
    assert np.isfinite(tree["log"]["train_loss"]).all() and tree["log"].sizes["step"] == 12


def test_custom_quantity(tmp_path: Path) -> None:
    """Rank 1 has wrong labels, and so the hardest samples; the row is the maximum over all ranks."""
    store = str(tmp_path / "custom.zarr")
    said = run("torchrun", "--nproc_per_node=2", "examples/custom_quantity.py", "--store", store)
    tree = open_run(store)
    rows = tree["hardest_sample"]
    assert tree.attrs["world_size"] == 2 and rows.sizes["step"] == 20
    assert rows.attrs["description"].startswith("Largest individual loss") and rows.attrs["quantity"] == "HardestSample"
    assert (rows["loss"] > tree["rank_disagreement"]["loss"].max("rank")).all()
    assert (rows["rank"] == 1).sum() >= 15
    assert f"rank 1 held the hardest sample at {int((rows['rank'] == 1).sum())} of 20" in said
    assert "of 20" in run(sys.executable, "examples/custom_quantity.py", "--store", str(tmp_path / "alone.zarr"))


@pytest.mark.smoke
def test_fsdp2_gpt(tmp_path: Path) -> None:
    store = str(tmp_path / "fsdp2.zarr")
    said = run(
        "torchrun", "--nproc_per_node=4", "examples/fsdp2_gpt.py", "--store", store, "--steps", "12", "--every", "5"
    )
    assert "for 12 steps on 4 ranks, to a loss of" in said and store in said
    tree = open_run(store)
    assert set(tree.children) == {*(q.name for q in presets.economy()), "learning_rate", "log"}
    assert list(tree["alpha"]["step"].values) == [0, 5, 10] and np.isfinite(tree["alpha"]["alpha"]).all()
    assert not tree.attrs.get("notices")


@pytest.mark.smoke
def test_gpt2(tmp_path: Path) -> None:
    store = str(tmp_path / "gpt2.zarr")
    said = run("torchrun", "--nproc_per_node=2", "examples/gpt2.py", "--store", store, "--steps", "22")
    assert "transformer.wpe.weight" in said and "calls of functions" in said and "on 2 ranks" in said
    tree = open_run(store)
    assert set(tree.children) == {*(q.name for q in presets.economy()), "learning_rate", "log"}
    assert list(tree["loss"]["step"].values) == [0, 10, 20] and (np.diff(tree["loss"]["loss"]) < 0).all()
    assert tree.attrs["coverage"]["transformer.wpe.weight"]["layers"] == ["transformer.wpe"]
    cockpit("plot", store, "-o", str(tmp_path / "gpt2.png"))
    assert (tmp_path / "gpt2.png").stat().st_size > 20_000


def port_below_the_ephemeral() -> int:
    """A free port that no connection of another process is given in the meantime."""
    while True:
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(candidate.getsockname()[1])


@pytest.mark.smoke
def test_digits_layer_by_layer_on_two_nodes(tmp_path: Path) -> None:
    port = str(port_below_the_ephemeral())
    store = str(tmp_path / "run")
    layers = ("--quantities", "layers", *SHORT)
    said = run("launch/two_nodes.sh", "examples/digits.py", "--store", store, *layers, RANKS="1", PORT=port)
    assert said.count("on 2 ranks") == 1
    check_rows(open_run(store), said, "layers")
    assert open_run(store).attrs["world_size"] == 2


@pytest.mark.smoke
@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "launch").iterdir()))
def test_launch_scripts_parse_and_say_what_to_edit(script: str) -> None:
    path = ROOT / "launch" / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert "Edit:" in path.read_text()


@pytest.mark.smoke
@pytest.mark.parametrize("name, ranks, lines", [("learning_rates", 4, 3), ("noise_scale", 2, 3)])
def test_the_studies(tmp_path: Path, name: str, ranks: int, lines: int) -> None:
    """Shortened: they print a line for each run, as on their page, and draw the figure."""
    program = ("torchrun", f"--nproc_per_node={ranks}", f"examples/{name}.py", "--folder", str(tmp_path))
    said = run(*program, "--steps", "24")
    page = (ROOT / f"docs/{name}.md").read_text()
    begin = re.findall(r"^((?:learning rate|batch size) [\d.]+):", said, re.MULTILINE)
    assert len(begin) == lines and all(f"\n{words}: " in page for words in begin)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and f"]({name}.png)" in page
