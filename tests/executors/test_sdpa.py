"""Attention by the backend that is named: values and gradients of float64 eager, and what each backend declines."""

import pytest
import torch
import torch.nn.functional as F

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors import SdpaExecutor
from tests.executors.reference import check, claims, compiled_with, laid_out
from tests.opinfo import sweep

RUN_HERE = ("flash", "math")
OPERATION = {"flash": "_scaled_dot_product_flash_attention_for_cpu", "math": "_safe_softmax"}


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_float64(backend, dtype):
    torch.manual_seed(0)
    cases = [("dense", {}), ("swapped", {"is_causal": True, "scale": 0.3}), ("expanded", {}), ("sliced", {})]
    for layout, options in cases[: 3 if backend == "flash" else 4]:
        inputs = [laid_out((2, 3, 5, 4), dtype, layout) for _ in range(3)]
        compiled = check(
            lambda q, k, v, options=options: F.scaled_dot_product_attention(q, k, v, **options),
            inputs, SdpaExecutor(backend),
        )  # fmt: skip
        assert claims(compiled, "sdpa") == [(True, "")]
        assert f"aten.{OPERATION[backend]}" in str(lts.traces(compiled)[0][-2])


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("shapes", [[(1, 1, 1, 1)] * 3, [(2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 4)], [(0, 2, 3, 4)] * 3])
def test_sizes_of_zero_and_one(backend, shapes):
    inputs = [laid_out(shape, torch.float64, "dense") for shape in shapes]
    check(F.scaled_dot_product_attention, inputs, SdpaExecutor(backend))


@pytest.mark.parametrize("backend", RUN_HERE)
def test_torchs_own_samples(backend):
    """Every sample that torch has for attention: masks, groups of heads, dropout, other shapes."""
    (op,) = sweep.operators(["nn.functional.scaled_dot_product_attention"])
    outcome = sweep.check(op, torch.float32, [SdpaExecutor(backend)], samples=4)
    assert outcome.result == "equal", outcome


q = (2, 2, 5, 4)
DECLINED = {
    "f32[2, 2, 5, 4], whose last dimension is not dense, on cpu": ([q] * 3, {"layout": "transposed"}),
    "no kernel for f32[2, 5, 4]": ([(2, 5, 4)] * 3, {}),
    "f32[2, 2, 5, 4], f32[2, 2, 5, 4], f32[2, 2, 5, 8]": ([q, q, (2, 2, 5, 8)], {}),
    "dropout_p=0.5 on cpu": ([q] * 3, {"dropout_p": 0.5}),
    "f32[5, 5]": ([q, q, q, (5, 5)], {}),  # a mask that needs a gradient
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_flash_declines_runs_as_before_with_the_reason_in_the_report(reason):
    shapes, options = DECLINED[reason]
    torch.manual_seed(0)
    options = dict(options)
    inputs = [laid_out(shape, torch.float32, options.get("layout", "dense")) for shape in shapes]
    options.pop("layout", None)
    function = lambda *args: F.scaled_dot_product_attention(*args, **options)  # noqa: E731
    compiled = compiled_with(function, SdpaExecutor())
    results = []
    for call in (compiled, function):
        torch.manual_seed(0)
        results.append(call(*inputs))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    ((accepted, found),) = claims(compiled, "sdpa")
    assert not accepted and found.startswith("torch's flash attention has no kernel for") and reason in found


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_backends_for_gpus_say_why_they_cannot_run_on_this_machine(backend):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=f"'sdpa' cannot run here: backend='{backend}' needs a CUDA GPU: .*CUDA"):
        lts.compile(lambda x: x, executors=[SdpaExecutor(backend)])


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend='flush' is not allowed: choose one of 'flash'"):
        SdpaExecutor("flush")
