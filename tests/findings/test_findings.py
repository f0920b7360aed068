"""Findings: each rule fires on a run that has its fault, and is quiet on others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from written import Written, model

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.findings import RULES, Finding, check
from distcockpit.findings.steps import count
from distcockpit.instruments import INSTRUMENTS

N, R = 60, 4


FALLING = np.linspace(2.0, 0.5, N)


QUANTITIES = [
    q.Alpha(),
    q.GradNorm(),
    q.RankHealth(),
    q.RankDisagreement(),
    q.ReplicaDrift(),
    q.Loss(),
    q.GradientNoiseScale(),
]


def healthy() -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(0)
    losses = FALLING[:, None] * random.uniform(0.8, 1.2, (N, R))
    return {
        "alpha": {"alpha": random.normal(-0.1, 0.3, N), "f_start": FALLING},
        "grad_norm": {"grad_norm": random.uniform(0.5, 1.5, (N, 6))},
        "rank_disagreement": {"loss": losses, "grad_norm": random.uniform(0.7, 1.4, (N, R)), "cosine": 0.7},
        "loss": {"loss": FALLING},
        "gradient_noise_scale": {"noise": random.gamma(4, 30, N), "signal": random.gamma(4, 0.25, N)},
    }


def found(tmp_path: Path, **changes: dict[str, Any]) -> list[Finding]:
    rows = healthy()
    for group, fields in changes.items():
        rows.setdefault(group, {}).update(fields)
    return check(open_run(Written(tmp_path / "run", QUANTITIES).rows(N, **rows).close())).findings


def one(findings: list[Finding], rule: str) -> Finding:
    (finding,) = [f for f in findings if f.rule == rule]
    return finding


def test_a_healthy_run_has_none(tmp_path: Path) -> None:
    assert found(tmp_path) == []


def test_steps_that_go_too_far(tmp_path: Path) -> None:
    alpha = np.where(np.arange(N) % 2, 0.8, 0.6)
    stalls = {"loss": np.concatenate([FALLING[: N // 2], np.full(N - N // 2, FALLING[N // 2])])}
    finding = one(found(tmp_path, alpha={"alpha": alpha}, loss=stalls), "effective step size far from 0")
    assert finding.severity == "look" and "α is above 0.5 in 100% of the run" in finding.title
    assert (
        "the median over the 60 rows with a fit (of 60 in all) is 0.7" in finding.words
        and finding.picture == "alpha"
        and "2102.06604" in finding.url
    )


def test_steps_that_go_far_while_the_loss_falls_are_well(tmp_path: Path) -> None:
    assert found(tmp_path, alpha={"alpha": np.where(np.arange(N) % 2, 0.8, 0.6)}) == []


@pytest.mark.parametrize(
    "when, severity",
    [(slice(1, 4), "look"), (slice(40, 43), "look"), (slice(1, 12), "wrong"), (slice(40, 50), "wrong")],
)
def test_a_loss_that_jumps(tmp_path: Path, when: slice, severity: str) -> None:
    """A few rows may be bad batches; more than half of a window are none."""
    loss = FALLING.copy()
    loss[when] = 9.0
    finding = one(found(tmp_path, loss={"loss": loss}), "a loss that jumps or does not fall")
    assert finding.severity == severity and "the loss jumps to 9, from" in finding.title
    assert f"At {when.stop - when.start} of {N} tracked steps" in finding.words


def test_one_row_that_is_high_is_chance(tmp_path: Path) -> None:
    loss = FALLING.copy()
    loss[40] = 9.0
    assert found(tmp_path, loss={"loss": loss}) == []


def test_a_loss_that_falls_fast_at_first_does_not_jump(tmp_path: Path) -> None:
    loss = np.concatenate([[2.3, 1.6, 0.9], np.full(N - 3, 0.2)])
    assert found(tmp_path, loss={"loss": loss}) == []


def test_a_loss_that_falls_only_at_once(tmp_path: Path) -> None:
    """An output bias is learned, and nothing more; a run that learned much in three rows is well."""
    guessing = np.r_[2.36, 2.31, np.full(N - 2, 2.30)]
    finding = one(found(tmp_path / "a", loss={"loss": guessing}), "a loss that jumps or does not fall")
    assert finding.title == "the loss does not fall: 2.3 at the start, 2.3 now"
    assert found(tmp_path / "b", loss={"loss": np.r_[2.3, np.full(N - 1, 0.9)]}) == []


def test_numbers_of_samples_have_no_powers_of_ten() -> None:
    assert [count(x) for x in (1083.7, 12345.0, 99.94, 0.1234)] == ["1,080", "12,300", "99.9", "0.123"]


def test_a_run_without_rows_is_not_well(tmp_path: Path) -> None:
    findings = check(open_run(Written(tmp_path / "run", [q.Loss(), q.NormTest()], model(ranks=1)).close())).findings
    assert [f.title for f in findings] == ["nothing was tracked"] and "cockpit.track(step)" in findings[0].words


def test_quantities_without_a_number_are_named_with_the_reason(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", schedule=every(1)) as cockpit:
        for step in range(3):
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(torch.randn(8, 4)), torch.arange(8) % 2).backward()
            optimizer.step()
    finding = one(check(open_run(tmp_path / "run")).findings, "quantities without a number")
    assert finding.severity == "look" and re.fullmatch(r"\d of 14 quantities have no number", finding.title)
    assert (
        "alpha" in finding.words
        and "loss" not in finding.words.split(". ")[0]
        and "BatchNorm1d" in finding.words
        and "track_batchnorm=True" in finding.words
    )


def test_steps_around_the_minimum_are_well(tmp_path: Path) -> None:
    """A third of the run somewhat too far, and the typical step just right."""
    assert found(tmp_path, alpha={"alpha": np.where(np.arange(N) < 22, 0.5, 0.0)}) == []


def test_steps_uphill(tmp_path: Path) -> None:
    finding = one(found(tmp_path, alpha={"alpha": -3.0}), "effective step size far from 0")
    assert finding.severity == "wrong" and "steps go uphill" in finding.title


def test_infinite_steps_are_no_steps(tmp_path: Path) -> None:
    assert found(tmp_path, alpha={"alpha": np.where(np.arange(N) % 2, np.inf, -np.inf)}) == []


def test_steps_that_are_too_short(tmp_path: Path) -> None:
    finding = one(found(tmp_path, alpha={"alpha": -0.95}), "effective step size far from 0")
    assert finding.severity == "look" and "much too short" in finding.title


def test_rows_without_a_fit_do_not_count(tmp_path: Path) -> None:
    """-1 is Cockpit's sign of a concave fit, not a step that is too short."""
    assert found(tmp_path, alpha={"alpha": -1.0, "status": 1}) == []


