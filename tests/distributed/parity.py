"""Checks that training under our strategies gives what other ways to train give. In float64, so that equal is equal."""

from collections.abc import Callable

import torch

from tests.distributed.training import assert_equal_results, fit_alone, fit_case, fit_fsdp2, thunder

KINDS = ("ddp", "zero2", "zero3")
UNUSED_ALLOWED = "ddp_find_unused_parameters_true"
EXACT = {"rtol": 1e-9, "atol": 1e-11}
NORMS_IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-6}


def _float64(check: Callable[[], None]) -> Callable[[], None]:
    def in_float64() -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            check()
        finally:
            torch.set_default_dtype(before)

    return in_float64


def _equals(
    case: str, *oracles: str, kinds: tuple[str, ...] = KINDS, validate: bool = True, alone: dict[str, float] = EXACT
) -> Callable[[], None]:
    """A check that a case under ``kinds`` of our strategies equals what the oracles give. ``alone``: how well the loop
    on one process must be met, whose batches have another size."""

    def check() -> None:
        options = {} if validate else {"limit_val_batches": 0}
        results = {kind: fit_case(thunder(kind), case, **options) for kind in kinds}
        for oracle in oracles:
            if oracle == "alone":
                other = fit_alone(case)
            elif oracle == "fsdp2":
                other = fit_fsdp2(case, **options)
            else:
                other = fit_case(oracle, case, **options)
            for kind, result in results.items():
                try:
                    if oracle == "alone":
                        assert_equal_results(result, other, losses=False, **alone)
                    else:
                        assert_equal_results(result, other, **EXACT)
                except AssertionError as error:
                    raise AssertionError(f"{kind} differs from {oracle}: {error}") from error

    return _float64(check)


check_mlp_with_batch_norm_and_dropout = _equals("mlp", "ddp")


@_float64
def check_own_batch_statistics_on_each_rank() -> None:
    """Without broadcast, buffers are each rank's own, as under FSDP2."""
    other = fit_fsdp2("mlp")
    for kind in ("ddp", "zero3"):
        assert_equal_results(fit_case(thunder(kind, broadcast_buffers=False), "mlp"), other, **EXACT)


check_without_randomness = _equals("smooth", "ddp", "fsdp2", "alone")
check_litgpt = _equals(
    "litgpt", "ddp", "fsdp2", "alone", kinds=("ddp", "zero3"), validate=False, alone=NORMS_IN_FLOAT32
)
check_litgpt_tied = _equals(
    "litgpt_tied", "ddp", "fsdp2", "alone", kinds=("zero2",), validate=False, alone=NORMS_IN_FLOAT32
)
check_hf_llama = _equals("llama", "ddp", "fsdp2", kinds=("ddp", "zero3"), validate=False)
check_gan = _equals("gan", UNUSED_ALLOWED, kinds=("ddp", "zero3"))
check_autoencoder_calling_submodules = _equals("autoencoder", "ddp", "fsdp2", "alone", kinds=("ddp", "zero3"))
check_tied_and_reused_layers = _equals("tied", "ddp", "fsdp2", "alone")

check_odd_shapes = _equals("odd_shapes", "ddp", "alone", kinds=("zero2", "zero3"), validate=False)
check_recurrent_layers = _equals("recurrent", "ddp", "alone", kinds=("zero3",), validate=False)
check_attention = _equals("attention", "ddp", kinds=("zero3",), validate=False)
check_parameter_lists = _equals("lists", "ddp", "alone", kinds=("zero3",), validate=False)
check_weight_norm = _equals("weight_norm", "ddp", "alone", kinds=("ddp", "zero3"), validate=False)
check_convolution = _equals("convolution", "ddp", "alone", kinds=("zero3",), validate=False)
check_lora = _equals("lora", "ddp", "alone", kinds=("ddp", "zero3"), validate=False)
check_unused_parameters = _equals("unused", UNUSED_ALLOWED, kinds=("ddp", "zero3"), validate=False)
check_weight_penalty = _equals("penalty", "ddp", "alone", kinds=("ddp", "zero2"), validate=False)
check_activation_checkpointing_with_dropout = _equals("checkpointed", "ddp", kinds=("zero2", "zero3"), validate=False)
check_parameter_hooks_see_averaged_gradients = _equals("hooked", "alone", kinds=("ddp", "zero3"), validate=False)
check_buffers_that_the_step_changes = _equals("stateful", "ddp", kinds=("ddp", "zero3"))
check_functional_calls_and_weights_taken_without_gradients = _equals(
    "functional", "ddp", "alone", kinds=("ddp", "zero2")
)
