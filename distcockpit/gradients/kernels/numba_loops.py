"""Compiled loops over many numbers: they store no products, and do not depend on torch.

Gradients are usually small compared to the range of a histogram, so that everything falls into the one or two slots
next to zero. For a row of products ``d * x_i``, this can be told from the signs and the extremes of ``x`` alone. If a
row spreads over more slots, it is monotone in ``x``: with ``x`` sorted, once per sample, each slot is a range whose end
is found by binary search. Both compare the same rounded products with the same edges as the direct form, so counts are
identical.
"""

from __future__ import annotations

import numba
import numpy as np

CHUNK = 512  # elements that are processed together
WORTH_SEARCHING = 12  # elements per slot above which a binary search is faster than a linear scan
WORTH_SORTING = 2  # pairs per sample from which on sorting its row pays off

_jit = numba.njit(nogil=True, cache=True, error_model="numpy")


# -- slots -------------------------------------------------------------------------------------------------------------


@_jit
def _slot(v, limits, low, per_width):
    """Guess the slot by arithmetic, then correct it by comparison with the edges."""
    n = limits.size
    if v != v:
        return n + 1
    guess = (v - low) * per_width
    k = 2 + int(guess) if 0 <= guess < n - 3 else (1 if guess < 0 else n - 1)
    while k < n and v >= limits[k]:
        k += 1
    while k > 0 and v < limits[k - 1]:
        k -= 1
    return k


@_jit
def _zero(limits):
    """Return the slot of zero, and that of small negative numbers, each with its interval ``[start, end)``."""
    k = 0
    while k < limits.size and limits[k] <= 0:
        k += 1
    start, end = limits[k - 1], limits[k]
    if start < 0 or k < 2:
        return k, k, start, start, end
    return k, k - 1, limits[k - 2], start, end


@_jit
def slots(values, limits, low, per_width, numbers):
    """Write the slots of ``values [D]`` to ``numbers [D]``."""
    _slots(values, limits, low, per_width, _zero(limits), numbers)


@_jit
def _slots(values, limits, low, per_width, near, numbers):
    """Do the same, many elements at a time.

    A bin found by arithmetic is right if the value is farther from its edges than rounding can move it: the rounding of
    the edges, of a difference and of two products. Next to zero and outside of all bins, edges are compared. What is
    left is searched.
    """
    zero, below, start, middle, end = near
    kind, n = limits.dtype.type, limits.size
    none, one, bins, first, last = kind(0), kind(1), kind(n - 3), limits[1], limits[n - 2]
    margin = kind(8 * (np.nextafter(one, kind(2)) - one) * (bins + max(abs(first), abs(last)) * per_width + one))
    least, most = margin, kind(bins - margin)
    missed = np.int32(0)
    for i in range(values.size):
        v = values[i]
        guess = (v - low) * per_width
        inside = (guess > least) & (guess < most)
        guess = guess if inside else none
        k = np.int32(guess)
        rest = guess - kind(k)
        is_sure = inside & (rest > margin) & (rest < one - margin)
        slot = k + 2 if is_sure else -1
        slot = 1 if (v >= limits[0]) & (v < first) else slot
        slot = n - 1 if (v >= last) & (v < np.inf) else slot
        slot = (zero if v >= middle else below) if (v >= start) & (v < end) else slot
        numbers[i] = slot
        missed = np.int32(missed + np.int32(slot < 0))
    if missed:
        for i in range(values.size):
            if numbers[i] < 0:
                numbers[i] = _slot(values[i], limits, low, per_width)


