"""Tensor parallelism: a plan of the layers that the ranks of a group compute together.

A plan names modules by globs (``"*.attn.qkv": colwise``). It changes nothing of the model but what
:func:`~lightning_thunder_strategy.distributed.sharding.parallelize` makes of each module in a step: its parameters are
this rank's part, and its input or output is communicated.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Optional

from torch import Tensor, nn

from lightning_thunder_strategy.distributed.plans import automatic_plan, linears_text
from lightning_thunder_strategy.distributed.plans.heads import FusedHeads, fused_heads, heads_of
from lightning_thunder_strategy.distributed.tensor_styles import (
    ALIASES,
    STYLES,
    Form,
    Plan,
    Style,
    TensorGroup,
    check_entries,
)

_REST = "_lts_tensor_dim"  # attribute of a parameter: the dimension that is split over the tensor-parallel ranks


class PlanError(ValueError):
    """A tensor-parallel plan does not fit the model."""


class _Same:
    """A value that is equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value


_NEITHER = _Same(0)


@dataclass(frozen=True)
class ModulePlan:
    """What one module is in a step. Equal plans make equal classes.

    Attributes:
        forms: Each parameter's name and form.
        style: The entry that names the module, or ``""``.
        group: The ranks.
        attributes: Names of attributes and what they are in a step.
    """

    forms: tuple[tuple[str, Form], ...]
    style: str
    group: TensorGroup
    attributes: tuple[tuple[str, _Same], ...] = ()

    def forward(self, own: Any) -> Optional[Any]:
        """What runs instead of the module's own forward, if anything does."""
        make = STYLES[self.style].forward if self.style else None
        return None if make is None else make(self.group, own)


def resting_dim(parameter: Tensor) -> Optional[int]:
    """The dimension of a parameter that a plan splits over the tensor-parallel ranks, if any."""
    return getattr(parameter, _REST, None)


def apply_plan(root: nn.Module, plan: Plan, group: TensorGroup) -> dict[nn.Module, ModulePlan]:
    """What each module of ``root`` with parameters or attributes of its own is in a step, and mark its parameters.

    Args:
        root: The model. Its parameters are whole, or distributed by the same plan.
        plan: By glob of module names, the kind of entry; ``"auto"``: the model's own.
        group: The tensor-parallel ranks.

    Raises:
        PlanError: If the plan does not fit the model; the message says where and what would.
    """
    named = dict(root.named_modules())
    entries = _entries(named, automatic_plan(named), True) if plan == "auto" else _entries(named, plan)
    found = {name: _Entry(name, style, named, group.size) for name, style in entries.items()}
    _check_nesting(entries)
    rest: dict[Tensor, tuple[Optional[int], str]] = {}
    for entry in found.values():
        for key, parameter in entry.module._parameters.items():
            if parameter is not None and key in entry.style.rest:
                known = rest.setdefault(parameter, (entry.style.rest[key], entry.name))
                if known[0] != entry.style.rest[key]:
                    raise PlanError(
                        f"`{entry.name}` ({entry.kind}) and `{known[1]}` share the parameter `{key}` and split it "
                        "along different dimensions: give them entries that split it alike, or leave one out."
                    )
    for parameter in {p for module in named.values() for p in module._parameters.values() if p is not None}:
        if parameter in rest:
            setattr(parameter, _REST, rest[parameter][0])
        elif _REST in parameter.__dict__:
            delattr(parameter, _REST)
    plans = {}
    configs: dict[tuple, _Same] = {}
    for name, module in named.items():
        entry_of = found.get(name)
        forms = tuple(
            (key, _form(key, parameter, rest, entry_of, group))
            for key, parameter in module._parameters.items()
            if parameter is not None
        )
        plans[module] = ModulePlan(
            forms, entry_of.kind if entry_of else "", group, _attributes(name, module, found, configs, group)
        )
    return plans


def _form(
    key: str, parameter: Tensor, rest: Mapping[Tensor, tuple[Optional[int], str]], entry: "Optional[_Entry]", group: Any
) -> Form:
    at_rest = rest[parameter][0] if parameter in rest else None
    if entry is None:
        return Form(at_rest)
    if key in entry.style.rest:
        if entry.heads is not None:
            return Form(at_rest, "rows", True, entry.heads.rows(group.rank, group.size))
        return Form(at_rest, "part")
    return Form(at_rest, "whole", entry.style.is_summed(key))


def _attributes(
    name: str, module: nn.Module, found: "Mapping[str, _Entry]", configs: dict, group: TensorGroup
) -> tuple[tuple[str, _Same], ...]:
    """A fused projection's parent computes with this rank's number of heads, and an encoder layer without its fast
    path, which would read its layers' weights and never call them."""
    if isinstance(module, nn.TransformerEncoderLayer) and any(inner.startswith(f"{name}.") for inner in found):
        return (("activation_relu_or_gelu", _NEITHER),)
    entry = found.get(f"{name}.qkv" if name else "qkv")
    if entry is None or entry.heads is None:
        return ()
    config = vars(module)["config"]
    key = id(config)
    if key not in configs:
        local = copy.copy(config)
        local.n_head, local.n_query_groups = config.n_head // group.size, config.n_query_groups // group.size
        configs[key] = _Same(local)
    return (("config", configs[key]),)