@pytest.mark.parametrize("ratio, word", [(1e-5, "vanish"), (1e5, "explode")])
def test_gradients_by_depth(tmp_path: Path, ratio: float, word: str) -> None:
    sizes = np.repeat([ratio, np.sqrt(ratio), 1.0], 2)
    finding = one(
        found(tmp_path, grad_norm={"grad_norm": np.tile(sizes, (N, 1))}), "gradients that vanish or explode with depth"
    )
    assert finding.severity == "wrong" and f"gradients {word} towards the input" in finding.title
    assert "0.weight" in finding.words and "4.weight" in finding.words


def test_one_small_layer_is_no_trend(tmp_path: Path) -> None:
    sizes = np.repeat([1.0, 1e-5, 1.0], 2)
    assert found(tmp_path, grad_norm={"grad_norm": np.tile(sizes, (N, 1))}) == []


def test_parameters_without_gradient(tmp_path: Path) -> None:
    norm = healthy()["grad_norm"]["grad_norm"]
    norm[:, 3] = 0
    finding = one(found(tmp_path, grad_norm={"grad_norm": norm}), "parameters without a gradient")
    assert "2.bias" in finding.words and "1 of 6 parameters" in finding.title


@pytest.mark.parametrize(
    "field, factor, text",
    [("loss", 3.0, "its loss is"), ("grad_norm", 8.0, "its gradient norm is"), ("loss", 0.2, "its loss is")],
)
def test_a_rank_that_differs(tmp_path: Path, field: str, factor: float, text: str) -> None:
    values = healthy()["rank_disagreement"][field].copy()
    values[:, 2] *= factor
    finding = one(found(tmp_path, rank_disagreement={field: values}), "a rank that differs")
    assert finding.severity == "wrong" and finding.title.startswith(f"rank 2 differs: {text}")


def test_losses_below_zero_are_not_compared_by_ratio(tmp_path: Path) -> None:
    values = -healthy()["rank_disagreement"]["loss"]
    values[:, 2] *= 3
    assert found(tmp_path, rank_disagreement={"loss": values}) == []


def test_two_ranks(tmp_path: Path) -> None:
    norm = np.random.default_rng(0).uniform(0.9, 1.1, (N, 2)) * [1, 5]
    written = Written(tmp_path / "run", [q.RankDisagreement()], model(ranks=2))
    findings = check(open_run(written.rows(N, rank_disagreement={"grad_norm": norm}).close())).findings
    assert len(findings) == 1 and findings[0].title.startswith("rank 1 differs: its gradient norm is")
    assert "With two ranks, it may just as well be the other one" in findings[0].words


def test_many_ranks_take_no_longer_than_they_should(tmp_path: Path) -> None:
    """What is computed grows with the number of ranks, not with its square: 600 of them are nothing."""
    written = Written(tmp_path / "run", [q.RankDisagreement(), q.RankHealth()], model(ranks=600))
    values = np.random.default_rng(0).uniform(0.9, 1.1, (N, 600))
    values[:, 411] *= 4
    findings = check(open_run(written.rows(N, rank_disagreement={"loss": values}).close())).findings
    assert [f.title for f in findings] == [one(findings, "a rank that differs").title] and "rank 411" in findings[
        0
    ].title


