"""The layers hold: who may import what; lint and types."""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest
from paths import ROOT
from waiting import run_program

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
    "losses": {"replay", "gradients"},
    "capture": {"replay", "gradients", "losses"},
    "curvature": {"replay", "losses", "capture"},
    "quantities": {"replay", "store", "gradients", "curvature"},
    "tracking": {"replay", "store", "gradients", "losses", "capture", "curvature", "quantities"},
    "instruments": {"store", "findings"},
    "findings": {"store"},
    "view": {"store", "instruments", "findings"},
}
"""What each folder may import of the others; the table of docs/architecture.md says why."""


FILES_AT_THE_ROOT = {
    "world": {"replay", "whereabouts"},
    "whereabouts": set(),
    "notices": set(),
    "schedules": set(),
    "shards": set(),
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


def test_tests_mirror_the_folders() -> None:
    tests = ROOT / "tests"
    folders = {path.name for path in tests.iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert folders == FOLDERS.keys() | {"pretend"}  # a device, for tests of all folders
    assert not [path for path in tests.glob("*.py") if not path.name.startswith("test_") and path.name != "conftest.py"]
    names = [path.name for path in tests.rglob("test_*.py")]
    assert len(names) == len(set(names))  # which pytest imports by


def test_no_import_runs_in_a_circle() -> None:
    graph = edges()
    del graph["distcockpit"]  # it imports when a name is asked for
    while graph:
        ends = {name for name, imported in graph.items() if not imported & graph.keys()}
        assert ends, graph
        graph = {name: imported for name, imported in graph.items() if name not in ends}


def test_who_imports_which_package() -> None:
    assert who_imports("backpack") == {"curvature/diagonals.py", "curvature/weights.py"}
    join = ("torch.distributed.algorithms", "torch.distributed.algorithms.")
    distributed = {f: [n for n in imports(FILES[f]) if "distributed" in n] for f in who_imports("torch.distributed")}
    assert {f for f, names in distributed.items() if not all(n.startswith(join) for n in names)} == {"world.py"}
    assert distributed.keys() - {"world.py"} == {"tracking/shadow.py"}  # Join's hook
    writing = {f for f, tree in FILES.items() if "zarr" in imports(tree)} | who_imports("numcodecs")
    assert writing == {"store/run_store.py", "store/columns.py", "store/reading.py"}
    assert who_imports("zarr") - writing == {"store/keys.py", "cockpit.py", "run.py"}
    kernels = {f"gradients/kernels/{name}.py" for name in ("numba_loops", "numba_teams", "compiling")}
    assert who_imports("numba") == kernels
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
    "BucketSums LearningRate LocalBatch Loss MeanGSNR Model Needs NormTest OrthoTest OutputActivation "
    "OutputGradientGeometry "
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


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore")  # of Lightning's imports
@pytest.mark.parametrize("module", PUBLIC)
def test_what_users_import_is_there(module: str) -> None:
    there = importlib.import_module(module)
    assert not [name for name in PUBLIC[module].split() if not hasattr(there, name)]


def test_no_two_classes_have_one_name() -> None:
    classes = [node.name for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    twice = {name for name, count in Counter(classes).items() if count > 1}
    assert twice == {"DistCockpitCallback"}  # of Lightning and of transformers


def test_in_tracking_nobody_writes_to_anothers_fields() -> None:
    own = {"self", "computed", "entry"}  # the latter two are made where they are written to
    for file, tree in FILES.items():
        if file.startswith("tracking/"):
            stores = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
            others = {ast.unparse(n) for n in stores if ast.unparse(n.value) not in own}
            assert others <= {"self._ddp_model._join_config"}, file  # torch's


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
    assert not [n for n in imports(ast.parse((ROOT / "tests/helpers/oracle.py").read_text())) if "distcockpit" in n]


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_style(command: list[str]) -> None:
    run_program(sys.executable, "-m", *command, cwd=ROOT)
