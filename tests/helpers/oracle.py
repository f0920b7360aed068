"""The definition: one process, all samples, one sample at a time, float64, textbook formulas.

Nothing here comes from distcockpit. ``Batch`` holds what a single process would compute from all N samples of a
step: individual losses, individual gradients, gradients at module outputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn


def _keeper(values: list):
    """A hook that keeps a module's output and hands on a copy, which later operations may change in place."""

    def hook(module: nn.Module, args: object, z: object) -> object:
        if not isinstance(z, Tensor):
            return z
        values.append(z)
        return z.clone()

    return hook


@dataclass
class Batch:
    losses: np.ndarray  # [N]
    gradients: dict[str, np.ndarray]  # [N, *shape]
    outputs: dict[str, np.ndarray]  # leaf module -> dL/dz of the pooled mean loss, [N, *]
    parameters: dict[str, np.ndarray]
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)  # leaf module -> z of each sample, all calls

    @property
    def n(self) -> int:
        return len(self.losses)

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate([g.reshape(self.n, -1) for g in self.gradients.values()], axis=1)

    def ranks(self, shards: list[int]) -> list[slice]:
        ends = np.cumsum([0, *shards])
        return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def batch(model: nn.Module, state: dict[str, Tensor], terms, x: Tensor, y: Tensor) -> Batch:
    """``terms(prediction, target) -> (sum of the sample's loss terms, what the sample adds to W)``, for one sample."""
    model = copy.deepcopy(model).double()
    model.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()})
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    leaves = [(path, m) for path, m in model.named_modules() if not any(m.children())]
    x = x.double() if x.is_floating_point() else x
    rows, losses, weights, outputs = [], [], [], {path: [] for path, _ in leaves}
    values: dict[str, list] = {path: [] for path, _ in leaves}
    for i in range(len(x)):
        seen: dict[str, list[Tensor]] = {path: [] for path, _ in leaves}
        handles = [m.register_forward_hook(_keeper(seen[path])) for path, m in leaves]
        loss, weight = terms(model(x[i : i + 1]), y[i : i + 1])
        for handle in handles:
            handle.remove()
        zs = [(path, z) for path, values in seen.items() for z in values if isinstance(z, Tensor) and z.requires_grad]
        gradients = torch.autograd.grad(loss, [*parameters, *(z for _, z in zs)], allow_unused=True)
        own, at_outputs = gradients[: len(parameters)], gradients[len(parameters) :]
        for path, calls in seen.items():
            if calls:
                values[path].append(np.stack([z.detach().numpy()[0] for z in calls]))
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, own, strict=True)])
        losses.append(loss.item())
        weights.append(float(weight))
        for (path, z), g in zip(zs, at_outputs, strict=True):
            outputs[path].append((torch.zeros_like(z) if g is None else g)[0])
    n, total = len(x), sum(weights)
    return Batch(
        losses=np.array(losses) * n / total,
        gradients={name: torch.stack([row[k] for row in rows]).numpy() * n / total for k, name in enumerate(names)},
        outputs={path: torch.stack(g).numpy() / total for path, g in outputs.items() if g},
        parameters={name: p.detach().numpy() for name, p in zip(names, parameters, strict=True)},
        values={path: z for path, z in values.items() if z},
    )


def edges(low: float, high: float, bins: int) -> np.ndarray:
    return np.array([(low * (bins - k) + high * k) / bins for k in range(bins + 1)])


def grad_hist_1d(batch: Batch, edges: np.ndarray) -> np.ndarray:
    return np.histogram(np.clip(batch.flat, edges[0], edges[-1]), bins=edges)[0]


def grad_hist_2d(batch: Batch, grad_edges: np.ndarray, param_edges: np.ndarray, name: str | None = None) -> np.ndarray:
    names = [name] if name else list(batch.gradients)
    g = np.concatenate([batch.gradients[k].reshape(batch.n, -1) for k in names], axis=1)
    theta = np.concatenate([batch.parameters[k].reshape(-1) for k in names])
    pairs = np.clip(g, grad_edges[0], grad_edges[-1]), np.clip(theta, param_edges[0], param_edges[-1])
    return np.histogram2d(pairs[0].ravel(), np.tile(pairs[1], batch.n), bins=[grad_edges, param_edges])[0]


def mean_gsnr(batch: Batch, epsilon: float = 1e-5) -> float:
    g = batch.flat
    return float(np.mean(g.mean(0) ** 2 / (g.var(0) + epsilon))) if len(g) > 1 else float("nan")


