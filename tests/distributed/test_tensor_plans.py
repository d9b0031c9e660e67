"""Plans of tensor parallelism, without processes: what they give each module, and what they refuse."""

from typing import Any

import pytest
from torch import nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.plans import linears_text
from lightning_thunder_strategy.distributed.plans.heads import FusedHeads
from lightning_thunder_strategy.distributed.tensor_parallel import apply_plan, resting_dim
from lightning_thunder_strategy.distributed.tensor_styles import STYLES, Form, TensorGroup
from tests.distributed.tensor import LitGPT, Llama

PAIR = TensorGroup(2, 1, "group")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4))


def test_entries_say_where_parameters_are_and_what_a_step_sees() -> None:
    net = mlp()
    plans = apply_plan(net, {"*.0": "colwise", "2": "rowwise", "3": "replicated_with_grad_allreduce"}, PAIR)
    assert dict(plans[net[0]].forms) == {"weight": Form(0, "part"), "bias": Form(0, "part")}
    assert dict(plans[net[2]].forms) == {"weight": Form(1, "part"), "bias": Form(None, "whole")}
    assert dict(plans[net[3]].forms) == {name: Form(None, "whole", True) for name in ("weight", "bias")}
    assert [resting_dim(p) for p in net.parameters()] == [0, 0, 1, None, None, None]
    assert plans[net[1]].forms == () and plans[net[0]] != plans[net[2]]
    apply_plan(net, {"2": "rowwise"}, PAIR)
    assert resting_dim(net[0].weight) is None, "a later plan replaces an earlier one"


def test_rows_of_fused_heads_are_those_of_the_ranks_heads() -> None:
    """8 query heads of 2 rows, 4 key heads, 4 value heads: rank 1 of 2 has the last halves of each."""
    heads = FusedHeads(8, 4, 2)
    assert heads.rows(1, 2) == ((8, 16), (20, 24), (28, 32))
    everything = [row for rank in range(4) for first, last in heads.rows(rank, 4) for row in range(first, last)]
    assert sorted(everything) == list(range(32))


def test_litgpt_is_known_and_its_attention_counts_the_ranks_heads() -> None:
    module = LitGPT(norm_qk=True, n_layer=1)
    plans = apply_plan(module, "auto", PAIR)
    attention = module.net.transformer.h[0].attn
    ((name, local),) = plans[attention].attributes
    assert name == "config" and (local.value.n_head, local.value.n_query_groups) == (4, 2)
    assert attention.config.n_head == 8
    assert plans[attention.norm_q].style == "replicated_with_grad_allreduce"
    assert {plan.style for plan in plans.values()} == {
        "", "colwise", "rowwise", "embedding_rowwise", "colwise_loss_parallel", "replicated_with_grad_allreduce",
    }  # fmt: skip
    assert apply_plan(module.net, "auto", PAIR)[attention].style == plans[attention].style


def test_hugging_face_models_bring_their_plan() -> None:
    module = Llama(tied=True)
    plans = apply_plan(module, "auto", PAIR)
    layer = module.net.model.layers[0]
    assert plans[layer.self_attn.k_proj].style == "colwise" and plans[layer.mlp.down_proj].style == "rowwise"
    assert plans[module.net.lm_head].style == "colwise_loss_parallel"
    assert dict(plans[module.net.lm_head].forms) == {"weight": Form(0, "part")}
    assert dict(plans[module.net.model.embed_tokens].forms) == {"weight": Form(0, "whole")}, (
        "the embedding reads it all"
    )


def _three(**changes: Any) -> Any:
    return LitGPT(n_layer=1, n_head=6, n_query_groups=3, n_embd=24, **changes)


def _sequence(net: nn.Module) -> nn.Sequential:
    return nn.Sequential(net)


def _stored() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lts.QuantizeWeights("int8").module(net)
    return net


