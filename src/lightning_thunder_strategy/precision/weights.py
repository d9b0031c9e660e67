"""Keeps the weights of linears in few bits, for inference and for training adapters beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.config import check_patterns
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.compiler.trace import Origin, Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.precision.storage import (
    Storage,
    StorageName,
    decode,
    encode,
    resolve_storage,
    stored_bytes,
)

_PART = "weight_"  # buffers of a stored weight are called weight_codes, weight_scale, ...
_REGION = 10**6 + 1  # one number for all weights, apart from those of checkpoint regions and gathers


class StoredLinear(nn.Linear):
    """A linear whose weight is stored in few bits and becomes a matrix where it is used.

    It is made of an ``nn.Linear`` in place. ``weight`` is computed at each access, without a gradient. The state dict
    holds the stored parts; loading takes those, or a plain ``weight``, which is stored anew.
    """

    lts_storage: Storage
    lts_dtype: torch.dtype
    lts_constant_buffers = True  # they need not be sent to other ranks after each step

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return decode(self.lts_parts(), self.lts_storage, self.lts_dtype)

    def lts_parts(self) -> dict[str, Tensor]:
        """The stored parts, by name."""
        return {name.removeprefix(_PART): b for name, b in self._buffers.items() if name.startswith(_PART)}  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Moves the parts; a change of the floating type changes what ``weight`` becomes, never what is stored."""
        dtype = fn(torch.zeros((), dtype=self.lts_dtype)).dtype
        kept = {name: buffer.dtype for name, buffer in self._buffers.items() if name.startswith(_PART)}  # type: ignore[union-attr]
        stored = {name: self._buffers.pop(name) for name in kept}
        super()._apply(fn, recurse)
        for name, buffer in stored.items():
            place = fn(torch.zeros((), device=buffer.device)).device  # type: ignore[union-attr]
            self._buffers[name] = buffer.to(place)  # type: ignore[union-attr]
        self.lts_dtype = dtype if dtype.is_floating_point else self.lts_dtype
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        plain = state_dict.pop(f"{prefix}weight", None)
        if plain is not None:
            for name, part in encode(plain.to(self.weight_codes.device), self.lts_storage).items():  # type: ignore[arg-type]
                state_dict[f"{prefix}{_PART}{name}"] = part
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight stored as {self.lts_storage.name}"


@dataclass(frozen=True)
class StoredWeight:
    """What became of one linear.

    Attributes:
        name: The module.
        before: Bytes of its weight.
        after: Bytes of what is stored; the same as ``before`` if it was left alone.
        reason: Why it was left alone, or empty.
    """

    name: str
    before: int
    after: int
    reason: str = ""


