"""The layers hold: who may import what; lint, types, and what the README promises."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from collections import Counter
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


READING = {"store", "instruments", "findings", "view"}
"""Folders that need no torch."""

FOLDERS = {
    "replay": set(),
    "store": set(),
    "gradients": {"replay"},
    "capture": {"replay", "gradients"},
    "curvature": {"replay", "capture"},
    "quantities": {"store", "gradients", "curvature"},
    "tracking": {"store", "gradients", "capture", "curvature", "quantities"},
    "instruments": {"store"},
    "findings": {"store"},
    "view": {"store", "instruments", "findings"},
}
"""What each folder may import of the others; the table of docs/architecture.md says why."""

FILES_AT_THE_ROOT = {
    "world": set(),
    "schedules": set(),
    "run": {"store"},
    "sinks": {"store"},
    "presets": {"quantities", "schedules"},
}
"""What folders may import of the root, and what that imports itself."""


def modules() -> dict[str, Path]:
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def edges() -> dict[str, set[str]]:
    """The modules that each imports when it is imported."""
    every = modules()
    return {
        name: {
            full if full in every else node.module
            for node in ast.walk(FILES[str(path.relative_to(PACKAGE))])
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "distcockpit"
            for full in (f"{node.module}.{alias.name}" for alias in node.names)
        }
        - {name}
        for name, path in every.items()
    }


def place(module: str) -> str:
    """The folder, or the file at the root."""
    return (module.split(".") + [""])[1]


def test_folders_import_only_what_they_may() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == FOLDERS.keys()
    root = FILES_AT_THE_ROOT.keys()
    for name, imported in edges().items():
        here, there = place(name), {place(each) for each in imported} - {place(name)}
        if here in FOLDERS:
            assert there - root <= FOLDERS[here], name
            reached = set().union(*(FILES_AT_THE_ROOT[each] for each in there & root))
            assert reached - root <= FOLDERS[here], name
        elif here in root:
            assert there <= FILES_AT_THE_ROOT[here], name
    for folder, allowed in FOLDERS.items():
        text = (PACKAGE / folder / "__init__.py").read_text()
        assert all(other in text.split('"""')[1] for other in allowed), folder


def test_no_import_runs_in_a_circle() -> None:
    graph = edges()
    del graph["distcockpit"]  # it imports when a name is asked for
    while graph:
        ends = {name for name, imported in graph.items() if not imported & graph.keys()}
        assert ends, graph
        graph = {name: imported for name, imported in graph.items() if name not in ends}


def test_who_imports_which_package() -> None:
    assert who_imports("backpack") == {"curvature/diagonals.py"}
    join = ("torch.distributed.algorithms", "torch.distributed.algorithms.")
    distributed = {f: [n for n in imports(FILES[f]) if "distributed" in n] for f in who_imports("torch.distributed")}
    assert {f for f, names in distributed.items() if not all(n.startswith(join) for n in names)} == {"world.py"}
    assert distributed.keys() - {"world.py"} == {"cockpit.py", "tracking/join.py"}  # Join's hook
    writing = {f for f, tree in FILES.items() if "zarr" in imports(tree)} | who_imports("numcodecs")
    assert writing == {"store/run_store.py", "store/columns.py", "store/reading.py"}
    assert who_imports("zarr") - writing == {"store/keys.py", "cockpit.py", "run.py"}
    assert who_imports("numba") == {"gradients/kernels/numba_loops.py"}
    assert who_imports("scipy") == {"curvature/lanczos.py"}
    without_torch = {f for f in FILES if f.split("/")[0] in READING} | {"run.py", "cli.py", "schedules.py"}
    assert not without_torch & who_imports("torch") and len(without_torch) > 40
    drawing = {f for name in ("matplotlib", "plotly", "starlette", "uvicorn", "jinja2") for f in who_imports(name)}
    assert {f for f in drawing if not f.startswith(("instruments/", "view/page/"))} == {"cli.py"}  # within functions
    assert not who_imports("torchvision")


PUBLIC = {
    "distcockpit": "DistCockpit StoreOptions every logspaced open_run presets quantities",
    "distcockpit.quantities": "CABS Alpha CompressionError Distance EarlyStopping Field GradAbsMax GradHist1d "
    "GradHist2d GradNorm GradientActivation GradientGeometry GradientNoiseScale Group HessMaxEV HessTrace InnerTest "
    "LearningRate LocalBatch Loss MeanGSNR Model Needs NormTest OrthoTest OutputActivation OutputGradientGeometry "
    "OutputNorm ParamAbsMax ParameterCondition ParameterNorm Parameters Quantity RankDisagreement RankHealth "
    "ReplicaDrift Shard Statistic TICDiag TICTrace Time Update UpdateGeometry UpdateSize",
    "distcockpit.presets": "economy business full layers",
    "distcockpit.schedules": "every logspaced",
    "distcockpit.run": "open_run verify line_aggregation range_aggregation exponential_smoothing noise_scale "
    "to_dataframe",
    "distcockpit.findings": "RULES Checked Finding check",
    "distcockpit.instruments": "INSTRUMENTS Instrument Place draw panel panels plot_run alpha grad_norm losses",
    "distcockpit.sinks": "Histogram Sink TensorBoard WandB",
    "distcockpit.lightning": "DistCockpitCallback",
    "distcockpit.transformers": "DistCockpitCallback",
    "distcockpit.cli": "cli main",
}


@pytest.mark.filterwarnings("ignore")  # of Lightning's imports
@pytest.mark.parametrize("module", PUBLIC)
def test_what_users_import_is_there(module: str) -> None:
    there = importlib.import_module(module)
    assert not [name for name in PUBLIC[module].split() if not hasattr(there, name)]


def test_no_two_classes_have_one_name() -> None:
    classes = [node.name for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    twice = {name for name, count in Counter(classes).items() if count > 1}
    assert twice == {"DistCockpitCallback"}  # of Lightning and of transformers


def test_quantities_neither_communicate_nor_touch_a_model() -> None:
    for file, tree in FILES.items():
        if file.startswith("quantities/"):
            assert not [n for n in imports(tree) if n.startswith(("distcockpit.world", "torch.nn"))], file


def test_the_page_on_the_architecture_knows_every_file() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for file, tree in FILES.items():
        folder, _, name = file.rpartition("/")
        if name == "__init__.py" or folder in {"quantities", "instruments"}:
            continue  # one file each
        first = (ast.get_docstring(tree) or "").splitlines()[0]
        assert f"| `{file}` | {first} |" in page, f"docs/architecture.md lacks the first line of {file}"


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
