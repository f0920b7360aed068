"""What is measured: models, data, and training loops without a cockpit, with this one, and with Cockpit 1.0.2."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcockpit import DistCockpit, __version__, every, presets
from distcockpit import quantities as q

VARIANTS: dict[str, list[q.Quantity]] = {
    "Alpha": [q.Alpha()],
    "MeanGSNR": [q.MeanGSNR()],
    "GradNorm": [q.GradNorm()],
    "NormTest": [q.NormTest()],
    "InnerTest": [q.InnerTest()],
    "OrthoTest": [q.OrthoTest()],
    "GradHist1d": [q.GradHist1d()],
    "GradHist1d, adapted": [q.GradHist1d(adapt=q.GradAbsMax())],
    "GradHist2d": [q.GradHist2d()],
    "HessTrace diag_h": [q.HessTrace()],
    "TICDiag": [q.TICDiag()],
    "HessTrace hutchinson": [q.HessTrace(curvature="hutchinson")],
    "HessMaxEV": [q.HessMaxEV()],
    "GradientNoiseScale": [q.GradientNoiseScale()],
    "RankDisagreement": [q.RankDisagreement()],
    "RankHealth": [q.RankHealth()],
    "ReplicaDrift": [q.ReplicaDrift()],
    "economy": presets.economy(),
    "business": presets.business(),
    "full": presets.full(),
    "layers": presets.layers(),
}
OF_UPDATES = (q.Alpha, q.Distance, q.UpdateSize)
VARIANTS["economy without updates"] = [each for each in presets.economy() if not isinstance(each, OF_UPDATES)]
LARGE = ("gpt", "gpt2")  # models
CHAINS_ONLY = ("HessTrace diag_h", "TICDiag", "business", "full")  # quantities that need BackPACK's diagonals
COCKPITS = (
    *("Alpha", "MeanGSNR", "NormTest", "InnerTest", "OrthoTest", "GradHist1d", "GradHist2d"),
    *("HessTrace diag_h", "TICDiag", "economy", "business"),
)  # what Cockpit has, too


class Gpt2(nn.Module):
    """GPT-2 as a classifier of what comes after 48 characters."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model  # noqa: PLC0415 - slow to import

        self.body = GPT2Model(GPT2Config(vocab_size=67, n_positions=48, n_embd=64, n_layer=2, n_head=4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores from the last position."""
        return self.head(self.body(x).last_hidden_state[:, -1])


class Gpt2Small(nn.Module):
    """GPT-2 small, 124 million parameters with a head tied to the tokens, as transformers sets it up."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - slow to import

        self.net = GPT2LMHeadModel(GPT2Config(use_cache=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores ``[batch, length, vocabulary]`` of the next token."""
        return self.net(x).logits


class Gpt(nn.Module):
    """A GPT of 10.9 million parameters as people write it: learned positions, a head tied to the tokens."""

    def __init__(self, vocabulary: int = 512, length: int = 128, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, 6) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores ``[batch, length, vocabulary]`` of the next token."""
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(torch.arange(x.shape[1])))))


class GptBlock(nn.Module):
    """Attention and two linear layers, each behind a layer norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape, ``[batch, length, width]``."""
        parts = self.attention(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(z.transpose(1, 2).flatten(2))
        return x + self.body(self.norm2(x))


class VisionTransformer(nn.Module):
    """A class token and positions of its own, which no module serves, and dropout."""

    def __init__(self, patches: int = 16, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(48, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores from the class token."""
        z = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1) + self.positions
        return self.head(self.body(z)[:, 0])


def make(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch."""
    if kind == "mlp":
        layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*layers), torch.rand(128, 784)
    if kind == "gpt":
        return Gpt(), torch.randint(512, (8, 128))
    if kind == "gpt2":
        return Gpt2Small(), torch.randint(50257, (2, 128))
    if kind == "gpt2-tiny":
        return Gpt2(), torch.randint(67, (8, 48))
    if kind == "vit":
        return VisionTransformer(), torch.rand(64, 16, 48)
    layers, channels = [], 3
    for out, kernel, padding in ((64, 5, 0), (96, 3, 0), (128, 3, 1)):
        layers += [nn.Conv2d(channels, out, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
        channels = out
    layers += [nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.rand(32, 3, 32, 32)


def fully_sharded(model: nn.Module) -> nn.Module:
    """The model with `fully_shard` applied to its blocks and itself, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if type(module).__name__ in ("GptBlock", "GPT2Block"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Loop:
    """A training loop that can be advanced by a few steps.

    Args:
        model: The model.
        x: Its input, the same at every step.
        store: Where to; ``None`` for a loop without a cockpit.
        quantities: What is tracked.
        period: Every how many steps.
        options: Further arguments of the cockpit.
    """

    def __init__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        store: Path | None,
        quantities: list[q.Quantity],
        period: int = 1,
        **options: Any,
    ) -> None:
        self.model, self.x, self.step = model, x, 0
        bare = getattr(model, "module", model)  # without DDP
        shape = x.shape if isinstance(bare, Gpt | Gpt2Small) else x.shape[:1]  # a class for each token, or each sample
        self.y = torch.randint(10, shape, generator=torch.Generator().manual_seed(0))
        self.loss_fn = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options |= {"enabled": False, "store": ""} if store is None else {"store": store, "quantities": quantities}
        self.cockpit = DistCockpit(model, self.loss_fn, self.optimizer, schedule=every(period), **options)

    def one(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        with self.cockpit.track(self.step):
            self.loss_fn(self.cockpit(self.x).flatten(0, -2), self.y.flatten()).backward()
        self.optimizer.step()

    def advance(self, steps: int) -> float:
        """Milliseconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.one()
            self.step += 1
        return (time.perf_counter() - start) / steps * 1e3

    def close(self) -> None:
        """End it."""
        self.cockpit.close()


class CockpitLoop(Loop):
    """The same with Cockpit 1.0.2, which wants the model extended and individual losses.

    Args:
        model: The model.
        x: Its input.
        name: One of ``COCKPITS``.
        period: Every how many steps.
    """

    def __init__(self, model: nn.Module, x: torch.Tensor, name: str, period: int = 1) -> None:
        from backpack import extend  # noqa: PLC0415 - not needed by the other loops
        from cockpit import Cockpit  # noqa: PLC0415

        super().__init__(model, x, None, [])
        extend(self.model)
        self.loss_fn, self.individual = extend(self.loss_fn), nn.CrossEntropyLoss(reduction="none")
        self.theirs = Cockpit(self.model.parameters(), quantities=their_quantities(name, period))

    def one(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        outputs = self.model(self.x)
        loss, losses = self.loss_fn(outputs, self.y), self.individual(outputs, self.y)
        info = {"batch_size": len(self.x), "individual_losses": losses, "loss": loss, "optimizer": self.optimizer}
        with self.theirs(self.step, info=info):
            loss.backward(create_graph=self.theirs.create_graph(self.step))
        self.optimizer.step()


def has_cockpit() -> bool:
    """True if Cockpit is installed."""
    try:
        import cockpit  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


def their_quantities(name: str, period: int) -> list[Any]:
    """Cockpit's quantities of this name, as Cockpit sets them up."""
    from cockpit import quantities  # noqa: PLC0415
    from cockpit.utils.configuration import configuration  # noqa: PLC0415
    from cockpit.utils.schedules import linear  # noqa: PLC0415

    if name in ("economy", "business"):
        return configuration(name, track_schedule=linear(period))
    return [getattr(quantities, name.partition(" ")[0])(track_schedule=linear(period))]


def machine() -> dict[str, Any]:
    """Where a measurement was made."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": unknown")
    return {
        "cpu": cpu.partition(":")[2].strip(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "distcockpit": __version__,
    }


def write(path: Path, what: str, results: dict[str, Any]) -> None:
    """One JSON file, with the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"what": what, "machine": machine(), **results}, indent=1) + "\n")
