"""What README and docs promise."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import architectures
import loops
import objectives
import pytest
import torch
from framework_models import Small, lightning_module, samples
from paths import ROOT
from torch import nn
from waiting import HANG

from distcockpit import DistCockpit, every, open_run, presets, quantities
from distcockpit.cli import cli
from distcockpit.findings import RULES
from distcockpit.quantities import Quantity

# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore")
def test_the_page_with_the_lines_of_each_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three lines each, and they work."""
    import lightning.pytorch as pl
    import transformers
    from accelerate import Accelerator

    page = (Path(__file__).parents[1] / "docs/frameworks.md").read_text()
    blocks = dict(re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", page, re.MULTILINE | re.DOTALL))
    assert list(blocks) == ["PyTorch", "Accelerate", "Lightning", "transformers"]
    rows = samples("classes")
    pairs = torch.utils.data.DataLoader([(row["x"], row["labels"]) for row in rows], batch_size=4)  # type: ignore[arg-type]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        max_steps=3,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    net = nn.Sequential(nn.Linear(6, 3))
    for name, block in blocks.items():
        monkeypatch.chdir(tmp_path)
        assert 2 <= len(re.findall(r"# \+$", block, re.MULTILINE)) <= 3, name
        scope: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "loader": pairs, "model": net, "data": rows}
        scope |= {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "accelerator": Accelerator(cpu=True)}
        if name == "Lightning":
            scope |= {"module": lightning_module("usual")}
            quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            scope["Trainer"] = lambda **given: pl.Trainer(**given, **quiet)  # noqa: B023
        if name == "transformers":
            scope |= {"model": Small("classes"), "Trainer": transformers.Trainer, "arguments": arguments}
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        exec(compile(block, f"{name} in frameworks.md", "exec"), scope)
        tree = open_run("runs/run.zarr")
        assert tree["alpha"].sizes["step"] >= 1 and tree.attrs["state"] == "closed", name


def test_the_page_on_loops_lists_them() -> None:
    """Made by `python tests/helpers/loops.py`."""
    assert loops.table() in (ROOT / "docs/loops.md").read_text()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="attention takes a slower route there, see architectures.py")
def test_the_page_on_models_lists_them() -> None:
    """Made by `python tests/helpers/architectures.py`."""
    assert architectures.table() in (ROOT / "docs/models.md").read_text()


def test_the_page_on_losses_lists_them() -> None:
    page = Path(__file__).parents[1] / "docs" / "losses.md"
    assert page.read_text().endswith(objectives.table())


READ_IN_ORDER = [
    "README.md",
    *(f"docs/{name}.md" for name in ("quantities", "sinks", "looking", "resuming", "own_quantity")),
]