# ------------------------------------------------------------------------------------------------------------ entries


def _check_nesting(entries: Mapping[str, str]) -> None:
    """The gradient of what is gathered over the sequence is summed there, and must not be summed in a layer inside."""
    gathering = [name for name, style in entries.items() if style == "gather_sequence_input"]
    for name, style in entries.items():
        outer = next((other for other in gathering if name.startswith(f"{other}.")), None)
        if outer is not None and style in ("colwise", "colwise_gather_output", "colwise_loss_parallel"):
            raise PlanError(
                f"plan: `{name}` is {style!r} inside of `{outer}` (gather_sequence_input), where its input's gradient "
                "is summed already: make it 'local_colwise'."
            )
        if outer is None and style == "local_colwise":
            raise PlanError(
                f"plan: `{name}` is 'local_colwise' outside of any 'gather_sequence_input': nothing would sum its "
                "input's gradient. Make it 'colwise'."
            )


def _entries(named: Mapping[str, nn.Module], plan: Mapping[str, str], automatic: bool = False) -> dict[str, str]:
    """By name of a module, its entry. An automatic plan may name layers that this model has not."""
    if not isinstance(plan, Mapping) or not plan:
        raise PlanError(f"plan={plan!r} is not allowed: give 'auto', or entries such as {{'*.attn.qkv': 'colwise'}}.")
    check_entries(plan)
    entries: dict[str, tuple[str, str]] = {}
    for glob, style in plan.items():
        style = ALIASES.get(style, style)
        matched = [name for name in named if name and (fnmatchcase(name, glob) or fnmatchcase("." + name, glob))]
        if not matched and not (automatic and not _names_parameters(named, glob)):
            raise PlanError(
                f"plan: {glob!r} names no module of the model. A `*` stands for any part of a name, dots included.\n"
                + linears_text(named)
            )
        for name in matched:
            before = entries.setdefault(name, (style, glob))
            if before[0] != style:
                raise PlanError(
                    f"plan: `{name}` is named by {before[1]!r} ({before[0]}) and by {glob!r} ({style}): make the globs "
                    "narrower, so that each module has one entry."
                )
    return {name: style for name, (style, _) in entries.items()}


def _names_parameters(named: Mapping[str, nn.Module], glob: str) -> bool:
    parameters = (f"{name}.{key}" for name, module in named.items() for key in module._parameters)
    return any(fnmatchcase(name, glob) for name in parameters)


class _Entry:
    """One module of the plan, checked."""

    def __init__(self, name: str, kind: str, named: Mapping[str, nn.Module], size: int) -> None:
        self.name, self.kind, self.module = name, kind, named[name]
        self.style: Style = STYLES[kind]
        parent = named.get(name.rpartition(".")[0])
        self.heads: Optional[FusedHeads] = None
        self._check_class()
        if isinstance(parent, nn.MultiheadAttention) and self.style.kinds:
            raise PlanError(
                f"plan: `{name}` is a part of an nn.MultiheadAttention, which computes with its parameters itself: "
                "leave it out of the plan."
            )
        for attribute in self.style.divides:
            value = getattr(self.module, attribute)
            _check_divides(f"{attribute}={value} of `{name}` ({kind})", value, size, name)
        if "colwise" in kind and parent is not None:
            self.heads = fused_heads(name, self.module, parent)
            if self.heads is not None and kind not in ("colwise", "local_colwise"):
                raise PlanError(f"plan: `{name}` projects to queries, keys and values at once: make it 'colwise'.")
            what, count = (
                ("query groups", self.heads.groups) if self.heads is not None else heads_of(self.module, parent)
            )
            if count:
                _check_divides(f"the {count} {what} of `{name}` ({kind})", count, size, name)

    def _check_class(self) -> None:
        if not self.style.kinds:
            return
        fitting = next((cls for cls in self.style.kinds if isinstance(self.module, cls)), None)
        original = getattr(type(self.module), "_lts_original", type(self.module))
        if fitting is None or original.forward is not fitting.forward or "forward" in vars(self.module):
            names = " or ".join(f"nn.{cls.__name__}" for cls in self.style.kinds)
            raise PlanError(
                f"plan: `{self.name}` is a {original.__module__}.{original.__name__}, and {self.kind!r} is for {names} "
                "with its own forward: name the layers inside of it, or leave it out of the plan."
            )
        if "weight" in self.style.rest and self.module._parameters.get("weight") is None:
            raise PlanError(
                f"plan: the `weight` of `{self.name}` is not a parameter (QuantizeWeights has stored it in few bits, "
                "or it is parametrized), so it cannot be split: leave the module out of the plan."
            )
        if getattr(self.module, "scale_grad_by_freq", False) or getattr(self.module, "max_norm", None) is not None:
            raise PlanError(
                f"plan: `{self.name}` has scale_grad_by_freq or max_norm, which a part of the rows cannot have: leave "
                "the option or the entry out."
            )


def _check_divides(what: str, value: int, size: int, name: str) -> None:
    if value % size:
        fitting = [number for number in range(1, min(value, 64) + 1) if value % number == 0]
        raise PlanError(
            f"tensor_parallel_size={size} does not divide {what}. Sizes that work for it: {fitting}; or leave `{name}` "
            "out of the plan, with what depends on it."
        )
