"""The command line: ``distcockpit info RUN``, ``plot``, ``report``, ``watch``, ``compare``, ``export``, ``verify``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import click
import xarray as xr
from click.shell_completion import get_completion_class
from rich.filesize import decimal
from rich.live import Live as LiveView

from distcockpit import __version__
from distcockpit.run import look_at
from distcockpit.run import verify as verify_run
from distcockpit.store.keys import keys_of
from distcockpit.store.names import plain
from distcockpit.store.reading import commit
from distcockpit.view import terminal
from distcockpit.view.console import bar, check_place, check_suffix, console, needs, needs_view, progress, refuse
from distcockpit.view.summary import facts, summary

Panel = Literal["small", "full"]


class _Run(click.Path):
    """A folder, with shell completion, or a URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path, with ``~`` expanded in case the shell did not; the newest run in a folder of runs."""
        return str(value) if "://" in str(value) else _newest(os.path.expanduser(value))


class _Options(click.ParamType):
    """fsspec options as JSON."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The options as a dictionary."""
        try:
            options = json.loads(value)
        except ValueError:
            options = None
        if not isinstance(options, dict):
            self.fail(f"{value!r} is not a JSON object such as '{{\"anon\": true}}'.", param, ctx)
        return options


def _takes_run(command: Callable[..., Any]) -> Callable[..., Any]:
    run = click.argument("run", type=_Run())
    return run(_storage(command))


_storage = click.option(
    "--storage-options", type=_Options(), help="fsspec options for a URL, as JSON: credentials, endpoint."
)


def _output(default: str, what: str) -> Callable[..., Any]:
    path: click.Path = click.Path(dir_okay=False, path_type=Path)
    return click.option("-o", "--output", type=path, default=default, show_default=True, help=what)


_panel = click.option(
    "--panel",
    type=click.Choice(["small", "full"]),
    default="small",
    show_default=True,
    help="Of a picture: six plots on one screen, or all there are. An HTML page always shows all.",
)
_dpi = click.option("--dpi", type=click.IntRange(20, 600), default=200, show_default=True, help="Of a PNG.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="%(version)s")
def cli() -> None:
    """Inspect runs recorded by distcockpit. RUN is a folder or a URL; the run may still be in progress.

    A folder of runs stands for the one that was written last.

    No command needs torch, and none writes to a run.
    """


@cli.command()
@_takes_run
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def info(run: str, storage_options: dict[str, Any] | None, as_json: bool) -> None:
    """Print what a run contains, and what looks wrong."""
    tree = look_at(run, storage_options)
    size = keys_of(run, storage_options).total()
    if as_json:
        return click.echo(json.dumps(summary(tree, run, size), allow_nan=False))
    out = console()
    return out.print(terminal.info(tree, {**facts(tree), "size": decimal(size)}, run))


@cli.command()
@_takes_run
@_output("plot.png", "PNG, PDF or SVG.")
@_panel
@_dpi
def plot(run: str, storage_options: dict[str, Any] | None, output: Path, panel: Panel, dpi: int) -> None:
    """Draw a run to a file: loss, step size, gradients, ranks and what looks wrong, or everything."""
    check_place(output, run)
    _figure({run: look_at(run, storage_options)}, output, panel, dpi)


@cli.command()
@_takes_run
@_output("report.html", "An HTML file.")
def report(run: str, storage_options: dict[str, Any] | None, output: Path) -> None:
    """Write a single HTML page with findings and interactive figures that works offline."""
    check_suffix(output, [".html", ".htm"])
    check_place(output, run)
    _page({run: look_at(run, storage_options)}, output)


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=_Run(), metavar="RUN RUN...")
@_storage
@_output("compare.html", "HTML, or PNG, PDF or SVG.")
@_panel
@_dpi
def compare(
    runs: tuple[str, ...], storage_options: dict[str, Any] | None, output: Path, panel: Panel, dpi: int
) -> None:
    """Overlay several runs in the same figures."""
    if len(runs) < 2:
        refuse(f"compare: takes two runs or more, not {len(runs)}.")
    check_place(output, *runs)
    trees = {name: look_at(path, storage_options) for name, path in _names(runs).items()}
    if output.suffix.lower() in (".html", ".htm"):
        _page(trees, output)
    else:
        _figure(trees, output, panel, dpi)


