"""What "any model" means: models, their data, and how they are trained. Used by the ranks and the oracle alike."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from generative_models import Diffusion, NanoGpt, Twofold, UNet, lora
from small_models import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attention,
    Bag,
    Bilinear,
    Block,
    Borrowed,
    ClassToken,
    Experts,
    Folded,
    Frozen,
    HandMade,
    HeldTwice,
    Mapped,
    Merged,
    Net,
    OwnFunction,
    Positions,
    RelativeBias,
    ResNet18,
    SequenceFirst,
    Spare,
    StateSpace,
    Structured,
    Tied,
    TimeFirst,
    Twice,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Batch = dict[str, Tensor]


def cross_entropy(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Individual losses of a model that returns class scores."""
    z = model(batch["x"])
    return F.cross_entropy(z.float() if z.dtype in (torch.float16, torch.bfloat16) else z, batch["y"], reduction="none")


def plain_loop(model: Callable[..., Any], batch: Batch, loss_fn: nn.Module | None) -> Tensor:
    assert loss_fn is not None
    return loss_fn(model(batch["x"]), batch["y"])


def internal_loss(model: Callable[..., Any], batch: Batch, loss_fn: nn.Module | None = None) -> Tensor:
    return model(**batch).loss


@dataclass(frozen=True)
class Case:
    """A model, its data, and how a user trains it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (LENGTH, WIDTH)  # of a sample of x
    batch: Callable[[int], Batch] | None = None  # overrides shape
    losses: Callable[[Callable[..., Any], Batch], Tensor] = cross_entropy
    train: Callable[[Callable[..., Any], Batch, nn.Module | None], Tensor] = plain_loop
    loss_fn: Callable[[], nn.Module | None] = nn.CrossEntropyLoss
    options: dict[str, Any] = field(default_factory=dict)  # of DistCockpit
    ddp: dict[str, Any] = field(default_factory=dict)
    alone: bool = True  # whether the oracle sees each sample alone, in float64; not where random numbers are drawn
    slow: tuple[str, ...] = ()  # parameters that must take the slow route; no others may
    whole: tuple[str, ...] = ()  # parameters for which a module without modules in it must be run again; no others may
    rtol: float = 2e-4
    ranks: bool = True  # whether DistributedDataParallel takes it on a CPU
    group: str = ""  # row of the table "what works"


def images(body: Callable[[], nn.Module], **options: Any) -> Case:
    return Case(
        lambda: Net(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), body(), nn.AdaptiveAvgPool2d(2)), 16),
        (2, 6, 6),
        **options,
    )


def in_eval(module: nn.Module) -> nn.Module:
    """Batch norm with running statistics that were learned, and stay."""
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(m.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(m.running_var, 0.5, 2)
            m.eval()
    return module


def tokens(n: int) -> Batch:
    x = torch.randint(0, VOCABULARY, (n, LENGTH))
    return {"x": x, "y": torch.arange(n) % CLASSES}


def labelled(n: int) -> Batch:
    x = torch.randint(0, VOCABULARY, (n, LENGTH))
    return {"input_ids": x, "labels": x}


def texts(n: int) -> Batch:
    return {"input_ids": torch.randint(0, VOCABULARY, (n, LENGTH)), "labels": torch.arange(n) % CLASSES}


def pictures(n: int, size: int = 8) -> Batch:
    return {"pixel_values": torch.randn(n, 3, size, size), "labels": torch.arange(n) % CLASSES}


def sounds(n: int) -> Batch:
    return {"input_features": torch.randn(n, 5, 8), "labels": torch.randint(3, VOCABULARY, (n, LENGTH))}


def embedded(body: nn.Module, take: Callable[[Any], Tensor] = lambda z: z, **embedding: Any) -> nn.Module:
    return Net(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, **embedding), body), LENGTH * WIDTH, take)


def hugging_face(model: str, **config: Any) -> nn.Module:
    """A model of the library `transformers`, small, with random weights; ``model`` is "Config:Model"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        kind, architecture = model.split(":")
        return getattr(transformers, architecture)(getattr(transformers, kind)(**config)).train()


TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
LLAMA = partial(
    hugging_face, "LlamaConfig:LlamaForCausalLM", **TEXT, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
)  # fmt: skip
RESNET = partial(
    hugging_face, "ResNetConfig:ResNetForImageClassification", embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1],
    layer_type="basic", num_labels=CLASSES,
)  # fmt: skip


def trained_inside(build: Callable[[], nn.Module], batch: Callable[[int], Batch], **options: Any) -> Case:
    """A model that computes its own loss."""
    return Case(
        build,
        batch=batch,
        losses=lambda model, batch: model(**batch).loss[None],
        train=internal_loss,
        loss_fn=lambda: None,
        **options,
    )


