"""The kernels in numba against the reference in torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG, run_program, until

from distcockpit.gradients import kernels
from distcockpit.gradients.kernels import numba_cpu, reference

IMPLEMENTATIONS = [reference, numba_cpu]


RANGES = [(-2.0, 2.0), (-0.37, 0.37), (-1e-6, 1e-6), (0.0, 1.0), (-3.0, -1.0), (-1e30, 1e30)]


def test_numba_is_used_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_cpu, "count_nonfinite", lambda tensor: torch.tensor(17))
    assert kernels.count_nonfinite(torch.ones(1)) == 17


def factors(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(6, 7, generator=generator, dtype=dtype)
    x = torch.randn(6, 9, generator=generator, dtype=dtype).relu()
    delta[0, 0], delta[1, 1], delta[2, 2], x[3, 3] = torch.nan, torch.inf, -torch.inf, 1e30
    return delta, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("range", RANGES)
@pytest.mark.parametrize("bins", [1, 2, 13, 100])
@pytest.mark.parametrize("kernel", IMPLEMENTATIONS)
def test_counts_as_numpy(kernel, bins: int, range: tuple[float, float], dtype: torch.dtype) -> None:
    edges = kernels.bin_edges(*range, bins)
    delta, x = factors(bins, dtype)
    delta, x = delta * range[1], x
    limits = kernels.thresholds(edges, dtype)
    products = delta.unsqueeze(2) * x.unsqueeze(1)
    columns = torch.arange(63).reshape(7, 9) % 4
    counts = kernel.count_outer(delta, x, limits)
    values = products.numpy().astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    np.testing.assert_array_equal(counts[2:-3], np.histogram(finite, bins=edges)[0])
    outside = [np.isneginf(values).sum(), (finite < range[0]).sum()]
    np.testing.assert_array_equal(counts[:2], outside)
    beyond = [(finite > range[1]).sum(), np.isposinf(values).sum(), np.isnan(values).sum()]
    np.testing.assert_array_equal(counts[-3:], beyond)
    assert counts.sum() == values.size and counts[-1] > 0
    np.testing.assert_array_equal(counts, kernel.count_block(products, limits))
    np.testing.assert_array_equal(np.bincount(kernel.slots(products, limits).flatten(), minlength=len(counts)), counts)
    assert kernel.count_nonfinite(products) == (~np.isfinite(values)).sum() > 0
    two = kernel.count_outer_2d(delta, x, limits, columns, 4)
    np.testing.assert_array_equal(two, kernel.count_block_2d(products.flatten(1), limits, columns.flatten(), 4))
    for column in np.arange(4):
        chosen = products[:, columns == column]
        np.testing.assert_array_equal(two[:, column], kernel.count_block(chosen, limits))


@given(
    st.floats(-1e3, 1e3),
    st.floats(1e-6, 1e3),
    st.integers(1, 200),
    st.lists(st.floats(width=32), max_size=50),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_range_and_values(low: float, width: float, bins: int, values: list[float], on_edges: bool) -> None:
    high = low + width
    if not low < high:
        return
    edges = kernels.bin_edges(low, high, bins)
    tensor = torch.tensor([*values, *(edges if on_edges else [])], dtype=torch.float32)
    limits = kernels.thresholds(edges, torch.float32)
    expected = reference.count_block(tensor, limits)
    np.testing.assert_array_equal(expected, numba_cpu.count_block(tensor, limits))
    np.testing.assert_array_equal(reference.slots(tensor, limits), numba_cpu.slots(tensor, limits))
    kept = tensor.double().numpy()
    kept = kept[np.isfinite(kept)]
    assert expected[2:-3].sum() == ((kept >= low) & (kept <= high)).sum()
    assert expected.sum() == tensor.numel()


@pytest.mark.parametrize("end", [0.1, 0.37, 1e-6, 123.456, 2.0, 1 / 3])
def test_exact_zeros_belong_to_the_bin_that_starts_there(end: float) -> None:
    edges = kernels.bin_edges(-end, end, 100)
    assert edges[50] == 0.0 and edges[0] == -end and edges[-1] == end
    for kernel in IMPLEMENTATIONS:
        counts = kernel.count_block(torch.zeros(10), kernels.thresholds(edges, torch.float32))
        assert counts[2 + 50] == 10


def test_a_bin_counts_beyond_the_precision_of_float32() -> None:
    edges, n = kernels.bin_edges(-1, 1, 2), 4200
    delta, x = torch.zeros(1, n), torch.ones(1, n)  # 17,640,000 zeros > 2^24 = 16,777,216
    for count in (kernels.count_outer(delta, x, edges), kernels.count_block(delta.expand(n, n), edges)):
        assert count[3] == n * n > 2**24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_binned_exactly(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 1001).to(dtype)
    edges = kernels.bin_edges(-1, 1, 10)
    inside = values.double().numpy()
    np.testing.assert_array_equal(kernels.count_block(values, edges)[2:-3], np.histogram(inside, bins=edges)[0])


def spread(generator: torch.Generator, shape: tuple[int, int], kind: str, exponent: float, dtype: torch.dtype):
    values = torch.randn(shape, generator=generator, dtype=dtype)
    if kind in ("positive", "sparse"):
        values = values.relu() if kind == "sparse" else values.abs()
    if kind == "few":
        values = values.round()
    if kind == "wide":  # from subnormal to large
        values = values.sign() * 10.0 ** (values * 12)
    if kind == "bad":
        values.view(-1)[torch.randperm(values.numel(), generator=generator)[:3]] = torch.tensor(
            [torch.nan, torch.inf, -torch.inf], dtype=dtype
        )
    return values * 10**exponent


KINDS = st.sampled_from(["mixed", "positive", "sparse", "few", "wide", "bad"])


@given(
    st.integers(0, 10**6),
    st.tuples(KINDS, KINDS),
    st.floats(-44, 3),
    st.sampled_from([*RANGES, (-2.0, 1.0), (1.0, 3.0), (-1e-44, 1e-44), (-1e-3, 2.0)]),
    st.sampled_from([1, 2, 7, 100, 101]),
    st.tuples(st.integers(1, 12), st.integers(1, 40)),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=400, deadline=None)
def test_products_are_counted_as_if_formed(seed, kinds, exponent, range, bins, sizes, dtype) -> None:
    """Next to zero, sorted, gone through one by one: whichever way a pair is counted, and whichever side is longer."""
    generator = torch.Generator().manual_seed(seed)
    delta = spread(generator, (6, sizes[0]), kinds[0], exponent, dtype)
    x = spread(generator, (6, sizes[1]), kinds[1], 0.0, dtype)
    limits = kernels.thresholds(kernels.bin_edges(*range, bins), dtype)
    for d, y in ((delta, x), (x, delta)):
        columns = torch.randint(4, (d.shape[1], y.shape[1]), generator=generator).int()
        expected = reference.count_outer(d, y, limits)
        assert expected.sum() == 6 * d.shape[1] * y.shape[1]
        np.testing.assert_array_equal(numba_cpu.count_outer(d, y, limits), expected)
        expected = reference.count_outer_2d(d, y, limits, columns, 4)
        np.testing.assert_array_equal(numba_cpu.count_outer_2d(d, y, limits, columns, 4), expected)


@pytest.mark.parametrize("n", [1, 3, 700])
def test_large_work_is_shared_out(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take parts of the samples, and the counts are the same."""
    delta, x = factors(n, torch.float32)
    delta, x = delta[:5].repeat(n, 1) * 0.3, x[:5].repeat(n, 1)
    limits = kernels.thresholds(kernels.bin_edges(-2, 2, 50), torch.float32)
    columns = torch.arange(63, dtype=torch.int32).reshape(7, 9) % 5
    monkeypatch.setattr(numba_cpu, "PER_THREAD", 16)
    monkeypatch.setattr(numba_cpu, "PER_MEMBER", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    products = (delta.unsqueeze(2) * x.unsqueeze(1)).flatten(1)
    np.testing.assert_array_equal(numba_cpu.count_outer(delta, x, limits), reference.count_outer(delta, x, limits))
    np.testing.assert_array_equal(numba_cpu.count_block(products, limits), reference.count_block(products, limits))
    for kernel_2d in ("count_outer_2d", "count_block_2d"):
        values = (delta, x, limits, columns) if "outer" in kernel_2d else (products, limits, columns.flatten())
        found, expected = (getattr(kernel, kernel_2d)(*values, 5) for kernel in (numba_cpu, reference))
        np.testing.assert_array_equal(found, expected)
    finite = products.nan_to_num(0.5, 2.0, -2.0)
    for rows in (finite, finite[:1], finite[:3], finite[:0]):  # more rows than threads, and fewer
        for others in (rows, rows[0].double() if len(rows) else rows):
            found, expected = (kernel.inner_rows(rows, others) for kernel in (numba_cpu, reference))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
        found, expected = torch.ones(2, 2, rows.shape[1], dtype=torch.float64)
        numba_cpu.add_powers(*found, rows)
        reference.add_powers(*expected, rows)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
        ends = products[0].double().nan_to_num(0.5, 2.0, -2.0), torch.ones(products.shape[1], dtype=torch.float64)
        for call, args in (("squared_distance", (rows, rows.flip(1))), ("inner_rows_with_difference", (rows, *ends))):
            one, other = (getattr(kernel, call)(*args) for kernel in (numba_cpu, reference))
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)
        found, expected = (kernel.signal_to_noise(*expected, 7, 0.1) for kernel in (numba_cpu, reference))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def test_without_openmp_one_thread_does_all() -> None:
    """In a process of its own: what compiled code calls there cannot be changed back."""
    program = """
import torch
from distcockpit.gradients.kernels import numba_cpu, numba_teams
numba_cpu._openmp = lambda: numba_teams.without_openmp()
values = torch.randn(40, 100_000)
torch.testing.assert_close(numba_cpu.inner_rows(values, values), values.double().square().sum(1), rtol=1e-12, atol=0.0)
assert numba_cpu._members(1e12) == 1
"""
    run_program(sys.executable, "-c", program)