@_jit
def _signs(x, bits, found, magnitudes):
    """Return whether a row is finite, its numbers of negatives and positives, and the extreme magnitudes of each.

    Positive floats are ordered like their bits, read as integers. The minimum and maximum of integers are computed many
    at a time, those of floating-point numbers are not.

    Args:
        x: The row.
        bits: The same memory as integers.
        found: Four integers, used as output.
        magnitudes: The same memory as floating-point numbers: smallest, largest negative, smallest, largest positive.
    """
    n_finite = n_negative = n_positive = np.int32(0)
    for i in range(x.size):
        v = x[i]
        n_finite = np.int32(n_finite + np.int32(abs(v) < np.inf))
        n_negative = np.int32(n_negative + np.int32(v < 0))
        n_positive = np.int32(n_positive + np.int32(v > 0))
    magnitudes[0] = magnitudes[2] = np.inf
    zero, no, all_but_sign = bits.dtype.type(0), found[0], bits.dtype.type(np.iinfo(bits.dtype).max)
    minus_from, minus_to, plus_from, plus_to = no, zero, no, zero
    for i in range(bits.size):
        b = bits[i]
        size = bits.dtype.type(b & all_but_sign)
        minus_from = min(minus_from, size if b < zero and size > zero else no)
        minus_to = max(minus_to, size if b < zero else zero)
        plus_from = min(plus_from, b if b > zero else no)
        plus_to = max(plus_to, b)
    found[0], found[1], found[2], found[3] = minus_from, minus_to, plus_from, plus_to
    signs = (n_negative, magnitudes[0], magnitudes[1], n_positive, magnitudes[2], magnitudes[3])
    return n_finite == x.size, signs


@_jit
def _n_below(d, signs, near):
    """Count the negative products of a pair, if all are next to zero: these share one slot, the others that of zero.

    Args:
        d: The factor, finite.
        signs: Signs of the row, from `_signs`, without the first.
        near: From `_zero`.

    Returns:
        The number, or -1 where the products spread further.
    """
    n_minus, minus_from, minus_to, n_plus, plus_from, plus_to = signs
    zero, below, start, middle, end = near
    n_below, below_from, below_to, above_to = n_minus, minus_from, minus_to, plus_to
    if d < 0:
        n_below, below_from, below_to, above_to = n_plus, plus_from, plus_to, minus_to
    elif d == 0:
        return 0
    size = abs(d)
    if not size * above_to < end:
        return -1
    if n_below and not (-(size * below_to) >= start and (below == zero or -(size * below_from) < middle)):
        return -1
    return n_below


# -- values ------------------------------------------------------------------------------------------------------------


@_jit
def count_block(values, limits, low, per_width, counts):
    """Add the counts of the elements of ``values [D]`` to ``counts``."""
    near, numbers = _zero(limits), np.empty(CHUNK, np.int32)
    zero, below, start, middle, end = near
    for first in range(0, values.size, CHUNK):
        chunk = values[first : first + CHUNK]
        negative = positive = np.int32(0)  # 32 bits, so that 16 elements are compared at once
        for i in range(chunk.size):
            v = chunk[i]
            negative = np.int32(negative + np.int32((v >= start) & (v < middle)))
            positive = np.int32(positive + np.int32((v >= middle) & (v < end)))
        if negative + positive == chunk.size:
            counts[below] += negative
            counts[zero] += positive
        else:
            _slots(chunk, limits, low, per_width, near, numbers)
            for i in range(chunk.size):
                counts[numbers[i]] += 1


@_jit
def count_block_2d(values, limits, low, per_width, columns, counts):
    """Do the same for pairs with ``columns [D]``, for ``values [N, D]``."""
    near, numbers = _zero(limits), np.empty(CHUNK, np.int32)
    for n in range(values.shape[0]):
        for first in range(0, values.shape[1], CHUNK):
            chunk, column = values[n, first : first + CHUNK], columns[first : first + CHUNK]
            _slots(chunk, limits, low, per_width, near, numbers)
            for i in range(chunk.size):
                counts[numbers[i], column[i]] += 1


@_jit
def count_nonfinite(values):
    """Count the elements of ``values [D]`` that are NaN or infinite."""
    total = 0
    for first in range(0, values.size, CHUNK):
        finite = np.int32(0)
        chunk = values[first : first + CHUNK]
        for i in range(chunk.size):
            finite = np.int32(finite + np.int32(abs(chunk[i]) < np.inf))
        total += chunk.size - finite
    return total


@_jit
def add_sums(values, sums):
    """Add ``sum_n values[n]`` to ``sums``."""
    for first in range(0, sums.size, CHUNK):
        part = sums[first : first + CHUNK]  # stays in the L1 cache
        for n in range(values.shape[0]):
            row = values[n, first : first + CHUNK]
            for i in range(part.size):
                part[i] += row[i]