def alpha(start: Batch, end: Batch) -> dict[str, float]:
    d = np.concatenate([(end.parameters[k] - start.parameters[k]).ravel() for k in start.parameters])
    norm = np.linalg.norm(d)
    observed = [start.losses, end.losses, start.flat @ d / norm, end.flat @ d / norm]
    means = np.array([o.mean() for o in observed])
    variances = np.array([o.var(ddof=1) for o in observed])
    value, mu = fit_alpha(means, variances, norm)
    names = ["f_start", "f_end", "slope_start", "slope_end"]
    return {
        "alpha": value,
        "curvature_of_fit": mu[2],
        "update_norm": norm,
        **dict(zip(names, means, strict=True)),
        **{f"{k}_variance": v for k, v in zip(names, variances, strict=True)},
    }


def fit_alpha(means: np.ndarray, variances: np.ndarray, norm: float) -> tuple[float, np.ndarray]:
    """Least squares on the whitened system, in the units of the definition."""
    design = np.array([[1, 0, 0], [1, norm, norm**2], [0, 1, 0], [0, 1, 2 * norm]])
    weights = 1 / np.sqrt(np.where(variances == 0, 1e-10, variances))
    mu = np.linalg.lstsq(design * weights[:, None], means * weights, rcond=None)[0]
    return (-1.0 if mu[2] <= 0 else 2 * norm / (-mu[1] / mu[2]) - 1), mu


def norm_test(batch: Batch) -> float:
    """The standard error of the mean, relative to its length: the sample covariance, textbook."""
    g = batch.flat
    return float(np.sqrt(g.var(0, ddof=1).sum() / batch.n) / np.linalg.norm(g.mean(0)))


def inner_test(batch: Batch) -> float:
    g = batch.flat
    mean = g.mean(0)
    return float(np.sqrt((g @ mean).var(ddof=1) / batch.n) / (mean @ mean))


def ortho_test(batch: Batch) -> float:
    g = batch.flat
    mean = g.mean(0)
    across = g - np.outer(g @ mean / (mean @ mean), mean)
    return float(np.sqrt((across**2).sum() / (batch.n - 1) / batch.n) / np.linalg.norm(mean))


def cabs(batch: Batch, learning_rate: float, names: list[str] | None = None) -> float:
    names = list(batch.gradients) if names is None else names
    g = np.concatenate([batch.gradients[k].reshape(batch.n, -1) for k in names], axis=1)
    return float(learning_rate * g.var(0).sum() / batch.losses.mean())


def early_stopping(batch: Batch, epsilon: float = 1e-5) -> float:
    g = batch.flat
    return float(1 - batch.n * np.mean(g.mean(0) ** 2 / (g.var(0, ddof=1) + epsilon)))


def tic_diag(batch: Batch, diagonal: dict[str, np.ndarray], epsilon: float = 1e-7) -> float:
    h = np.concatenate([diagonal[k].ravel() for k in batch.gradients])
    return float(((batch.flat**2).mean(0) / (h + epsilon)).sum())


def tic_trace(batch: Batch, diagonal: dict[str, np.ndarray], epsilon: float = 1e-7) -> float:
    return float((batch.flat**2).sum(1).mean() / (sum(h.sum() for h in diagonal.values()) + epsilon))


def output_norm(batch: Batch) -> dict[str, tuple[float, float]]:
    """Mean over samples of the norm of the output, and of its root mean square."""
    norms = {path: [np.linalg.norm(z) for z in samples] for path, samples in batch.values.items()}
    sizes = {path: samples[0].size for path, samples in batch.values.items()}
    return {path: (np.mean(each), np.mean(each) / np.sqrt(sizes[path])) for path, each in norms.items()}


def output_activation(batch: Batch, path: str, channel_axis: int = 1, epsilon: float = 1e-8) -> tuple[float, float]:
    """Share of active elements; share of neurons that no sample activates."""
    active = np.abs(np.stack(batch.values[path])) > epsilon  # [N, calls, C, *]
    axis = channel_axis + 1 if channel_axis > 0 else channel_axis
    rates = active.mean(tuple(k for k in range(active.ndim) if k != axis % active.ndim))
    return float(active.mean()), float((rates == 0).mean())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def noise_scale(batch: Batch, names: list[str] | None = None) -> tuple[float, float]:
    """Unbiased trace of the covariance of individual gradients, and squared norm of the true gradient."""
    names = list(batch.gradients) if names is None else names
    g = np.concatenate([batch.gradients[k].reshape(batch.n, -1) for k in names], axis=1)
    noise = g.var(0, ddof=1).sum()
    return float(noise), float(g.mean(0) @ g.mean(0) - noise / batch.n)