@cli.command()
@_takes_run
@click.option("--terminal", "in_terminal", is_flag=True, help="Show it in this terminal instead of on a page.")
@click.option("--port", type=click.IntRange(0, 65535), help="Default: 8128, or any free port.")
@click.option("--refresh", type=click.FloatRange(0.2, 3600), default=2.0, show_default=True, metavar="SECONDS")
@click.option("--open/--no-open", "browser", default=False, help="Open the page in a browser.")
def watch(
    run: str, storage_options: dict[str, Any] | None, in_terminal: bool, port: int | None, refresh: float, browser: bool
) -> None:
    """Follow a run live: on a page at 127.0.0.1 or, with --terminal, as a table. Press Ctrl-C to stop.

    If there is no run yet, wait for it.
    """
    run = _wait_for(run, storage_options, refresh)
    if in_terminal:
        return _watch_here(run, storage_options, refresh)
    with needs_view():
        from distcockpit.view.page.server import Live, serve

    name = _names((run,))
    live = Live(
        lambda: commit(run, storage_options), lambda: dict.fromkeys(name, look_at(run, storage_options)), refresh
    )

    def ready(address: str) -> None:
        click.echo(f"{plain(run)}: {address} (press Ctrl-C to stop)")
        sys.stdout.flush()
        if browser:
            click.launch(address)

    return serve(live, port, ready)


@cli.command()
@_takes_run
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="A folder.")
@click.option(
    "--format", "kind", type=click.Choice(["tensorboard", "csv", "parquet"]), default="tensorboard", show_default=True
)
@click.option("--quantity", "only", multiple=True, metavar="NAME", help="Export only this quantity; can be repeated.")
def export(run: str, storage_options: dict[str, Any] | None, output: Path, kind: str, only: tuple[str, ...]) -> None:
    """Export a run to TensorBoard event files, or to one CSV or Parquet table per quantity."""
    from distcockpit.view.export import FORMATS

    check_place(output, run)
    tree = look_at(run, storage_options)
    for name in only:
        if name not in tree.children:
            refuse(f"--quantity {name!r}: is not in the run, which has {list(tree.children)}.")
    if only:
        tree = xr.DataTree(children={name: tree[name] for name in only})  # type: ignore[misc] # nodes, not arrays
    with progress("export", len(tree.children)) as step, needs("distcockpit[export]"):
        paths = FORMATS[kind](tree, output, step)
    click.echo(f"{len(paths)} files in {plain(output)}")


@cli.command()
@_takes_run
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def verify(run: str, storage_options: dict[str, Any] | None, as_json: bool) -> None:
    """Read every committed row; the exit code is 1 if anything is damaged."""
    with bar("verify") as (shown, task):
        problems = verify_run(run, storage_options, lambda done, of: shown.update(task, completed=done, total=of))
    if as_json:
        click.echo(json.dumps({"run": run, "problems": problems}))
    else:
        for problem in problems:
            click.echo(plain(problem, 400))
        click.echo(f"{plain(run)}: {f'{len(problems)} problems' if problems else 'all committed rows can be read'}")
    if problems:
        click.get_current_context().exit(1)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the shell completion script; eval "$(distcockpit completion bash)" in ~/.bashrc enables it."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "distcockpit", "_DISTCOCKPIT_COMPLETE").source())