@_jit
def count_small_in_rows(values, limit, counts):
    """Add to ``counts [R]`` how many elements of each row of ``values [R, D]`` have a magnitude up to the limit."""
    for n in range(values.shape[0]):
        for first in range(0, values.shape[1], CHUNK):
            chunk = values[n, first : first + CHUNK]
            small = np.int32(0)
            for i in range(chunk.size):
                small = np.int32(small + np.int32(abs(chunk[i]) <= limit))
            counts[n] += small


@_jit
def count_small_in_columns(values, limit, counts):
    """Add to ``counts [D]`` the number of such small elements in each column of ``values [N, D]``."""
    for n in range(values.shape[0]):
        row = values[n]
        for i in range(row.size):
            counts[i] += np.int64(abs(row[i]) <= limit)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def inner(first, second):
    """Return the inner product of two vectors, in float64."""
    total = np.float64(0.0)
    for i in range(first.size):
        total += np.float64(first[i]) * np.float64(second[i])
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def inner_with_difference(values, after, before):
    """Return the inner product of a vector and a difference, in float64; differences are rounded to their type."""
    total = np.float64(0.0)
    for i in range(values.size):
        total += np.float64(values[i]) * np.float64(after[i] - before[i])
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def squared_distance(first, second):
    """Return the squared length of the difference of two vectors, in float64, likewise."""
    total = np.float64(0.0)
    for i in range(first.size):
        difference = np.float64(first[i] - second[i])
        total += difference * difference
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def signal_to_noise(mean, squares, share, epsilon):
    """Return the sum over elements of the squared mean over the variance, with the share 1/n of each sample."""
    total = np.float64(0.0)
    for i in range(mean.size):
        signal = mean[i] * mean[i]
        total += signal / (squares[i] * share - signal + epsilon)
    return total


@_jit
def inner_rows(values, others, sums):
    """Write inner products of the rows of ``values`` and ``others``, or its only row, to ``sums [N]``."""
    for n in range(values.shape[0]):
        sums[n] = inner(values[n], others[n % others.shape[0]])


@_jit
def add_powers(values, sums, squares):
    """Add ``sum_n values[n]`` to ``sums`` and ``sum_n values[n]^2`` to ``squares``."""
    for first in range(0, sums.size, CHUNK):
        part, part_of_squares = sums[first : first + CHUNK], squares[first : first + CHUNK]
        for n in range(values.shape[0]):
            row = values[n, first : first + CHUNK]
            for i in range(part.size):
                v = np.float64(row[i])
                part[i] += v
                part_of_squares[i] += v * v


# -- products ----------------------------------------------------------------------------------------------------------


@_jit
def count_near(delta, x, bits, limits, counts, rest):
    """Count the pairs (n, o) whose products are all next to zero, and report which are not.

    Args:
        delta: Shape ``[N, O]``.
        x: Shape ``[N, I]``.
        bits: The same memory as integers.
        limits: The thresholds.
        counts: Counts by slot, added to.
        rest: bool ``[N, O]``, output: whether a pair is left.

    Returns:
        int8 ``[N]``: 0 if nothing of a sample is left, 2 if its row is worth sorting, 1 otherwise.
    """
    near = _zero(limits)
    zero, below, _, _, _ = near
    left = np.zeros(x.shape[0], np.int8)
    magnitudes = np.empty(4, x.dtype)
    found = magnitudes.view(bits.dtype)
    for n in range(x.shape[0]):
        finite, signs = _signs(x[n], bits[n], found, magnitudes)
        n_left = 0
        for o in range(delta.shape[1]):
            d = delta[n, o]
            rest[n, o] = True
            n_left += 1
            n_below = _n_below(d, signs, near) if finite and abs(d) < np.inf else -1
            if n_below >= 0:
                rest[n, o] = False
                n_left -= 1
                counts[below] += n_below
                counts[zero] += x.shape[1] - n_below
        if n_left:
            left[n] = 2 if finite and n_left >= WORTH_SORTING else 1
    return left