def scores_and_loss(build: Callable[[], nn.Module], **options: Any) -> Case:
    """A language model that returns its loss after the scores."""
    return Case(
        build,
        batch=lambda n: {
            "x": torch.randint(0, VOCABULARY, (n, LENGTH)),
            "y": torch.randint(0, VOCABULARY, (n, LENGTH)),
        },
        losses=lambda model, batch: model(**batch)[1][None],
        train=lambda model, batch, loss_fn: model(**batch)[1],
        loss_fn=lambda: None,
        **options,
    )


def token_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Mean over the tokens of each sample; batch axis 1."""
    z = model(batch["x"])
    return F.cross_entropy(z.flatten(0, 1), batch["y"].flatten(), reduction="none").reshape(z.shape[:2]).mean(0)


OUT_PROJECTION = ("body.attend.out_proj.bias", "body.attend.out_proj.weight")  # where weights are returned
FOLDED_UNTOLD = ("conv.bias", "conv.weight", "groups.bias", "groups.weight", "norm.bias", "norm.weight", "scale")
FLAT = LENGTH * WIDTH

CASES: dict[str, Case] = {
    "residual block in place": images(lambda: Block(lambda c: nn.GroupNorm(2, c)), group="Activations, skips"),
    "GroupNorm, InstanceNorm": images(
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)), group="Norms"
    ),
    "LayerNorm, RMSNorm": Case(lambda: Net(nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)), FLAT), group="Norms"),
    "BatchNorm, eval": images(lambda: in_eval(Block(nn.BatchNorm2d)), group="Norms"),
    "BatchNorm, track_batchnorm": images(
        lambda: Block(nn.BatchNorm2d), options={"track_batchnorm": True}, alone=False, group="Norms"
    ),
    "SyncBatchNorm, eval": images(lambda: in_eval(Block(nn.SyncBatchNorm)), ranks=False, group="Norms"),
    "Embedding, padding index": Case(lambda: embedded(nn.Tanh(), padding_idx=3), batch=tokens, group="Embeddings"),
    "Embedding, sparse": Case(lambda: embedded(nn.Tanh(), sparse=True), batch=tokens, group="Embeddings"),
    "EmbeddingBag": Case(lambda: Bag("mean", False), batch=tokens, group="Embeddings"),
    "EmbeddingBag, sparse": Case(lambda: Bag("sum", True), batch=tokens, whole=("bag.weight",), group="Embeddings"),
    "MultiheadAttention": Case(lambda: Net(Attention(), FLAT), whole=OUT_PROJECTION, group="Attention"),
    "MultiheadAttention, time first, dropout": Case(
        lambda: Net(Attention(0.3, False), FLAT), alone=False, whole=OUT_PROJECTION, group="Attention"
    ),
    "TransformerEncoder, dropout": Case(
        lambda: Net(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.2, batch_first=True), 2), FLAT),
        alone=False,
        group="Attention",
    ),
    "TransformerEncoder, time first": Case(
        lambda: Net(
            TimeFirst(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0), 1, enable_nested_tensor=False)),
            FLAT,
        ),
        group="Attention",
    ),
    "RNN, PReLU": Case(
        lambda: Net(nn.Sequential(nn.PReLU(LENGTH), nn.RNN(WIDTH, WIDTH, batch_first=True)), FLAT, lambda z: z[0]),
        group="Recurrent",
    ),
    "LSTM, last state": Case(
        lambda: Net(nn.LSTM(WIDTH, 4, 2, batch_first=True), 8, lambda z: z[1][0].transpose(0, 1)), group="Recurrent"
    ),
    "GRU, time first": Case(lambda: Net(TimeFirst(nn.GRU(WIDTH, WIDTH), lambda z: z[0]), FLAT), group="Recurrent"),
    "convolutions, grouped and transposed": images(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)),
        group="Convolutions, bilinear",
    ),
    "convolutions, dilated, padded in every way": images(
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(6, 4, (2, 3), padding="same", dilation=(1, 2), padding_mode="circular", groups=2),
            nn.Flatten(2),
            nn.Conv1d(4, 4, 4, dilation=2, padding="same", bias=False),
            nn.Sigmoid(),
            nn.Unflatten(2, (2, 2, -1)),
            nn.Conv3d(4, 4, (1, 2, 2), stride=(1, 2, 1), padding=(1, 0, 0)),
            nn.Flatten(3),
        ),
        group="Convolutions, bilinear",
    ),
    "Bilinear": Case(lambda: Net(Bilinear(), FLAT), group="Convolutions, bilinear"),
    "a module called several times": Case(lambda: Net(Twice(), FLAT), group="Sharing"),
    "tied embeddings": Case(lambda: Tied(False), batch=tokens, group="Sharing"),
    "tied embeddings without a module": Case(lambda: nn.Sequential(Tied(True)), batch=tokens, group="Sharing"),
    "held by parent and child": Case(lambda: Net(HeldTwice(False), FLAT), group="Sharing"),
    "used by parent and child": Case(lambda: Net(HeldTwice(True), FLAT), group="Sharing"),
    "class token, layer scale": Case(
        lambda: Net(ClassToken(), FLAT),
        group="Parameters used by a parent",
    ),
    "state-space layer": Case(lambda: Net(StateSpace(), FLAT), group="Parameters used by a parent"),
    "a child's weight without the child": Case(
        lambda: Net(Borrowed(), FLAT),
        ddp={"find_unused_parameters": True},
        group="Parameters used by a parent",
    ),
    "positions [1, T]": Case(lambda: Net(nn.Sequential(Positions(True)), FLAT), batch=tokens, group="No batch axis"),
    "positions [T]": Case(lambda: Net(nn.Sequential(Positions(False)), FLAT), batch=tokens, group="No batch axis"),
    "relative attention bias": Case(lambda: Net(RelativeBias(), FLAT), group="No batch axis"),
    "tokens folded into the batch": Case(lambda: Net(Merged("samples"), FLAT), group="No batch axis"),
    "samples folded into time": Case(lambda: Net(Merged("positions"), FLAT), group="No batch axis"),
    "folded in two ways": Case(
        lambda: Net(Merged("both"), FLAT),
        slow=tuple(f"body.{name}" for name in FOLDED_UNTOLD),
        group="No batch axis",
    ),
    "packed sequences": Case(
        lambda: Net(Folded(), FLAT),
        slow=(
            "body.rnn.bias_hh_l0",
            "body.rnn.bias_ih_l0",
            "body.rnn.weight_hh_l0",
            "body.rnn.weight_ih_l0",
        ),
        group="No batch axis",
    ),
    "mixture of experts": Case(
        lambda: Net(Experts(), FLAT),
        slow=(
            "body.experts.0.bias",
            "body.experts.0.weight",
            "body.experts.1.bias",
            "body.experts.1.weight",
        ),
        ddp={"find_unused_parameters": True},
        group="No batch axis",
    ),
    "frozen parameters": Case(lambda: Net(Frozen(), FLAT), group="Parameters of all kinds"),
    "weight_norm": Case(
        lambda: Net(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), FLAT), group="Parameters of all kinds"
    ),
    "spectral_norm": Case(
        lambda: Net(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), FLAT),
        alone=False,
        group="Parameters of all kinds",
    ),
    "unused parameters": Case(
        lambda: nn.Sequential(Net(nn.Linear(WIDTH, WIDTH), FLAT, lambda z: z * 2)).append(Spare()),
        ddp={"find_unused_parameters": True},
        group="Parameters of all kinds",
    ),
    "float64": Case(
        lambda: Net(nn.GRU(WIDTH, WIDTH, batch_first=True), FLAT, lambda z: z[0]).double(),
        rtol=1e-7,
        batch=lambda n: {"x": torch.randn(n, LENGTH, WIDTH).double(), "y": torch.arange(n) % CLASSES},
        group="Parameters of all kinds",
    ),  # fmt: skip
    "bfloat16": Case(
        lambda: Net(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8)), 32).bfloat16(),
        batch=lambda n: {"x": torch.randn(n, LENGTH, WIDTH).bfloat16(), "y": torch.arange(n) % CLASSES},
        rtol=0.04,
        group="Parameters of all kinds",
    ),
    "float16": Case(
        lambda: Net(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8)), 32).half(),
        batch=lambda n: {"x": torch.randn(n, LENGTH, WIDTH).half(), "y": torch.arange(n) % CLASSES},
        rtol=0.01,
        group="Parameters of all kinds",
    ),
    "channels-last": Case(
        lambda: Net(
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3)), 16
        ).to(memory_format=torch.channels_last),
        batch=lambda n: {
            "x": torch.randn(n, 2, 6, 6).to(memory_format=torch.channels_last),
            "y": torch.arange(n) % CLASSES,
        },
        group="Parameters of all kinds",
    ),  # fmt: skip
    "keywords, dicts, tuples, dataclasses": Case(
        Structured,
        losses=lambda model, batch: F.cross_entropy(model(inputs=batch).scores, batch["y"], reduction="none"),
        train=lambda model, batch, loss_fn: loss_fn(model(inputs=batch).scores, batch["y"]),
        group="Inputs and outputs",
    ),
    "batch_dim=1": Case(
        SequenceFirst,
        batch=lambda n: {
            "x": torch.randint(0, VOCABULARY, (LENGTH, n)),
            "y": torch.randint(0, VOCABULARY, (LENGTH, n)),
        },
        losses=token_losses,
        train=lambda model, batch, loss_fn: loss_fn(model(batch["x"]).flatten(0, 1), batch["y"].flatten()),
        options={"batch_dim": 1},
        group="Inputs and outputs",
    ),  # fmt: skip
    "a loss returned beside the scores": scores_and_loss(HandMade, group="Inputs and outputs"),
    "a custom autograd function": Case(
        lambda: Net(OwnFunction(), FLAT), whole=("body.weight",), group="Inputs and outputs"
    ),
    "vmap and grad of torch.func in forward": Case(
        lambda: Net(Mapped(), FLAT),
        slow=("body.energy.bias", "body.energy.weight", "body.members", "body.weight"),
        group="Inputs and outputs",
    ),
    "nanoGPT": scores_and_loss(NanoGpt, group="Generative, written out"),
    "U-Net": Case(
        UNet,
        batch=lambda n: {"x": torch.randn(n, 2, 6, 6), "y": torch.randn(n, 2, 6, 6)},
        losses=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean((1, 2, 3)),
        loss_fn=nn.MSELoss,
        group="Generative, written out",
    ),
    "diffusion, noise and times drawn in forward": Case(
        Diffusion,
        batch=lambda n: {"x": torch.randn(n, 2, 6, 6)},
        losses=lambda model, batch: model(batch["x"])[1].mean((1, 2, 3)),
        train=lambda model, batch, loss_fn: model(batch["x"])[0],
        loss_fn=lambda: None,
        alone=False,
        group="Generative, written out",
    ),
    "LoRA": Case(lambda: Net(lora(False), FLAT), group="Adapters, parametrizations"),
    "LoRA, merged": Case(lambda: Net(lora(True), FLAT), group="Adapters, parametrizations"),
    "nn.utils.parametrize, cached": Case(lambda: Net(Twofold(), FLAT), group="Adapters, parametrizations"),
    "GPT-2": trained_inside(
        lambda: hugging_face("GPT2Config:GPT2LMHeadModel", **TEXT, n_positions=8, n_embd=8, n_layer=2, n_head=2),
        labelled,
        alone=False,
        group="Hugging Face transformers",
    ),
    "Llama": trained_inside(lambda: LLAMA(tie_word_embeddings=False), labelled, group="Hugging Face transformers"),
    "Llama, tied": trained_inside(lambda: LLAMA(tie_word_embeddings=True), labelled, group="Hugging Face transformers"),
    "BERT": trained_inside(
        lambda: hugging_face(
            "BertConfig:BertForSequenceClassification",
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=8,
            num_labels=CLASSES,
        ),
        texts,
        alone=False,
        group="Hugging Face transformers",
    ),  # fmt: skip
    "ViT": trained_inside(
        lambda: hugging_face(
            "ViTConfig:ViTForImageClassification",
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=8,
            patch_size=4,
            num_labels=CLASSES,
        ),
        pictures,
        group="Hugging Face transformers",
    ),  # fmt: skip
    "T5": trained_inside(
        lambda: hugging_face(
            "T5Config:T5ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        labelled,
        alone=False,
        group="Hugging Face transformers",
    ),  # fmt: skip
    "Mamba": trained_inside(
        lambda: hugging_face(
            "MambaConfig:MambaForCausalLM",
            **TEXT,
            hidden_size=8,
            state_size=3,
            num_hidden_layers=2,
            time_step_rank=2,
            use_cache=False,
        ),
        labelled,
        group="Hugging Face transformers",
    ),  # fmt: skip
    "Whisper": trained_inside(
        lambda: hugging_face(
            "WhisperConfig:WhisperForConditionalGeneration",
            **TEXT | {"pad_token_id": 0},
            d_model=8,
            num_mel_bins=5,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=12,
            decoder_ffn_dim=12,
            max_source_positions=4,
            max_target_positions=8,
            decoder_start_token_id=0,
        ),
        sounds,
        alone=False,
        group="Hugging Face transformers",
    ),  # fmt: skip
    "ResNet, eval": trained_inside(lambda: in_eval(RESNET()), pictures, group="Hugging Face transformers"),
    "ResNet, track_batchnorm": trained_inside(
        RESNET,
        partial(pictures, size=32),
        alone=False,
        options={"track_batchnorm": True},
        group="Hugging Face transformers",
    ),
    "ConvNeXt": trained_inside(
        lambda: hugging_face(
            "ConvNextConfig:ConvNextForImageClassification",
            hidden_sizes=[4, 6],
            depths=[1, 1],
            num_stages=2,
            patch_size=2,
            num_labels=CLASSES,
            layer_scale_init_value=0.5,
        ),
        pictures,
        group="Hugging Face transformers",
    ),  # fmt: skip
    "ResNet-18, eval": Case(lambda: in_eval(ResNet18()), (3, 32, 32), group="ResNet-18 as in torchvision"),
    "ResNet-18, track_batchnorm": Case(
        ResNet18, (3, 64, 64), options={"track_batchnorm": True}, alone=False, group="ResNet-18 as in torchvision"
    ),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(5)
    return CASES[name].build()


def data(name: str, step: int, n: int) -> Batch:
    case = CASES[name]
    torch.manual_seed(100 + step)
    if case.batch is not None:
        return case.batch(n)
    return {"x": torch.randn(n, *case.shape), "y": torch.arange(n) % CLASSES}


def part(name: str, batch: Batch, samples: slice) -> Batch:
    axis = CASES[name].options.get("batch_dim", 0)
    return {k: v[samples] if axis == 0 else v[:, samples] for k, v in batch.items()}


def individual_gradients(name: str, model: nn.Module, batch: Batch, n: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The definition: losses [n], and gradients [n, *] of each trainable parameter, sample by sample, by autograd."""
    case, model = CASES[name], copy.deepcopy(model)
    if case.options.get("track_batchnorm"):
        hold_batch_statistics(name, model, batch)
    if case.alone:
        model = model.double()
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    for module in model.modules():
        if getattr(module, "sparse", False):
            module.sparse = False
    losses, rows = [], []
    if case.train is internal_loss and not case.alone:
        several = per_sample_of_internal(model, batch, n)
    elif not case.alone:
        several = case.losses(model, batch)
    for i in range(n):
        loss = case.losses(model, part(name, batch, slice(i, i + 1)))[0] if case.alone else several[i]
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=not case.alone, allow_unused=True, materialize_grads=True
        )
        losses.append(loss.detach().double())
        rows.append([g.double() for g in gradients])
    return torch.stack(losses), {k: torch.stack([r[j] for r in rows]) for j, k in enumerate(parameters)}