@told_by_the_parser_too
@dataclass
class QuantizeWeights(Transform):
    """Stores the weights of linears in few bits: ``transforms=[QuantizeWeights("nf4")]`` on any strategy.

    Stored weights are not trained; everything else is, such as LoRA matrices beside them. Activations and products keep
    their type: the weight is computed from its bits inside the program, where executors can fuse it. Needs no package
    beside torch. Sharded strategies keep stored weights whole on each rank.

    Args:
        storage: ``int8`` (one scale a row), ``int4`` (groups of 64, even steps), ``nf4`` (groups of 64, QLoRA's
            levels), ``fp6`` (e2m3, groups of 32 under powers of two) or ``nvfp4`` (e2m1, groups of 16).
        skip: Patterns of module names (as in ``fnmatch``): these modules, and all inside them, are left alone.
        min_features: Linears with fewer input or output features are left alone, such as LoRA's.
    """

    storage: StorageName
    skip: Sequence[str] = ("*lm_head",)
    min_features: int = 64
    stored: list[StoredWeight] = field(default_factory=list, init=False, compare=False)

    def __post_init__(self) -> None:
        resolve_storage(self.storage)
        check_patterns("skip", self.skip)
        if not isinstance(self.min_features, int) or isinstance(self.min_features, bool) or self.min_features < 1:
            raise ValueError(f"min_features={self.min_features!r} is not allowed: choose a whole number from 1.")
        self.skip = tuple(self.skip)

    def cache_key(self) -> Optional[str]:
        return f"{type(self).__qualname__}:{self.storage}:{self.skip!r}:{self.min_features}"

    def module(self, module: nn.Module) -> None:
        """Store the weights of a module's linears.

        Raises:
            ValueError: If a weight holds NaN or infinity, has no values yet, or is sharded already.
        """
        storage = resolve_storage(self.storage)
        uses: dict[int, int] = {}
        for child in module.modules():
            for parameter in child._parameters.values():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        linears = [(name, child) for name, child in module.named_modules() if type(child) is nn.Linear]
        made = []
        for name, linear in linears:
            size = linear.weight.numel() * linear.weight.element_size()
            reason = self._reason(name, linear, storage, uses[id(linear.weight)])
            made.append(StoredWeight(name, size, size if reason else _store(name, linear, storage), reason))
        if any(not item.reason for item in made):  # or an earlier fit has stored them
            self.stored = made
            rank_zero_info(self.summary())

    def joint(self, trace: Trace) -> None:
        """The backward computes weights from their bits again: saved matrices would cost what the bits spare."""
        stored: set[fx.Node] = set()  # parts of weights, and what only they make
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                if _is_part(trace.origin(node)):
                    stored.add(node)
            elif node.op == "get_attr" or (node.op == "call_function" and stored.issuperset(node.all_input_nodes)):
                stored.add(node)
                if node.all_input_nodes:
                    _torch_aot.mark_recompute(node, _REGION)

    def _reason(self, name: str, linear: nn.Linear, storage: Storage, uses: int) -> str:
        """Why a linear is left alone, or empty."""
        parts = name.split(".")
        owners = [".".join(parts[: end + 1]) for end in range(len(parts))]
        pattern = next((p for p in self.skip if any(fnmatchcase(owner, p) for owner in owners)), None)
        if pattern is not None:
            return f"its name is in skip={pattern!r}"
        if min(linear.weight.shape) < self.min_features:
            return f"too small: fewer than min_features={self.min_features} input or output features"
        if linear.in_features % storage.multiple:
            return f"its {linear.in_features} input features are not a multiple of {storage.multiple}"
        if uses > 1:
            return "its weight is shared with another module"
        if not linear.weight.is_floating_point():
            return f"its weight is {linear.weight.dtype}"
        return ""

    def summary(self) -> str:
        """One line: what was stored, and the bytes before and after."""
        done = [item for item in self.stored if not item.reason]
        left: dict[str, list[str]] = {}
        for item in self.stored:
            if item.reason:
                left.setdefault(item.reason, []).append(item.name)
        before, after = (sum(getattr(item, which) for item in done) / 2**20 for which in ("before", "after"))
        text = f"QuantizeWeights({self.storage!r}): {len(done)} weights, {before:.2f} MiB before, {after:.2f} MiB now"
        reasons = [
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''} ({reason})"
            for reason, names in left.items()
        ]
        return f"{text}; left alone: {'; '.join(reasons)}" if reasons else text


def _is_part(origin: Optional[Origin]) -> bool:
    name = "" if origin is None or origin.kind != "buffer" else (origin.origin or origin.name).rpartition(".")[2]
    return name.startswith(_PART) and name.removeprefix(_PART) in ("codes", "scale", "smallest", "whole")


def _store(name: str, linear: nn.Linear, storage: Storage) -> int:
    """Make a linear one with a stored weight. Returns the bytes of what is stored."""
    weight = linear.weight
    if isinstance(weight, DTensor):
        raise ValueError(f"The weight of `{name}` is sharded already: use QuantizeWeights from the first fit on.")
    if weight.is_meta:
        raise ValueError(
            f"The weight of `{name}` has no values yet (meta device), so it cannot be stored in few bits: load weights "
            "into the model before it is set up."
        )
    try:
        parts = encode(weight, storage)
    except ValueError as error:
        raise ValueError(f"The weight of `{name}`: {error} Put the module in `skip`, or mend the weight.") from error
    del linear._parameters["weight"]
    linear.lts_storage, linear.lts_dtype = storage, weight.dtype  # type: ignore[assignment]
    linear.__class__ = StoredLinear
    for part, value in parts.items():
        linear.register_buffer(f"{_PART}{part}", value)
    return stored_bytes(parts)


def restore_weights(module: nn.Module) -> None:
    """Make every linear with a stored weight a plain one again, with the values that its bits stand for."""
    for child in module.modules():
        if isinstance(child, StoredLinear):
            weight = child.weight
            for name in [name for name in child._buffers if name.startswith(_PART)]:
                del child._buffers[name]
            del child.lts_storage, child.lts_dtype
            child.__class__ = nn.Linear
            child.register_parameter("weight", nn.Parameter(weight))
            for name in [name for name in child._parameters if name != "weight"]:  # in nn.Linear's order
                child._parameters[name] = child._parameters.pop(name)