@_jit
def _count_row(d, x, limits, low, per_width, near, counts):
    zero, below, start, middle, end = near
    negative = positive = np.int32(0)
    for i in range(x.size):
        p = d * x[i]
        negative = np.int32(negative + np.int32((p >= start) & (p < middle)))
        positive = np.int32(positive + np.int32((p >= middle) & (p < end)))
    if negative + positive < x.size:
        for v in x:
            p = d * v
            if not (p >= start and p < end):
                counts[_slot(p, limits, low, per_width)] += 1
    counts[below] += negative
    counts[zero] += positive


@_jit
def _count_sorted_row(d, x, limits, low, per_width, counts):
    """Count products of a finite number with a sorted, finite row."""
    size, step, i = x.size, 1, 0
    if d < 0:
        step, i = -1, size - 1
    k, last = _slot(d * x[i], limits, low, per_width), _slot(d * x[size - 1 - i], limits, low, per_width)
    if (last - k) * WORTH_SEARCHING > size:
        begin = 0
        for j in range(size):
            p = d * x[i + step * j]
            if k < limits.size and p >= limits[k]:
                counts[k] += j - begin
                begin = j
                while k < limits.size and p >= limits[k]:
                    k += 1
        counts[k] += size - begin
        return
    begin = 0
    while k < last:
        limit, a, b = limits[k], begin, size - 1  # the product at b is beyond the limit, the one at a is not
        while b - a > 1:
            middle = (a + b) >> 1
            if d * x[i + step * middle] >= limit:
                b = middle
            else:
                a = middle
        counts[k] += b - begin
        begin = b
        p = d * x[i + step * b]
        while k < limits.size and p >= limits[k]:
            k += 1
    counts[k] += size - begin


@_jit
def count_rest(delta, x, samples, are_sorted, rest, limits, low, per_width, counts):
    """Count what is left; row k of ``x`` belongs to ``samples[k]``, and is finite if it is sorted."""
    near = _zero(limits)
    for k in range(samples.size):
        n = samples[k]
        for o in range(delta.shape[1]):
            if rest[n, o]:
                d = delta[n, o]
                if are_sorted and abs(d) < np.inf:
                    _count_sorted_row(d, x[k], limits, low, per_width, counts)
                else:
                    _count_row(d, x[k], limits, low, per_width, near, counts)


@_jit
def count_outer_2d(delta, x, bits, limits, low, per_width, columns, row_counts, counts):
    """Count pairs with columns: if all products of a pair are next to zero, mostly by row, visiting only the rest.

    Args:
        delta: Shape ``[N, O]``.
        x: Shape ``[N, I]``.
        bits: The same memory as integers.
        limits: The thresholds.
        low: See `_slot`.
        per_width: See `_slot`.
        columns: Shape ``[O, I]``.
        row_counts: Counts of the columns of each row of parameters, ``[O, n_columns]``.
        counts: Added to.
    """
    near = _zero(limits)
    zero, below, _, _, _ = near
    width = x.shape[1]
    magnitudes = np.empty(4, x.dtype)
    found = magnitudes.view(bits.dtype)
    minus, others = np.empty(width, np.int32), np.empty(width, np.int32)
    plus, not_plus = np.empty(width, np.int32), np.empty(width, np.int32)
    for n in range(x.shape[0]):
        finite, signs = _signs(x[n], bits[n], found, magnitudes)
        a = b = c = e = 0
        for i in range(width):
            if x[n, i] < 0:
                minus[a] = i
                a += 1
            else:
                others[b] = i
                b += 1
            if x[n, i] > 0:
                plus[c] = i
                c += 1
            else:
                not_plus[e] = i
                e += 1
        for o in range(delta.shape[1]):
            d = delta[n, o]
            n_below = _n_below(d, signs, near) if finite and abs(d) < np.inf else -1
            if n_below < 0:
                for i in range(width):
                    counts[_slot(d * x[n, i], limits, low, per_width), columns[o, i]] += 1
                continue
            most, fewer = (below, zero) if 2 * n_below > width else (zero, below)
            for k in range(row_counts.shape[1]):
                counts[most, k] += row_counts[o, k]
            if most == fewer or n_below == 0 or n_below == width:
                continue
            if d > 0:
                visited = others[:b] if most == below else minus[:a]
            else:
                visited = not_plus[:e] if most == below else plus[:c]
            for i in visited:
                counts[most, columns[o, i]] -= 1
                counts[fewer, columns[o, i]] += 1