def noise_scale_between(batch: Batch, shards: list[int]) -> tuple[float, float]:
    """The same from the batch gradients of the ranks: one-way analysis of variance."""
    g, mean = batch.flat, batch.flat.mean(0)
    means = [(len(g[r]), g[r].mean(0)) for r in batch.ranks(shards) if len(g[r])]
    noise = sum(b * ((m - mean) ** 2).sum() for b, m in means) / (len(means) - 1) if len(means) > 1 else np.nan
    return float(noise), float(mean @ mean - noise / batch.n)


def rank_disagreement(batch: Batch, shards: list[int]) -> list[tuple[float, float, float, int]]:
    """Per rank: norm of its mean gradient, cosine with the mean of all, mean loss, samples."""
    g, mean, rows = batch.flat, batch.flat.mean(0), []
    for r in batch.ranks(shards):
        if len(g[r]):
            own = g[r].mean(0)
            rows.append((float(np.linalg.norm(own)), cosine(own, mean), float(batch.losses[r].mean()), len(g[r])))
        else:
            rows.append((np.nan, np.nan, np.nan, 0))
    return rows


def hessian(model: nn.Module, state: dict[str, Tensor], loss_fn, x: Tensor, y: Tensor) -> np.ndarray:
    """The Hessian of the mean loss in all trainable parameters, a row per parameter element."""
    model, x, y = _double(model, state, x, y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # it has a second derivative
        loss = loss_fn(model(x), y)
    gradient = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    flat = torch.cat([g.reshape(-1) for g in gradient])
    unit = torch.eye(len(flat), dtype=flat.dtype)
    rows = torch.autograd.grad(flat, parameters, unit, is_grads_batched=True, allow_unused=True)
    filled = [flat.new_zeros(len(flat), p.numel()) if r is None else r for r, p in zip(rows, parameters, strict=True)]
    return torch.cat([r.reshape(len(flat), -1) for r in filled], 1).numpy()


def hess_max_ev(hessian: np.ndarray, which: str) -> float:
    values = np.linalg.eigvalsh((hessian + hessian.T) / 2)
    return float(values[np.abs(values).argmax()] if which == "LM" else values.max())


def diagonal_of(hessian: np.ndarray, model: nn.Module) -> dict[str, np.ndarray]:
    """The diagonal, by parameter."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    parts = np.split(np.diag(hessian), np.cumsum([p.numel() for _, p in named])[:-1])
    return {name: part.reshape(p.shape) for (name, p), part in zip(named, parts, strict=True)}


def ggn_diagonal(model: nn.Module, state: dict[str, Tensor], loss_fn, x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    """Diagonal of J^T H J, H the Hessian of the loss in the network's output, averaged over samples."""
    model, x, y = _double(model, state, x, y)
    diagonal = {n: np.zeros(p.shape) for n, p in model.named_parameters()}
    for i in range(len(x)):
        z = model(x[i : i + 1])
        h = torch.autograd.functional.hessian(lambda out: loss_fn(out, y[i : i + 1]), z.detach())  # noqa: B023
        h = h.reshape(z.numel(), z.numel())
        for name, p in model.named_parameters():
            rows = [torch.autograd.grad(z.reshape(-1)[k], p, retain_graph=True)[0].reshape(-1) for k in range(len(h))]
            jacobian = torch.stack(rows)
            diagonal[name] += ((jacobian.T @ h) * jacobian.T).sum(1).reshape(p.shape).numpy() / len(x)
    return diagonal


def _double(model: nn.Module, state: dict[str, Tensor], x: Tensor, y: Tensor):
    model = copy.deepcopy(model).double()
    model.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()})
    return model, x.double() if x.is_floating_point() else x, y.double() if y.is_floating_point() else y


def output_geometry(batch: Batch, previous: Batch | None, rms: bool = False) -> dict[str, tuple[float, float]]:
    """Norm of dL/dz (or its root mean square) and the cosine with the previous one, by leaf module."""
    result = {}
    for path, z in batch.outputs.items():
        norm = np.linalg.norm(z)
        cosine = np.nan
        if previous is not None and previous.outputs[path].shape == z.shape:
            cosine = np.vdot(z, previous.outputs[path]) / (norm * np.linalg.norm(previous.outputs[path]))
        result[path] = (norm / np.sqrt(z.size) if rms else norm, cosine)
    return result
