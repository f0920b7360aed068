"""Does one process agree with Cockpit? Every quantity of Cockpit 1.0.2 on the same run, and the largest difference.

pip install cockpit-for-pytorch "setuptools<80"
python -m benchmarks.agreement
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backpack import extend
from rich.console import Console
from rich.table import Table
from torch import nn

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q

# Name in Cockpit -> group and array in our store, and the key in Cockpit's result if that is a dictionary.
NAMES = {
    "Alpha": ("alpha", "alpha", None),
    "CABS": ("cabs", "cabs", None),
    "Distance": ("distance", "distance", None),
    "EarlyStopping": ("early_stopping", "early_stopping", None),
    "GradHist1d": ("grad_hist_1d", "counts", "hist"),
    "GradHist2d": ("grad_hist_2d", "counts", "hist"),
    "GradNorm": ("grad_norm", "grad_norm", None),
    "HessMaxEV": ("hess_max_ev", "hess_max_ev", None),
    "HessTrace": ("hess_trace", "trace", None),
    "InnerTest": ("inner_test", "inner_test", None),
    "Loss": ("loss", "loss", None),
    "MeanGSNR": ("mean_gsnr", "mean_gsnr", None),
    "NormTest": ("norm_test", "norm_test", None),
    "OrthoTest": ("ortho_test", "ortho_test", None),
    "TICDiag": ("tic_diag", "tic_diag", None),
    "TICTrace": ("tic_trace", "tic_trace", None),
    "UpdateSize": ("update_size", "update_size", None),
}
STEPS = 4


def setup() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 9), nn.Sigmoid(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
    batches = [(torch.randn(24, 12), torch.randint(5, (24,))) for _ in range(STEPS)]
    return net, torch.optim.SGD(net.parameters(), lr=0.1), batches


def theirs() -> dict[int, dict[str, Any]]:
    from cockpit import Cockpit, quantities
    from cockpit.utils.schedules import linear

    net, optimizer, batches = setup()
    extend(net)
    loss_fn, individual = extend(nn.CrossEntropyLoss()), nn.CrossEntropyLoss(reduction="none")
    cockpit = Cockpit(net.parameters(), [getattr(quantities, name)(linear(1)) for name in NAMES])
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        prediction = net(x)
        loss = loss_fn(prediction, y)
        info = {
            "batch_size": len(x),
            "individual_losses": individual(prediction, y),
            "loss": loss,
            "optimizer": optimizer,
        }
        with cockpit(step, info=info):
            loss.backward(create_graph=cockpit.create_graph(step))
        optimizer.step()
    return cockpit.get_output()


def ours(store: Path) -> Any:
    net, optimizer, batches = setup()
    loss_fn = nn.CrossEntropyLoss()
    chosen = [*presets.full(), q.CABS(), q.EarlyStopping(), q.MeanGSNR(), q.TICTrace()]
    with DistCockpit(net, loss_fn, optimizer, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
    return open_run(store)


def main() -> None:
    warnings.simplefilter("ignore")  # of Cockpit's, about BackPACK's hooks
    with tempfile.TemporaryDirectory() as folder:
        run, output = ours(Path(folder, "run")), theirs()
        table = Table(title=f"{STEPS} steps of SGD, one process: largest difference, relative to the largest value")
        for column in ("quantity", "rows", "difference"):
            table.add_column(column, justify="left" if column == "quantity" else "right")
        for name, (group, array, key) in NAMES.items():
            differences = []
            for step in run[group]["step"].values:
                if name not in output[int(step)]:
                    continue  # the last update is known to us at close, and not to Cockpit
                value = output[int(step)][name]
                there = np.asarray(value[key] if key else value, dtype=float)
                here = run[group][array].sel(step=step).values
                differences.append(np.abs(here - there.reshape(here.shape)).max() / max(np.abs(there).max(), 1e-30))
            table.add_row(name, str(len(differences)), f"{max(differences):.1e}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