@pytest.mark.parametrize(
    ("make", "plan", "message"),
    [
        (mlp, {"0": "colwize"}, r"'colwize' is not an entry that is known. Known are: .*colwise, .*rowwise"),
        (mlp, {"*.nothing": "colwise"}, r"(?s)'\*\.nothing' names no module.*0: 6 -> 8.*\"2\": rowwise"),
        (mlp, {"*": "colwise"}, r"`1` is a torch.nn.modules.activation.Tanh, and 'colwise' is for nn.Linear"),
        (mlp, {"0": "colwise", "*.0": "rowwise"}, r"`0` is named by '0' \(colwise\) and by '\*\.0' \(rowwise\)"),
        (mlp, {}, r"plan=\{\} is not allowed"),
        (mlp, "auto", r"(?s)plan='auto' knows.*2: 8 -> 4"),
        (
            lambda: nn.Sequential(nn.Linear(4, 7)), {"0": "colwise"},
            r"tensor_parallel_size=2 does not divide out_features=7 of `0`.*work for it: \[1, 7\]",
        ),
        (
            lambda: nn.Sequential(nn.Linear(9, 4)), {"0": "rowwise"},
            r"does not divide in_features=9 of `0`.*\[1, 3, 9\]",
        ),
        (_three, "auto", r"does not divide the 3 query groups of `net.transformer.h.0.attn.qkv`.*\[1, 3\]"),
        (
            lambda: LitGPT(padded_vocab_size=11), "auto",
            r"does not divide num_embeddings=11 of `net.transformer.wte`.*or leave `net.transformer.wte` out",
        ),
        (lambda: LitGPT(norm_qk=True, norm_qk_type="olmo2"), "auto", "norm_qk_type='olmo2' normalizes over all heads"),
        (lambda: LitGPT(), {"*.qkv": "rowwise_split_input", "*.qkv*": "colwise"}, "is named by"),
        (lambda: _sequence(mlp()), {"0": "gather_sequence_input", "0.0": "colwise"}, "make it 'local_colwise'"),
        (mlp, {"0": "local_colwise"}, "outside of any 'gather_sequence_input'.*Make it 'colwise'"),
        (lambda: _stored(), {"0": "colwise"}, "the `weight` of `0` is not a parameter"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), {"": "colwise"}, "names no module"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), {"0": "rowwise"},
            "the `weight` of `0` is not a parameter",
        ),
        (
            lambda: nn.TransformerEncoderLayer(8, 2), {"self_attn.out_proj": "rowwise"},
            "`self_attn.out_proj` is a part of an nn.MultiheadAttention",
        ),
        (lambda: LitGPT(), {"*.qkv": "colwise_gather_output"}, "queries, keys and values at once: make it 'colwise'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_that_says_what_does(make: Any, plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_plan(make(), plan, PAIR)


def test_a_layer_that_makes_several_things_at_once_is_not_proposed() -> None:
    fused = nn.Sequential(nn.Linear(8, 24), nn.Linear(8, 8))
    assert "A plan to start from" not in linears_text(dict(fused.named_modules()))
    assert '"0": colwise' in linears_text(dict(mlp().named_modules()))


def test_shared_parameters_must_be_split_alike() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    with pytest.raises(ValueError, match="share the parameter `weight`"):
        apply_plan(net, {"0": "colwise", "1": "rowwise"}, PAIR)


def test_heads_of_hugging_face_attention_must_divide() -> None:
    module = Llama()
    with pytest.raises(ValueError, match=r"does not divide the 4 heads of `net.model.layers.0.self_attn.k_proj`"):
        apply_plan(module, {"*.k_proj": "colwise"}, TensorGroup(8, 0, "group"))


def test_the_docs_name_every_entry() -> None:
    from pathlib import Path

    text = (Path(__file__).parent.parent.parent / "docs/sharding.md").read_text()
    assert all(f"`{name}`" in text for name in STYLES), [name for name in STYLES if f"`{name}`" not in text]


def test_a_plan_is_proposed_for_two_layers_that_follow_each_other_in_a_sequence() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1))
    text = linears_text(dict(nn.ModuleDict({"net": net}).named_modules()))
    assert '  "net.0": colwise\n  "net.2": rowwise' in text and '"net.3"' not in text
