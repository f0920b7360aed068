"""Read a run: print what is inside, with the last values, and save a figure beside the store.

python examples/read_run.py runs/digits.zarr
python examples/read_run.py runs/digits.zarr --figure docs/digits.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distcockpit import open_run


def last_values(dataset: xr.Dataset, most: int = 4) -> str:
    """The newest values in words: numbers as they are (the last that is not NaN), arrays by shape."""
    words = []
    for name, array in dataset.data_vars.items():
        known = array.dropna("step") if array.ndim == 1 else array
        value = (known if known.sizes["step"] else array).isel(step=-1).values
        if value.ndim == 0 and "flag_meanings" in array.attrs:
            words.append(f"{name} {array.attrs['flag_meanings'].split()[int(value)]}")
        elif value.ndim == 0:
            words.append(f"{name} {value:.4g}")
        else:
            words.append(f"{name} [{' × '.join(map(str, value.shape))}]")
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def print_table(run: xr.DataTree, path: str) -> None:
    steps = run.attrs["committed_step"]
    table = Table(title=f"{path}: {run.attrs['world_size']} ranks, up to step {steps}, {run.attrs['state']}")
    for column in ("quantity", "rows", "steps", "last values"):
        table.add_column(column, overflow="fold")
    for name, node in run.children.items():
        step = node["step"].values
        if len(step):
            table.add_row(
                escape(name), str(len(step)), f"{step[0]} to {step[-1]}", escape(last_values(node.to_dataset()))
            )
        else:
            table.add_row(escape(name), "0", "", "")
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def draw_alpha(axes: Axes, data: xr.DataTree) -> None:
    finite = data["alpha"].where(np.isfinite(data["alpha"]))
    axes.axhspan(0, max(2.0, 2 * float(finite.max())), color="tab:red", alpha=0.08)
    axes.axhspan(min(-2.0, 2 * float(finite.min())), 0, color="tab:blue", alpha=0.08)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.plot(data["step"], data["alpha"], ".", color="0.45", markersize=4)
    median = data["alpha"].rolling(step=min(9, data["alpha"].sizes["step"]), center=True, min_periods=1).median()
    axes.plot(data["step"], median, color="tab:purple", label="running median")
    axes.set_yscale("symlog", linthresh=1)
    axes.margins(y=0)
    axes.set(title="step size: 0 goes to the minimum", xlabel="step", ylabel="α (above 0: too far, below: short)")
    axes.legend(loc="upper left")


def draw_histogram(axes: Axes, data: xr.DataTree) -> None:
    counts = data["counts"].values.T
    edges = data["edges"].values[-1]
    steps = data["step"].values
    width = np.diff(steps).min() if len(steps) > 1 else 1
    columns = np.append(steps, steps[-1] + width)
    masked = np.ma.masked_equal(counts, 0)
    image = axes.pcolormesh(columns, edges, masked, norm=LogNorm(), cmap="cividis", rasterized=True)
    axes.figure.colorbar(image, ax=axes, label="elements")
    axes.set(title="individual gradient elements", xlabel="step", ylabel="value")


def draw_histogram_2d(axes: Axes, data: xr.DataTree) -> None:
    row = data.to_dataset().isel(step=-1)
    masked = np.ma.masked_equal(row["counts"].values, 0)
    image = axes.pcolormesh(
        row["param_edges"], row["grad_edges"], masked, norm=LogNorm(), cmap="cividis", rasterized=True
    )
    axes.figure.colorbar(image, ax=axes, label="pairs")
    axes.set(title=f"gradient against parameter, step {int(row['step'])}", xlabel="parameter", ylabel="gradient")


def draw_gsnr(axes: Axes, data: xr.DataTree) -> None:
    axes.semilogy(data["step"], data["mean_gsnr"], color="tab:green")
    axes.set(title="mean gradient signal-to-noise ratio", xlabel="step", ylabel="mean GSNR")


def draw_lines(axes: Axes, array: xr.DataArray, title: str) -> None:
    dim = array.dims[1]
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, array.sizes[dim]))
    for label, colour in zip(array[dim].values, colours, strict=True):
        line = array.sel({dim: label})
        if np.isfinite(line).any():
            axes.plot(array["step"], line, color=colour, label=str(label), linewidth=1.2)
    axes.set(title=title, xlabel="step", ylabel=f"{array.attrs['long_name']} [{array.attrs['units']}]", yscale="log")
    axes.legend(title=dim, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def draw_tests(axes: Axes, run: xr.DataTree) -> None:
    for name, colour in (("norm_test", "tab:blue"), ("inner_test", "tab:orange"), ("ortho_test", "tab:green")):
        if name in run.children:
            axes.plot(run[name]["step"], run[name][name], color=colour, label=name.replace("_", " "), linewidth=1.2)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title="noise of the batch: above 1 it exceeds the gradient", xlabel="step", yscale="log")
    axes.set_ylabel("relative standard error of G")
    axes.legend()


def draw_noise_scale(axes: Axes, data: xr.DataTree) -> None:
    window = min(15, data.sizes["step"])
    noise, signal = (data[name].rolling(step=window, min_periods=1).mean() for name in ("noise", "signal"))
    axes.plot(data["step"], noise / signal.where(signal > 0), color="tab:purple", label=f"mean of {window} rows each")
    axes.plot(data["step"], data["batch_size"], color="black", linewidth=0.8, label="batch size")
    axes.set(title="gradient noise scale", xlabel="step", ylabel="noise / signal [samples]", yscale="log")
    axes.legend()


def draw_ranks(axes: Axes, data: xr.DataTree) -> None:
    for rank in data["cosine"]["rank"].values:
        axes.plot(data["step"], data["cosine"].sel(rank=rank), linewidth=1, label=f"rank {rank}")
    axes.set(title="agreement of the ranks", xlabel="step", ylabel="cosine of a rank's gradient with G")
    axes.legend(fontsize="small", ncols=2)


def draw_eigenvalue(axes: Axes, run: xr.DataTree) -> None:
    data = run["hess_max_ev"]
    axes.plot(data["step"], data["hess_max_ev"], color="tab:red", label="largest eigenvalue")
    if "learning_rate" in run.children:
        rates = run["learning_rate"]["learning_rate"].isel(param_group=0)
        axes.plot(rates["step"], 2 / rates, color="black", linewidth=0.8, label="2 / learning rate")
    unit = data["hess_max_ev"].attrs["units"]
    axes.set(title="sharpness", xlabel="step", ylabel=f"Hessian eigenvalue [{unit}]", yscale="symlog")
    axes.legend()


def draw_lengths(axes: Axes, run: xr.DataTree) -> None:
    for name, label in (("distance", "from the start"), ("update_size", "of one step")):
        if name in run.children:
            total = run[name]["total"]
            axes.semilogy(total["step"], total.where(total > 0), label=label)
    axes.set(title="how far the parameters went", xlabel="step", ylabel="distance [parameter]")
    axes.legend()


# Which group draws which panel; a panel of several groups gets the whole run.
PANELS = {
    "alpha": lambda axes, run: draw_alpha(axes, run["alpha"]),
    "norm_test": draw_tests,
    "gradient_noise_scale": lambda axes, run: draw_noise_scale(axes, run["gradient_noise_scale"]),
    "grad_hist_1d": lambda axes, run: draw_histogram(axes, run["grad_hist_1d"]),
    "grad_hist_2d": lambda axes, run: draw_histogram_2d(axes, run["grad_hist_2d"]),
    "distance": draw_lengths,
    "rank_disagreement": lambda axes, run: draw_ranks(axes, run["rank_disagreement"]),
    "hess_max_ev": draw_eigenvalue,
    "hess_trace": lambda axes, run: draw_lines(
        axes, np.abs(run["hess_trace"]["trace"]).assign_attrs(run["hess_trace"]["trace"].attrs), "|trace|"
    ),
    "mean_gsnr": lambda axes, run: draw_gsnr(axes, run["mean_gsnr"]),
    "output_norm": lambda axes, run: draw_lines(axes, run["output_norm"]["output_norm"], "outputs"),
    "output_gradient_geometry": lambda axes, run: draw_lines(
        axes, run["output_gradient_geometry"]["norm"], "gradients at the outputs"
    ),
    "gradient_geometry": lambda axes, run: draw_lines(axes, run["gradient_geometry"]["norm"], "gradients"),
    "update_geometry": lambda axes, run: draw_lines(axes, run["update_geometry"]["norm"], "updates"),
    "parameter_condition": lambda axes, run: draw_lines(
        axes, run["parameter_condition"]["parameter_condition"], "condition of the weights"
    ),
}


def draw(run: xr.DataTree, path: Path) -> None:
    panels = [name for name in PANELS if name in run.children and run[name].sizes["step"]]
    if not panels:
        sys.exit(f"{path}: the run holds no rows yet, so there is nothing to draw.")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.7 * rows), squeeze=False, layout="constrained")
    for place, name in zip(axes.flat, panels, strict=False):
        PANELS[name](place, run)
    for place in axes.flat[len(panels) :]:
        place.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"Figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of the store")
    parser.add_argument("--figure", type=Path, help="where to save the figure (default: beside the store)")
    args = parser.parse_args()
    try:
        run = open_run(args.run)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    print_table(run, args.run)
    draw(run, args.figure or Path(args.run).with_suffix(".png"))


if __name__ == "__main__":
    main()