def _figure(trees: Mapping[str, xr.DataTree], output: Path, panel: Panel, dpi: int) -> None:
    with needs_view():
        from matplotlib.figure import Figure

        from distcockpit.instruments import INSTRUMENTS, plot_run
    check_suffix(output, [f".{kind}" for kind in Figure().canvas.get_supported_filetypes()])
    with progress("plot", len(INSTRUMENTS) * len(trees) + 1) as step:
        figure = plot_run(trees, ", ".join(_names(tuple(trees))), panel, step)
        step(output.name)
        figure.savefig(output, dpi=dpi)
    click.echo(f"{plain(output)}")


def _page(trees: Mapping[str, xr.DataTree], output: Path) -> None:
    with needs_view():
        from distcockpit.instruments import INSTRUMENTS
        from distcockpit.view.page.content import content
        from distcockpit.view.page.html import html
    named = dict(zip(_names(tuple(trees)), trees.values(), strict=True))
    with progress("report", len(INSTRUMENTS) * len(trees)) as step:
        text = html(content(named, step))
    output.write_text(text, encoding="utf-8")
    click.echo(f"{plain(output)}")


def _newest(path: str) -> str:
    """The newest run in a folder of runs; any other path as it is."""
    roots = [] if os.path.exists(os.path.join(path, "zarr.json")) else list(Path(path).glob("*/zarr.json"))
    return str(max(roots, key=lambda root: root.stat().st_mtime).parent) if roots else path


def _wait_for(run: str, storage_options: dict[str, Any] | None, refresh: float) -> str:
    """Return where the run is once there is one; what else is wrong with it is raised at once."""
    is_told = False
    while True:
        there = run if "://" in run else _newest(run)
        try:
            commit(there, storage_options)
            return there
        except FileNotFoundError:
            if not is_told:
                click.echo(f"{plain(run)}: waiting for a run to start here (press Ctrl-C to stop)", err=True)
            is_told = True
            time.sleep(refresh)


def _watch_here(run: str, storage_options: dict[str, Any] | None, refresh: float) -> None:
    """Redraw whenever rows are committed."""
    out = console()
    name = next(iter(_names((run,))))
    tree = look_at(run, storage_options)
    seen, shown = None, terminal.view(tree, facts(tree), name, out.height)
    with LiveView(shown, console=out, auto_refresh=False, screen=out.is_terminal, transient=True) as live:
        while True:
            try:
                token = commit(run, storage_options)
                if token != seen:
                    tree = look_at(run, storage_options)
                    seen, shown = token, terminal.view(tree, facts(tree), name, out.height)
                    live.update(shown, refresh=True)
                    if not out.is_terminal:  # a file or a pipe gets one view after another
                        out.print(shown)
            except (OSError, ValueError) as error:  # it is being replaced or unreachable: it may come back
                live.update(terminal.lost(shown, str(error)), refresh=True)
                seen = None
            time.sleep(refresh)


def _names(runs: tuple[str, ...]) -> dict[str, str]:
    """Short names for runs that tell them apart."""
    short = [Path(run if "://" in run else os.path.abspath(run)).name.removesuffix(".zarr") or run for run in runs]
    if len(set(short)) < len(short):
        common = os.path.commonpath([os.path.abspath(run) for run in runs]) if not any("://" in r for r in runs) else ""
        short = [os.path.relpath(os.path.abspath(run), common) if common else run for run in runs]
    if len(set(short)) < len(short):
        refuse(f"compare: {plain(max(runs, key=runs.count))} is given twice.")
    return dict(zip(short, runs, strict=True))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors are one line and exit code 2.

    Args:
        arguments: Used instead of ``sys.argv``.
    """
    try:
        code = cli.main(arguments, prog_name="distcockpit", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        code = 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        way_out = f" Try: {context.command_path} --help" if context else ""
        code = _failed(error.format_message() + way_out)
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:  # the reader of the pipe is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (OSError, ValueError, ImportError) as error:
        code = _failed(str(error))
    except MemoryError as error:
        code = _failed(f"out of memory: {error}")
    sys.exit(code if isinstance(code, int) else 0)


def _failed(message: str) -> int:
    click.echo(f"distcockpit: {plain(message, 1000)}", err=True)
    return 2
