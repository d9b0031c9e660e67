"""The plan of LitGPT's GPT."""

from typing import Optional

from torch import nn

_ATTENTION = {"qkv": "colwise", "proj": "rowwise"}
_MLP = {"fc": "colwise", "fc_1": "colwise", "fc_2": "colwise", "proj": "rowwise"}


def plan_of(module: nn.Module) -> Optional[dict[str, str]]:
    """The plan, if the module is such a model: attention by heads, MLPs by features, embeddings by vocabulary.

    Norms, routers of experts and what else there is are computed by all ranks.
    """
    if not any(cls.__module__.startswith("litgpt.") and cls.__name__ == "GPT" for cls in type(module).__mro__):
        return None
    plan = {"transformer.wte": "embedding_rowwise", "lm_head": "colwise_loss_parallel"}
    for name, child in module.named_modules():
        kind = _kind(child)
        for own, style in (_ATTENTION if kind == "attention" else _MLP if kind == "mlp" else {}).items():
            if isinstance(getattr(child, own, None), nn.Module):
                plan[f"{name}.{own}"] = style
        for norm in ("norm_q", "norm_k") if kind == "attention" else ():
            if getattr(child, norm, None) is not None:  # each rank normalizes its own heads with the same weight
                plan[f"{name}.{norm}"] = "replicated_with_grad_allreduce"
    return plan


def _kind(module: nn.Module) -> str:
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("litgpt.")}
    if "CausalSelfAttention" in names:
        return "attention"
    return "mlp" if names & {"LLaMAMLP", "GptNeoxMLP"} else ""
