"""Small modules that random programs are made of: each takes and returns ``[batch, time, width]``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

BLOCKS: dict[str, type[nn.Module]] = {}  # by name, those that need nothing but a width
WRAPPERS: dict[str, type[nn.Module]] = {}  # those that hold others
CUTTING: set[str] = set()  # those that cannot be part of one program


def _block(cls: type[nn.Module]) -> type[nn.Module]:
    BLOCKS[cls.__name__] = cls
    return cls


def _cutting(cls: type[nn.Module]) -> type[nn.Module]:
    CUTTING.add(cls.__name__)
    return _block(cls)


class _Sized(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


# -------------------------------------------------------------------------------------------------- layers of torch.nn


def _layer(name: str, make) -> None:
    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.layer = make(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    BLOCKS[name] = type(name, (nn.Module,), {"__init__": __init__, "forward": forward})


_layer("Linear", lambda w: nn.Linear(w, w))
_layer("LinearWithoutBias", lambda w: nn.Linear(w, w, bias=False))
_layer("Mlp", lambda w: nn.Sequential(nn.Linear(w, 3), nn.GELU(), nn.Linear(3, w), nn.ReLU(inplace=True)))
_layer("LayerNorm", nn.LayerNorm)
_layer("RMSNorm", nn.RMSNorm)
_layer("Dropout", lambda w: nn.Dropout(0.3))
_layer("DropoutInPlace", lambda w: nn.Sequential(nn.Linear(w, w), nn.Dropout(0.5, inplace=True)))
_layer("AlphaDropout", lambda w: nn.AlphaDropout(0.2))
_layer("Encoder", lambda w: nn.TransformerEncoderLayer(w, 2, 5, dropout=0.1, batch_first=True))
_layer("WeightNorm", lambda w: parametrizations.weight_norm(nn.Linear(w, w)))
_layer("SpectralNorm", lambda w: parametrizations.spectral_norm(nn.Linear(w, w)))


@_block
class BatchNorm(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@_block
class GroupNormConv(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.mT)).mT


@_block
class Attention(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return mixed.transpose(1, 2).flatten(2)


@_block
class MaskedAttention(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        return self.attention(x, x, x, attn_mask=self.mask[:n, :n], need_weights=False)[0]


@_cutting
class Recurrent(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


@_block
class Embedded(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.table = nn.Embedding(7, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach().sum(-1) * 10).long().remainder(7)
        return x + self.table(tokens)


@_block
class Tied(_Sized):
    """Embedding and head share their weight; a third use is by hand."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.table = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return logits.softmax(-1) @ self.table.weight + self.table(logits.argmax(-1))


@_block
class Scalars(_Sized):
    """Parameters of few or no dimensions, in a list and in a dictionary."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(width))})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x + self.shifts["a"]


@_block
class PartlyFrozen(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.first.requires_grad_(False)
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@_block
class Unused(_Sized):
    """A parameter that no call uses, and one that only training uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.never, self.sometimes = nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.sometimes(x) if self.training else x


# ----------------------------------------------------------------------------------------------------- views and edits


@_block
class Views(_Sized):
    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        x = x.reshape(batch * time, width).view(batch, time, width).permute(1, 0, 2).contiguous().permute(1, 0, 2)
        first, rest = x.split([1, width - 1], dim=-1)
        x = torch.cat([rest, first.expand(batch, time, 1)], dim=-1).flip(1)
        return torch.stack(x.unbind(0)).roll(1, 1).narrow(-1, 0, width).squeeze(0).reshape(batch, time, width)


@_block
class EditsInPlace(_Sized):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] += 1.5
        x[..., ::2].mul_(0.5)
        x.view(-1)[0] = 2.0
        x.masked_fill_(x < -1, 0.25).add_(x.detach().mean())
        return x.relu_()


@_block
class EditsAView(_Sized):
    """An edit of a view whose base is used afterwards, and the reverse."""

    def forward(self, x: Tensor) -> Tensor:
        base = x * 2
        part = base[:, :, 1:]
        part.sub_(1)
        base.mul_(3)
        return base + F.pad(part, (1, 0))


@_block
class EditsItsInput(_Sized):
    def forward(self, x: Tensor) -> Tensor:
        if not (x.requires_grad and x.is_leaf):
            x.add_(1)
        return x * 2