def per_sample_of_internal(model: nn.Module, batch: Batch, n: int) -> Tensor:
    """Individual losses of one batched call, from the scores that come with the loss; the same random numbers."""
    output = model(**batch)
    scores, labels = output.logits.float(), batch["labels"]
    if scores.dim() == 2:
        losses = F.cross_entropy(scores, labels, reduction="none")
    else:
        if not getattr(model.config, "is_encoder_decoder", False):
            scores, labels = scores[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none").mean(1)
    torch.testing.assert_close(losses.mean(), output.loss)
    return losses


def hold_batch_statistics(name: str, model: nn.Module, batch: Batch) -> None:
    """Put batch norms in eval mode, with the statistics of this batch."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def keep(module: Any, args: tuple[Tensor]) -> None:
        axes = [k for k in range(args[0].dim()) if k != 1]
        module.held = args[0].mean(axes), args[0].var(axes, unbiased=False)

    handles = [m.register_forward_pre_hook(keep) for m in norms]
    with torch.no_grad():
        model(**batch) if CASES[name].train is internal_loss else model(batch["x"])
    for handle, module in zip(handles, norms, strict=True):
        handle.remove()
        module.eval()
        module.running_mean, module.running_var = module.held


def table() -> str:
    """What works, as docs/models.md shows it: one row per group of cases."""
    rows = ["| what | tested | whole module re-run for | slow exact route for |", "|---|---|---|---|"]
    for group in dict.fromkeys(case.group for case in CASES.values()):
        cases = {name: case for name, case in CASES.items() if case.group == group}
        tested = "; ".join(name if case.ranks else f"{name} (one process only)" for name, case in cases.items())
        columns = []
        for route in ("whole", "slow"):
            those = {name: len(getattr(case, route)) for name, case in cases.items() if getattr(case, route)}
            of = {name: len(list(built(name).parameters())) for name in those}
            columns.append("; ".join(f"{name} ({n} of {of[name]} parameters)" for name, n in those.items()) or "none")
        rows.append(f"| {group} | {tested} | {' | '.join(columns)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
