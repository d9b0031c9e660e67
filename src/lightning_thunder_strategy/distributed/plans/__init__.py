"""Tensor-parallel plans that come with models."""

from collections.abc import Mapping

from torch import nn

from lightning_thunder_strategy.distributed.plans import huggingface, litgpt

_KNOWN = (litgpt, huggingface)
_SHOWN = 40  # linears in a message


def automatic_plan(named: Mapping[str, nn.Module]) -> dict[str, str]:
    """The plan that ``plan="auto"`` stands for.

    Args:
        named: The model's modules.

    Raises:
        ValueError: If there is none; the message shows the linears and a plan to start from.
    """
    plan: dict[str, str] = {}
    for name, module in named.items():
        for source in _KNOWN:
            for glob, style in (source.plan_of(module) or {}).items():
                plan[f"{name}.{glob}" if name else glob] = style
    if not plan:
        raise ValueError(
            "plan='auto' knows Hugging Face models with a `tp_plan` and LitGPT's GPT, and found neither. Write a plan: "
            "'colwise' for a linear that reads what all ranks have, 'rowwise' for the one that reads its result.\n"
            + linears_text(named)
        )
    return plan


def linears_text(named: Mapping[str, nn.Module]) -> str:
    """The linears of a model, and a plan to start from."""
    linears = {name: module for name, module in named.items() if isinstance(module, nn.Linear)}
    lines = [f"  {name}: {m.in_features} -> {m.out_features}" for name, m in list(linears.items())[:_SHOWN]]
    if len(linears) > _SHOWN:
        lines.append(f"  and {len(linears) - _SHOWN} more")
    start = _start(linears)
    shown = ["Linears of the model:", *(lines or ["  none"])]
    if start:
        shown += ["A plan to start from, to be checked against how the layers follow each other:", "plan:"]
        shown += [f'  "{glob}": {style}' for glob, style in start.items()]
    return "\n".join(shown)


def _start(linears: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Within each parent the last linear is rowwise and the ones before it colwise, if their sizes fit together. Of
    numbered ones, as in a ``Sequential``, two that follow each other."""
    parents: dict[str, list[tuple[str, nn.Linear]]] = {}
    for name, module in linears.items():
        parents.setdefault(name.rpartition(".")[0], []).append((name, module))
    plan: dict[str, str] = {}
    for members in parents.values():
        if all(name.rpartition(".")[2].isdigit() for name, _ in members):
            for (first, one), (second, other) in zip(members, members[1:]):
                if other.in_features == one.out_features and _glob(first) not in plan:
                    plan.update({_glob(first): "colwise", _glob(second): "rowwise"})
            continue
        *before, (last, module) = members
        sizes = [other.out_features for _, other in before]
        if module.in_features in sizes and max(sizes) == module.in_features:  # larger ones make several things at once
            plan.update({_glob(name): "colwise" for name, _ in before})
            plan[_glob(last)] = "rowwise"
    return plan


def _glob(name: str) -> str:
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit() and index + 1 < len(parts)]
    return "*." + ".".join(parts[numbers[-1] + 1 :]) if numbers else name
