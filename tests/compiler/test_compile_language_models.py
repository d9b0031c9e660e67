"""Language models: one program, values and all gradients as eager."""

import copy

import pytest
import torch
import torch.nn.functional as F
from litgpt import GPT
from litgpt.config import Config
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, DynamicCache, LlamaConfig, LlamaForCausalLM

import lightning_thunder_strategy as lts
from tests.compiler.parity import assert_same, eager_compiled

CONFIGS = {
    "gpt-neox": {
        "n_query_groups": None, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "bias": True,
        "parallel_residual": True,
    },
    "llama": {
        "n_query_groups": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False,
        "parallel_residual": False,
    },
}  # fmt: skip


def small_gpt(name: str) -> GPT:
    torch.manual_seed(0)
    config = Config(
        block_size=16, vocab_size=61, padded_vocab_size=64, n_layer=2, n_head=4, n_embd=32, intermediate_size=48,
        rotary_percentage=1.0, **{"norm_eps": 1e-5, **CONFIGS[name]},
    )  # fmt: skip
    return GPT(config)


def compare(net: nn.Module, loss_of, calls, dtype=torch.float64, atol=0.0) -> nn.Module:
    """Train an eager and a compiled copy on the same calls."""
    net = net.to(dtype)
    other = copy.deepcopy(net)
    compiled = eager_compiled(net)
    for arguments in calls:
        losses = []
        for module in (compiled, other):
            module.zero_grad()
            torch.manual_seed(1)
            loss = loss_of(module, *arguments)
            loss.backward()
            losses.append(loss)
        assert_same(losses[0], losses[1])
        gradients = [{n: p.grad for n, p in module.named_parameters()} for module in (net, other)]
        assert all(g is not None for g in gradients[1].values())
        assert_same(gradients[0], gradients[1], atol=atol)
    return compiled


@pytest.mark.parametrize("name", CONFIGS)
def test_litgpt_trains_as_eager_in_float64(name):
    def loss(module, tokens):
        return F.cross_entropy(module(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(2)
    calls = [(torch.randint(0, 61, (2, 16)),), (torch.randint(0, 61, (2, 16)),)]
    if name == "llama":
        calls.append((torch.randint(0, 61, (3, 12)),))  # as symbolic sizes
    compiled = compare(small_gpt(name), loss, calls)
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    assert step["graph_breaks"] == []


def test_litgpt_generates_with_a_key_value_cache_as_eager():
    net = small_gpt("llama").eval()
    other = copy.deepcopy(net)
    compiled = eager_compiled(net, fullgraph=False)
    results = []
    for module, call in ((net, compiled), (other, other)):
        module.set_kv_cache(batch_size=1)
        tokens = torch.tensor([[5, 6, 7, 8]])
        made = []
        with torch.no_grad():
            logits = call(tokens, torch.arange(4))
            for position in range(4, 10):
                token = logits[:, -1:].argmax(-1)
                made.append(token)
                logits = call(token, torch.tensor([position]))
        results.append(torch.cat(made))
    assert_same(*results)
    assert_same(dict(net.named_buffers()), dict(other.named_buffers()))


def test_llama_trains_as_eager_in_float64():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip

    def loss(module, tokens):
        return module(input_ids=tokens, labels=tokens).loss

    compiled = compare(LlamaForCausalLM(config), loss, [(torch.randint(0, 61, (2, 9)),)] * 2, atol=1e-15)
    with torch.no_grad():
        result = compiled(input_ids=torch.ones(1, 9, dtype=torch.int64))
    assert type(result).__name__ == "CausalLMOutputWithPast" and result.logits.dtype == torch.float64


def test_bert_with_dropout_and_mask_trains_as_eager():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=3
    )
    net = BertForSequenceClassification(config)
    net.train()
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])

    def loss(module, tokens):
        return module(input_ids=tokens, attention_mask=mask, labels=torch.tensor([0, 2])).loss

    compare(net, loss, [(torch.randint(0, 61, (2, 9)),)] * 2, dtype=torch.float32)


def test_a_mixture_of_experts_trains_as_eager_in_pieces():
    torch.manual_seed(0)
    config = Config(
        block_size=16, vocab_size=61, padded_vocab_size=64, n_layer=1, n_head=2, n_embd=16, intermediate_size=24,
        mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, norm_class_name="RMSNorm", bias=False,
        parallel_residual=False, moe_intermediate_size=24, rotary_percentage=1.0,
    )  # fmt: skip
    net = GPT(config).double()
    other = copy.deepcopy(net)
    compiled = eager_compiled(net, fullgraph=False)
    for seed in range(2):
        torch.manual_seed(seed)
        tokens = torch.randint(0, 61, (2, 7))
        for call in (compiled, other):
            call(tokens).square().mean().backward()
        for (name, mine), theirs in zip(net.named_parameters(), other.parameters()):
            assert_same(mine.grad, theirs.grad, name, atol=1e-15)
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    assert step["graph_breaks"] and all(item["line"] > 0 and item["reason"] for item in step["graph_breaks"])


def test_a_cache_of_transformers_is_updated_once_a_call():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    net = LlamaForCausalLM(config).eval()
    compiled = eager_compiled(net, fullgraph=False)
    results = []
    for call in (compiled, net):
        cache = DynamicCache()
        with torch.no_grad():
            for tokens in ([[1, 2, 3]], [[4]], [[5]], [[6]]):
                logits = call(input_ids=torch.tensor(tokens), past_key_values=cache, use_cache=True).logits
        results.append([logits, cache.get_seq_length(), [layer.keys for layer in cache.layers]])
    assert results[0][1] == 6
    assert_same(*results)