def blocks(language: str, *pages: str) -> list[str]:
    found = [re.findall(rf"( *)```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) for page in pages]
    return [textwrap.dedent(text) for each in found for _, text in each]


@pytest.mark.filterwarnings("ignore")  # of Lightning's imports
def test_the_code_of_readme_and_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = blocks("python", *READ_IN_ORDER)
    assert len(python) == 7
    scope: dict[str, object] = {"__name__": "readme"}
    for block in python:
        exec(compile(block, "a page", "exec"), scope)
    assert len(list(tmp_path.glob("runs/20*.zarr"))) == 1 and (tmp_path / "runs/quick.png").stat().st_size > 20_000
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


def test_the_page_on_your_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,), (shown,) = blocks("python", "docs/own_model.md"), blocks("text", "docs/own_model.md")
    exec(compile(code, "own_model.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith(shown)
    assert len(list(tmp_path.glob("runs/20*.zarr"))) == 1


def test_a_page_shows_the_quantity_of_the_example() -> None:
    example = (ROOT / "examples/custom_quantity.py").read_text()
    shown = example[example.index("@dataclass") : example.index("def main")].strip()
    assert shown in (ROOT / "docs/own_quantity.md").read_text()
    assert len(shown.splitlines()) <= 22


def test_the_table_holds_every_quantity() -> None:
    rows = [line for line in (ROOT / "docs/quantities.md").read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    classes = {n for n, kind in vars(quantities).items() if isinstance(kind, type) and issubclass(kind, Quantity)}
    assert sorted(named) == sorted(classes - {"Quantity"}) and len(named) > 30


@pytest.mark.smoke
def test_the_page_for_people_from_cockpit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/from_cockpit.md").read_text()
    (ours,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(ours, "from_cockpit.md", "exec"), {"__name__": "page"})
    assert set(open_run("runs/run.zarr").children) == {*(q.name for q in presets.full()), "learning_rate", "log"}


def test_ci_runs_the_command_of_the_readme() -> None:
    try_it, tests, look = (block.strip() for block in blocks("sh", "README.md"))
    assert tests in (ROOT / ".ci/run").read_text()
    assert "examples/digits.py" in try_it and "distcockpit plot" in try_it
    (more,) = blocks("sh", "docs/looking.md")
    for line in [*look.splitlines(), *more.strip().splitlines(), *try_it.split("&& ")[3:]]:
        program, command, *arguments = line.split("#")[0].split()
        assert program.endswith("distcockpit")
        cli.commands[command].make_context(command, arguments)  # the options are there
    paths = re.findall(r"(?:examples|docs|launch|distcockpit)/[\w/.]+", (ROOT / "README.md").read_text())
    assert paths and all((ROOT / path).exists() for path in paths)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1200


def check_three_bugs(folder: Path) -> None:
    """What examples/three_bugs.py said and drew: the findings that its page tells of, and none in the healthy run."""
    said = (folder / "three_bugs.txt").read_text()
    parts = dict(re.findall(r"^(\w+): ?(.*(?:\n  .*)*)", said, re.MULTILINE))
    # A rank may be slow where other work is on the machine; nothing else depends on that.
    healthy = [line for line in parts["healthy"].splitlines() if line and not re.search(r"rank \d is slow", line)]
    assert healthy in ([], ["nothing looks wrong"])
    page = (ROOT / "docs/three_bugs.md").read_text()
    for bug, words in {
        "learning_rate": [
            "wrong: NaN or infinity from step",
            "wrong: the loss is not finite from step",
            "wrong: the loss jumps",
            "look: steps overshoot: α is above 0.5",
        ],
        "one_rank": ["wrong: rank 2 differs: its loss"],
        "vanishing": ["look: the loss does not fall", "wrong: gradients vanish towards the input"],
    }.items():
        for found in words:
            assert found in parts[bug] and found in page
        assert (folder / f"bug_{bug}.png").stat().st_size > 10_000
        assert f"](bug_{bug}.png)" in page and (ROOT / f"docs/bug_{bug}.png").exists()


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Its gallery trains runs and draws them; a link inside of it that leads nowhere is a warning.

    Among these runs are those of the page on three bugs.
    """
    source = tmp_path / "repository"
    shutil.copytree(ROOT / "docs", source / "docs", ignore=shutil.ignore_patterns("_runs", "gallery", "gallery.rst"))
    shutil.copytree(ROOT / "examples", source / "examples")
    shutil.copy(ROOT / "CHANGELOG.md", source)
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(source / "docs"), str(tmp_path / "site")]
    done = subprocess.run(build, capture_output=True, text=True, timeout=HANG * 5)
    assert done.returncode == 0, done.stderr
    check_three_bugs(source / "docs" / "_runs")
    pages = {path.stem: path.read_text() for path in (tmp_path / "site" / "gallery").glob("*.html")}
    named = {n for n, kind in vars(quantities).items() if isinstance(kind, type) and issubclass(kind, Quantity)}
    assert set(pages) == named - {"Quantity"}
    assert sum("<img" in page for page in pages.values()) > 25
    findings = (tmp_path / "site" / "findings.html").read_text()
    for rule in RULES:
        assert f"{rule.name.capitalize()}<" in findings
        assert {"Cause", "Fix"} <= set(re.findall(r"^(\w+): ", inspect.getdoc(rule.apply) or "", re.MULTILINE)), rule
    assert findings.count("<img") >= 5


def test_every_test_that_the_page_on_reliability_names_is_there() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    tests = ROOT / "tests"
    there = {str(path.relative_to(tests)): path.read_text() for path in tests.rglob("test_*.py")}
    named = re.findall(r"`(?:tests/)?(?:((?:\w+/)?test_\w+\.py))?(?:::)?(test_\w+|\.\.\._\w+)?`", page)
    assert len([name for _, name in named if name]) > 25
    for file, name in named:
        assert not file or file in there, file
        if name:
            text = there[file] if file else "".join(there.values())
            assert re.search(rf"def {name}\(|def \w*{name.removeprefix('...')}\(", text), name
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 5][2:]
    faults = [row for row in rows if not row.startswith("| **")]
    assert len(faults) > 20 and all("`" in row.split("|")[4] for row in faults)