def numbers_and_threads(n: int) -> list[tuple[range, int]]:
    """What parts of the work there were, and on which thread; nobody ends a part before a second thread has one."""
    threads: set[int] = set()

    def work(part: slice) -> tuple[range, int]:
        threads.add(threading.get_ident())
        until(lambda: len(threads) > 1 or part == slice(0, n), "a second thread")
        return range(part.start, part.stop), threading.get_ident()

    numba_cpu.COMPILED.add((work.__code__, np.dtype(np.float32)))
    return numba_cpu.in_parts(work, n, numba_cpu.PER_THREAD, np.dtype(np.float32))


def test_the_threads_of_torch_take_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parts = numbers_and_threads(10)
    assert [number for numbers, _ in parts for number in numbers] == list(range(10)) and len(parts) == 3
    assert len({thread for _, thread in parts}) > 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert len(numbers_and_threads(10)) == 1


def test_a_fault_on_another_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(part: slice) -> None:
        raise ZeroDivisionError(f"{part.start}")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    numba_cpu.COMPILED.add((work.__code__, np.dtype(np.float32)))
    with pytest.raises(ZeroDivisionError):
        numba_cpu.in_parts(work, 10, numba_cpu.PER_THREAD, np.dtype(np.float32))


def test_threads_keep_nothing_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of individual gradients would stay until the garbage collector comes."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    values, parts = torch.ones(10), []

    def work(part: slice) -> None:
        parts.append(values[part])

    numba_cpu.COMPILED.add((work.__code__, np.dtype(np.float32)))
    gc.collect()
    gc.disable()
    try:
        numba_cpu.in_parts(work, 10, numba_cpu.PER_THREAD, np.dtype(np.float32))
        assert len(parts) == 2
        left = weakref.ref(work)
        del work
        assert left() is None
    finally:
        gc.enable()


