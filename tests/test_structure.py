"""The layers hold: who may import what; lint, types, and what the README promises."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from waiting import run_program

from distcockpit import DistCockpit, every, open_run, presets, quantities
from distcockpit.cli import cli
from distcockpit.quantities import Quantity

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "distcockpit"
FILES = {str(p.relative_to(PACKAGE)): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}


def imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def who_imports(prefix: str) -> set[str]:
    return {f for f, tree in FILES.items() if any(n == prefix or n.startswith(f"{prefix}.") for n in imports(tree))}


def test_edges() -> None:
    backpack = who_imports("backpack")
    assert backpack == {"curvature.py"}
    join = ("torch.distributed.algorithms", "torch.distributed.algorithms.")
    distributed = {f: [n for n in imports(FILES[f]) if "distributed" in n] for f in who_imports("torch.distributed")}
    assert {f for f, names in distributed.items() if not all(n.startswith(join) for n in names)} == {"reduce.py"}
    assert distributed.keys() - {"reduce.py"} == {"cockpit.py", "shadow.py"}  # Join's hook
    writing = {f for f, tree in FILES.items() if "zarr" in imports(tree)} | who_imports("numcodecs")
    assert writing == {"store.py", "columns.py", "reading.py"}
    assert who_imports("zarr") - writing == {"keys.py", "cockpit.py", "run.py"}
    assert who_imports("numba") == {"kernels/numba_loops.py"} and who_imports("scipy") == {"hessian.py"}
    viewing = {f for f in FILES if f.startswith(("instruments/", "page/", "findings/"))}
    viewing |= {
        "run.py",
        "rows.py",
        "schema.py",
        "summary.py",
        "console.py",
        "names.py",
        "terminal.py",
        "export.py",
        "cli.py",
    }
    assert viewing <= FILES.keys() and not viewing & who_imports("torch") and len(viewing) > 30
    drawing = {f for name in ("matplotlib", "plotly", "starlette", "uvicorn", "jinja2") for f in who_imports(name)}
    assert {f for f in drawing if not f.startswith(("instruments/", "page/"))} == {"cli.py"}  # within functions
    assert not who_imports("distcockpit.page") - {"cli.py", "page/content.py", "page/html.py", "page/server.py"}
    assert not who_imports("torchvision")
    assert "gradients/walk.py" in FILES and len(FILES) > 25


def test_quantities_neither_communicate_nor_touch_a_model() -> None:
    for file, tree in FILES.items():
        if file.startswith("quantities/"):
            forbidden = ("distcockpit.capture", "distcockpit.reduce", "distcockpit.cockpit", "torch.nn")
            assert not [n for n in imports(tree) if n.startswith(forbidden)], file


def test_the_oracle_shares_no_code_with_the_package() -> None:
    assert not [n for n in imports(ast.parse((ROOT / "tests/oracle.py").read_text())) if "distcockpit" in n]


def test_reading_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; from distcockpit import open_run; import distcockpit.run"
    run_program(sys.executable, "-c", script)


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_style(command: list[str]) -> None:
    run_program(sys.executable, "-m", *command, cwd=ROOT)


def blocks(language: str) -> list[str]:
    found = re.findall(rf"( *)```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


@pytest.mark.filterwarnings("ignore")  # of Lightning's imports
def test_readme_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = blocks("python")
    assert len(python) == 7
    scope: dict[str, object] = {"__name__": "readme"}
    for block in python:
        exec(compile(block, "README.md", "exec"), scope)
    assert (tmp_path / "runs/quick.zarr").is_dir() and (tmp_path / "runs/quick.png").stat().st_size > 20_000
    assert scope["smooth"].sizes == {"step": 4} and scope["pays"].attrs["units"] == "samples"
    assert list(scope["table"]["alpha"]) == pytest.approx(list(scope["run"]["alpha"]["alpha"].values), nan_ok=True)
    assert open_run("runs/long.zarr").attrs["state"] == "closed" and (tmp_path / "checkpoint.pt").exists()
    assert [q.name for q in scope["chosen"]][-2:] == ["hess_trace", "hardest_sample"]
    net, loss_fn, x = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), torch.randn(8, 4)
    chosen = [scope["HardestSample"]()]
    with DistCockpit(net, loss_fn, store="own", quantities=chosen, schedule=every(1)) as cockpit, cockpit.track(0):
        loss_fn(net(x), torch.arange(8) % 3).backward()
    each = torch.nn.functional.cross_entropy(net(x), torch.arange(8) % 3, reduction="none")
    assert open_run("own")["hardest_sample"]["loss"].values == pytest.approx([each.max().item()], rel=1e-6)


def test_the_readme_shows_the_quantity_of_the_example() -> None:
    example = (ROOT / "examples/custom_quantity.py").read_text()
    shown = example[example.index("@dataclass") : example.index("def main")].strip()
    assert shown in (ROOT / "README.md").read_text()
    assert len(shown.splitlines()) <= 22


def test_the_readme_table_holds_every_quantity() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    classes = {n for n, kind in vars(quantities).items() if isinstance(kind, type) and issubclass(kind, Quantity)}
    assert sorted(named) == sorted(classes - {"Quantity"}) and len(named) > 30


def test_the_page_for_people_from_cockpit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/from_cockpit.md").read_text()
    (ours,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(ours, "from_cockpit.md", "exec"), {"__name__": "page"})
    assert set(open_run("runs/run.zarr").children) == {*(q.name for q in presets.full()), "learning_rate", "log"}


def test_ci_runs_the_command_of_the_readme() -> None:
    try_it, tests, gpt2, look = (block.strip() for block in blocks("sh"))
    assert tests in (ROOT / ".ci/run").read_text()
    assert "examples/gpt2.py" in gpt2  # which test_examples runs
    assert "examples/digits.py" in try_it and "distcockpit plot" in try_it
    for line in [*look.splitlines(), *try_it.split("&& ")[3:]]:
        program, command, *arguments = line.split("#")[0].split()
        assert program.endswith("distcockpit")
        cli.commands[command].make_context(command, arguments)  # the options are there
    paths = re.findall(r"(?:examples|docs|launch|distcockpit)/[\w/.]+", (ROOT / "README.md").read_text())
    assert paths and all((ROOT / path).exists() for path in paths)


def test_every_test_that_the_page_on_reliability_names_is_there() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    there = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    named = re.findall(r"`(?:tests/)?(?:(test_\w+\.py))?(?:::)?(test_\w+|\.\.\._\w+)?`", page)
    assert len([name for _, name in named if name]) > 25
    for file, name in named:
        assert not file or file in there, file
        if name:
            text = there[file] if file else "".join(there.values())
            assert re.search(rf"def {name}\(|def \w*{name.removeprefix('...')}\(", text), name
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 5][2:]
    faults = [row for row in rows if not row.startswith("| **")]
    assert len(faults) > 20 and all("`" in row.split("|")[4] for row in faults)
