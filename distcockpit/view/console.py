"""Shared by all commands: the terminal, progress bars, and argument checks."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distcockpit.store.names import plain


def console() -> Console:
    """A Rich console without markup and highlighting, because the output comes from untrusted stores."""
    columns = os.environ.get("COLUMNS", "")
    wide = None if sys.stdout.isatty() else int(columns) if columns.isdecimal() and int(columns) else 100
    return Console(markup=False, highlight=False, emoji=False, width=wide)


@contextmanager
def bar(what: str) -> Generator[tuple[Progress, Any], None, None]:
    """A progress bar on a terminal; a no-op elsewhere."""
    console = Console(stderr=True, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield shown, shown.add_task(what, total=None)


@contextmanager
def progress(what: str, total: int) -> Generator[Callable[[str], None], None, None]:
    """A progress bar that shows the name of each part as it begins."""
    with bar(what) as (shown, task):
        shown.update(task, total=total)
        yield lambda name: shown.update(task, advance=1, description=f"{what} {plain(name, 30)}")


@contextmanager
def needs(extra: str) -> Generator[None, None, None]:
    """Turn a missing optional package into an error that says how to install it.

    Raises:
        ClickException: If a package is missing.
    """
    try:
        yield
    except ImportError as error:
        raise click.ClickException(f"{error}. Install what this needs with: pip install '{extra}'") from error


needs_view = functools.partial(needs, "distcockpit[view]")


def check_suffix(output: Path, kinds: list[str]) -> None:
    """Check that a file's suffix matches what is written to it."""
    if output.suffix.lower() not in kinds:
        refuse(f"--output {str(output)!r}: must end in {' or '.join(kinds)}.")


def check_place(output: Path, *runs: str) -> None:
    """Check that no output goes into a run."""
    for run in runs:
        if "://" not in run and output.resolve().is_relative_to(Path(run).resolve()):
            refuse(
                f"--output {str(output)!r}: is inside the run {run!r}, where nothing is written. Choose another path."
            )
    output.parent.mkdir(parents=True, exist_ok=True)  # fail before doing the work


def refuse(problem: str) -> NoReturn:
    """Reject what the user typed.

    Raises:
        ClickException: Always.
    """
    raise click.ClickException(problem)