def test_a_forked_process_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's threads are not there in it, and waiting for them would take for ever."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert len(numbers_and_threads(10)) == 3
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert len(pool.apply_async(numbers_and_threads, (10,)).get(HANG)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7), (300, 40)])
def test_sums_in_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=dtype) * 1e3 + 1
    before, exact = values.clone(), values.double()
    other = torch.randn(shape, generator=generator, dtype=dtype)
    for kernel in IMPLEMENTATIONS:
        sums, again, squares = torch.ones(3, shape[1], dtype=torch.float64)
        kernel.add_sums(sums, values)
        kernel.add_powers(again, squares, values)
        for each in (sums, again):
            torch.testing.assert_close(each, 1 + exact.sum(0), rtol=1e-12, atol=1e-9)
        torch.testing.assert_close(squares, 1 + exact.square().sum(0), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(kernel.squared_norm(values), exact.square().sum(), rtol=1e-12, atol=0.0)
        norms = kernel.squared_norms([values, values.sum(), values[:0]])
        expected = torch.stack([exact.square().sum(), values.sum().double().square(), exact.new_zeros(())])
        torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0.0)
        mean, squares = exact.mean(0), exact.square().sum(0)
        found = kernel.signal_to_noise(mean, squares, max(1, len(values)), 0.25)
        ratios = mean.square() / (squares / max(1, len(values)) - mean.square() + 0.25)
        torch.testing.assert_close(found, ratios.sum(), rtol=1e-9, atol=0.0, equal_nan=True)
        expected = (values - other).double().square().sum()  # rounded like a difference that is kept
        torch.testing.assert_close(kernel.squared_distance(values, other), expected, rtol=1e-12, atol=0.0)
        pairs = [values, values[:0], values.double()], [other, other[:0], values]  # also of two types
        expected = torch.stack([(exact * other.double()).sum(), exact.new_zeros(()), exact.square().sum()])
        torch.testing.assert_close(kernel.inner_products(*pairs), expected, rtol=1e-11, atol=1e-8)
        expected = (exact * other.double()).sum(1)
        torch.testing.assert_close(kernel.inner_rows(values, other), expected, rtol=1e-11, atol=1e-8)
        if len(values):
            expected = exact @ other[0].double()
            torch.testing.assert_close(kernel.inner_rows(values, other[0]), expected, rtol=1e-11, atol=1e-8)
            for kind in (torch.float32, torch.float64):  # of the parameters
                start = torch.ones_like(other[0], dtype=kind)
                end = start * 0.1 + 1e-3 * other[0].to(kind)
                found = kernel.inner_rows_with_difference(values, end, start)
                expected = exact @ (end - start).double()
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-8)
    assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_distances_in_any_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of many elements, of which only some are converted at a time."""
    monkeypatch.setattr(reference, "CHUNK", 7)
    start = torch.linspace(-1, 1, 30).view(5, 6).to(dtype)
    end = (start * 1.02).to(dtype).requires_grad_()
    expected = (end.double() - start.double()).square().sum().detach()
    torch.testing.assert_close(kernels.squared_distance(end, start), expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(kernels.squared_distance(end[:, :0], start[:, :0]), expected.new_zeros(()))


@pytest.mark.parametrize("types", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_difference_of_two_types(types: tuple[torch.dtype, torch.dtype]) -> None:
    """As of a model that was converted since; and what has changed its shape is no difference, but an error."""
    end, start = (torch.linspace(low, 2, 30).to(kind) for low, kind in zip((-1.0, 1.0), types, strict=True))
    difference, rows = end.double() - start.double(), torch.linspace(0, 1, 60).view(2, 30)
    torch.testing.assert_close(kernels.squared_distance(end, start), difference.square().sum(), rtol=1e-12, atol=0.0)
    found = kernels.inner_rows_with_difference(rows, end, start)
    torch.testing.assert_close(found, rows.double() @ difference, rtol=1e-12, atol=0.0)
    with pytest.raises(ValueError, match=r"shapes \(30,\) and \(29,\)"):
        kernels.squared_distance(end, start[1:])
    with pytest.raises(ValueError, match=r"shapes \(30,\) and \(29,\)"):
        kernels.inner_rows_with_difference(rows, end, start[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(0, 3, 1), (4, 3, 1), (5, 7, 2), (1, 3, 1300), (600, 400, 1), (40, 5, 1200), (2, 0, 3)]
)
def test_small_elements_by_channel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-3, 4, shape, generator=generator).to(dtype) / 10
    values[values == values.new_tensor(0.3)] = torch.nan  # no magnitude
    for epsilon in (0.0, 0.1):  # 0.1 is not the same number in both types
        expected = ((values <= epsilon) & (values >= -epsilon)).sum((0, 2))
        for kernel in IMPLEMENTATIONS:
            assert torch.equal(kernel.count_small(values, epsilon), expected)


COMPILING = """
import sys, logging
logging.basicConfig(level="INFO", format="%(message)s")
import torch
from distcockpit.gradients import kernels
from distcockpit.gradients.kernels import numba_loops as loops
torch.set_default_device("meta")
torch.set_default_dtype(torch.float64)
kernels.squared_norm(torch.ones(3, device="cpu"))
hits, misses = (sum(each.values()) for each in (loops.count_near.stats.cache_hits, loops.count_near.stats.cache_misses))
print("compiled" if misses else "loaded" if hits else "neither")
"""


def test_one_process_compiles(tmp_path: Path) -> None:
    """Of several that start at once, and says so. A later one neither waits nor compiles, until code changes."""
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILING]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    at_once = [subprocess.Popen(command, **options) for _ in range(3)]
    told = [process.communicate(timeout=HANG) for process in at_once]
    assert sorted(out.strip() for out, _ in told) == ["compiled", "neither", "neither"]
    assert all("compiling kernels, once per machine" in err for out, err in told if "compiled" in out)
    assert sum("kernels compiled in" in err for _, err in told) == 1
    late = run_program(*command, env=environment)
    assert late.stdout.strip() == "neither" and "compiling" not in late.stderr
    for mark in tmp_path.rglob("*.compiled"):  # as if a file were another than the one that was compiled
        mark.unlink()
    assert run_program(*command, env=environment).stdout.strip() == "compiled"  # also what calls it in another file