def test_a_rank_that_differs_once_is_chance(tmp_path: Path) -> None:
    values = healthy()["rank_disagreement"]["loss"].copy()
    values[30, 2] *= 50
    assert found(tmp_path, rank_disagreement={"loss": values}) == []


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    bad, first = np.zeros((N, R), dtype=int), np.zeros((N, R), dtype=int)
    bad[23:, 1], first[23:, 1] = 4, 2
    rows = {"nonfinite_gradients": bad, "first_nonfinite_output": first}
    finding = one(found(tmp_path, rank_health=rows), "numbers that are not finite")
    assert finding.severity == "wrong" and finding.title == "NaN or infinity from step 23 on rank 1"
    assert "the first layer with such an output is 2" in finding.words and "37 of 60" in finding.words


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    loss = FALLING.copy()
    loss[50:] = np.nan
    finding = one(found(tmp_path, loss={"loss": loss}), "losses that are not finite")
    assert "from step 50" in finding.title and finding.severity == "wrong"


def test_numbers_that_were_not_finite_once(tmp_path: Path) -> None:
    """Loss scales begin too large, by design."""
    bad, loss = np.zeros((N, R), dtype=int), FALLING.copy()
    bad[2, 1], loss[2] = 4, np.inf
    findings = found(tmp_path, rank_health={"nonfinite_gradients": bad}, loss={"loss": loss})
    finding = one(findings, "numbers that are not finite")
    assert finding.severity == "look" and finding.title == "NaN or infinity at step 2 on rank 1"
    assert "The last such step is 2, and the run went on" in finding.words
    assert one(findings, "losses that are not finite").severity == "look"


def test_a_loss_that_does_not_fall(tmp_path: Path) -> None:
    loss = 2.3 + 0.01 * np.random.default_rng(0).normal(size=N)
    finding = one(found(tmp_path, loss={"loss": loss}), "a loss that jumps or does not fall")
    assert finding.severity == "look" and "the loss does not fall" in finding.title


def test_replicas_that_drift(tmp_path: Path) -> None:
    drift = np.where(np.arange(N) >= 7, 2, 0)
    finding = one(found(tmp_path, replica_drift={"replica_drift": drift}), "replicas that drift apart")
    assert "from step 7" in finding.title and "53 of 60" in finding.words


def test_a_slow_rank(tmp_path: Path) -> None:
    times = np.full((N, R), 0.1)
    times[:, 3], times[:12, 1] = 0.4, np.nan
    finding = one(
        found(tmp_path, rank_health={"forward_seconds": times, "outside_seconds": 0.01}), "a rank that is slow"
    )
    assert finding.severity == "look" and finding.title.startswith("rank 3 is slow")


@pytest.mark.parametrize("parts", [{"noise": 0.0}, {"noise": -5.0}, {"signal": 0.0}, {"noise": np.inf}])
def test_noise_scales_that_are_none(tmp_path: Path, parts: dict[str, float]) -> None:
    assert found(tmp_path, gradient_noise_scale={"noise": 100.0, "signal": 1.0} | parts) == []


@pytest.mark.parametrize(
    "noise, text, words", [(1e5, "times the batch size", "larger batch"), (0.1, "of the batch size", "smaller batch")]
)
def test_noise_scale(tmp_path: Path, noise: float, text: str, words: str) -> None:
    parts = {"noise": noise, "signal": 1.0}
    finding = one(found(tmp_path, gradient_noise_scale=parts), "noise scale far from the batch size")
    assert text in finding.title and words in finding.words


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    checked = check(open_run(Written(tmp_path / "run", [q.Alpha()]).rows(20).close()))
    assert set(checked.unchecked) == {rule.name for rule in RULES} - {"effective step size far from 0"}
    assert checked.unchecked["gradients that vanish or explode with depth"] == "GradNorm or GradientGeometry"
    nothing = check(open_run(Written(tmp_path / "empty", QUANTITIES).close()))
    assert [f.title for f in nothing.findings] == ["nothing was tracked"] and len(nothing.unchecked) == len(RULES)


def test_the_surest_come_first(tmp_path: Path) -> None:
    rows = {"alpha": {"alpha": -0.95}, "replica_drift": {"replica_drift": 1}, "gradient_noise_scale": {"noise": 1e6}}
    assert [f.severity for f in found(tmp_path, **rows)] == ["wrong", "look", "look"]


def test_every_rule_names_its_picture_and_its_source() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) >= 9
    for rule in RULES:
        pictures = rule.picture.split()
        assert pictures[0] in INSTRUMENTS
        assert len(rule.source) > 20 and (not rule.url or rule.url.startswith("https://"))


def test_nothing_but_nan_is_no_error(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", QUANTITIES)
    nothing = {name: {f: np.nan for f, one in g.fields.items() if one.fill != 0} for name, g in written.groups.items()}
    rules = {f.rule for f in check(open_run(written.rows(N, **nothing).close())).findings}
    assert rules == {"losses that are not finite"}