@_block
class FillsABlank(_Sized):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, ::2], out[:, 1::2] = x[:, ::2].sin(), x[:, 1::2].cos()
        index = torch.arange(x.shape[1] - 1, -1, -1)
        return out.index_copy(1, index, x) + out.index_select(1, index).scatter_add(0, torch.zeros_like(x).long(), x)


# -------------------------------------------------------------------------------------------------- buffers and state


@_block
class Statistics(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
                self.calls += 1
                self.last = x.detach().amax().reshape(1).to(self.last.dtype)
        return x - self.mean.to(x.dtype) + self.last.to(x.dtype) / (self.calls + 1)


@_block
class LateBuffer(_Sized):
    """Made in the first call."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("noise", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.noise is None:
            self.noise = torch.randn(self.width, dtype=x.dtype)
        return x + self.noise


@_block
class Cache(_Sized):
    """Rows written into a buffer at a moving place, as a key-value cache does."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("rows", torch.zeros(8, width))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        row = x.detach().mean((0, 1)).to(self.rows.dtype)
        self.rows.index_copy_(0, self.place, row[None])
        self.place.add_(1).remainder_(8)
        return x + self.rows[:4].sum(0).to(x.dtype)


@_block
class Counter(_Sized):
    """A Python number and a list that change with each call."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        return x * (1 + self.calls % 3)


# ------------------------------------------------------------------------------------------------------- random numbers


@_block
class Noise(_Sized):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.randn_like(x) + torch.rand(x.shape[1], 1, dtype=x.dtype)
            x = x * torch.bernoulli(torch.full((x.shape[0], 1, 1), 0.7, dtype=x.dtype))
        return x


# --------------------------------------------------------------------------------------------------------- control flow


@_block
class DependsOnShape(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.small, self.large = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.large(x) if x.shape[0] > 2 else self.small(x)
        for _ in range(x.shape[1] // 2):
            x = x * 0.9
        return x / x.numel() if x.shape[1] % 2 else x


@_cutting
class DependsOnData(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().sum() > 0:
            x = self.layer(x)
        return x * float(x.detach().abs().max().clamp(max=2))


@_cutting
class UsesNumpy(_Sized):
    def forward(self, x: Tensor) -> Tensor:
        found = x.detach().double().numpy().round(1).tolist()
        return x + sum(sum(row) for row in found[0])


@_cutting
class Routed(_Sized):
    """A mixture of two experts with rows chosen by ``nonzero``."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        chosen = (rows.detach().sum(-1) > 0).long()
        for number, expert in enumerate(self.experts):
            index = torch.where(chosen == number)[0]
            out = out.index_add(0, index, expert(rows[index]))
        return out.view_as(x)


# ------------------------------------------------------------------------------------------------- autograd and dtypes


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x  # not the real derivative: it must be this one that is used


@_block
class OwnGradient(_Sized):
    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(x.clamp(-1, 1))


@_block
class StopsGradients(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(x)
        return self.layer(x) + target + x.detach()


@_block
class Autocast(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inside, self.outside = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            inner = self.inside(x)
            with torch.autocast("cpu", enabled=False):
                x = self.outside(x)
        return x + inner.to(x.dtype)


@_block
class Hooked(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layer = nn.Linear(width, width)
        self.layer.register_forward_hook(_double)
        self.layer.register_forward_pre_hook(_shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _double(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output * 2


def _shift(module: nn.Module, args: tuple) -> tuple:
    return (args[0] + 1,)


@_block
class GradientHook(_Sized):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if x.requires_grad:
            x.register_hook(_halve)
        return x * 3


def _halve(gradient: Tensor) -> Tensor:
    return gradient / 2


# ------------------------------------------------------------------------------------------------------------ wrappers


def _wrapper(cls: type[nn.Module]) -> type[nn.Module]:
    WRAPPERS[cls.__name__] = cls
    return cls


@_wrapper
class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.clone())


@_wrapper
class Twice(nn.Sequential):
    """The same layers, and so the same weights, two times."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh())


@_wrapper
class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@_wrapper
class Branches(nn.ModuleDict):
    """Each layer on its own; called by name."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__({f"branch{number}": layer for number, layer in enumerate(layers)})

    def forward(self, x: Tensor) -> Tensor:
        return sum(self[name](x.clone()) for name in self) / len(self)
