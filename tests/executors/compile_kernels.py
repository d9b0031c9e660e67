"""Compiles our Triton kernels for GPUs, without one: python -m tests.executors.compile_kernels"""

import itertools

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_thunder_strategy.executors import triton_kernels as kernels
from lightning_thunder_strategy.optimizers import kernels as optimizers

CAPABILITIES = (80, 90, 100)
TYPES = ("fp32", "bf16")


def loss(kind: str, wanted: bool) -> ASTSource:
    signature = {
        "logits": f"*{kind}", "stride": "i32", "target": "*i64", "losses": "*fp32", "factor": "*fp32",
        "classes": "i32", "ignore_index": "i32", "WANTED": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    return ASTSource(kernels._cross_entropy, signature, {"WANTED": wanted, "BLOCK": 4096})


def norm(kind: str, weighted: bool) -> ASTSource:
    signature = {
        "x": f"*{kind}", "weight": f"*{kind}" if weighted else "constexpr", "y": f"*{kind}", "scales": "*fp32",
        "features": "i32", "eps": "fp32", "HAS_WEIGHT": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    constants = {"HAS_WEIGHT": weighted, "BLOCK": 2048, **({} if weighted else {"weight": None})}
    return ASTSource(kernels._rms_norm, signature, constants)


def norm_backward(kind: str, weighted: bool) -> ASTSource:
    signature = {
        "gradient": f"*{kind}", "x": f"*{kind}", "weight": f"*{kind}" if weighted else "constexpr", "scales": "*fp32",
        "grad_x": f"*{kind}", "grad_weight": "*fp32", "rows": "i32", "features": "i32",
        "HAS_WEIGHT": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    constants = {"HAS_WEIGHT": weighted, "BLOCK": 2048, **({} if weighted else {"weight": None})}
    return ASTSource(kernels._rms_norm_backward, signature, constants)


def optimizer(kind: str, switched: bool, name: str) -> ASTSource:
    switches = {"AMSGRAD": switched} if name == "adam" else {"MOMENTUM": True, "NESTEROV": switched}
    types = dict.fromkeys(("PARAMETER", "GRADIENT", "STATE"), tl.bfloat16 if kind == "bf16" else tl.float32)
    constants = {
        "ADDRESSES": 7, "FACTORS": 9, "COMPUTE": tl.float32, "ALIGNED": True, "BLOCK": 2048, **types, **switches,
    }  # fmt: skip
    signature = {"tensor_of_block": "*i32", "addresses": "*i64", "factors": "*fp64"}
    return ASTSource(getattr(optimizers, name), {**signature, **dict.fromkeys(constants, "constexpr")}, constants)


def adam(kind: str, amsgrad: bool) -> ASTSource:
    return optimizer(kind, amsgrad, "adam")


def sgd(kind: str, nesterov: bool) -> ASTSource:
    return optimizer(kind, nesterov, "sgd")


def main() -> None:
    count = 0
    for make, kind, option, capability in itertools.product(
        (loss, norm, norm_backward, adam, sgd), TYPES, (True, False), CAPABILITIES
    ):
        compiled = triton.compile(make(kind, option), target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"], (make.__name__, kind, option, capability)
        if make in (adam, sgd):  # as fast as a copy only if it reads 16 bytes at a time
            assert "ld.global.v4" in compiled.asm["ptx"], (make.__name__, kind, option, capability)
        count += 1
    print(f"{count} kernels compiled for compute capabilities {CAPABILITIES} with Triton {triton.__version__}")


if __name__ == "__main__":
    main()
