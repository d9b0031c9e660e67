"""GPUs and networks, by the figures of their public datasheets."""

from dataclasses import dataclass
from typing import Literal

import torch

GiB = 2**30


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        name: As options spell it.
        memory: Bytes of device memory.
        bandwidth: Of that memory, bytes a second.
        matrix: Dense floating-point operations a second in products of matrices, by bits of an element.
        vector: The same outside of products, in float32.
        nvlink: Bytes a second that it sends to others of its node, and as many that it receives.
        workspace: Bytes that cuBLAS keeps for itself, from torch's allocator
            (https://docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces").
        source: Where the figures are from.
    """

    name: str
    memory: int
    bandwidth: float
    matrix: dict[int, float]
    vector: float
    nvlink: float
    workspace: int
    source: str

    def flops(self, dtype: torch.dtype) -> float:
        """Operations a second in products of matrices of such elements (float32 without TF32, as torch's default)."""
        bits = 8 * dtype.itemsize if dtype.is_floating_point else 16
        if bits >= 32 or bits not in self.matrix:
            return self.vector
        return self.matrix[bits]


@dataclass(frozen=True)
class Interconnect:
    """What connects nodes.

    Attributes:
        name: As options spell it.
        bandwidth: Bytes a second and direction for each GPU; 0: nothing connects nodes.
        latency: Seconds that a message between nodes takes, at least.
        source: Where the figures are from.
    """

    name: str
    bandwidth: float
    latency: float
    source: str


GPUName = Literal["A100", "H100", "H200", "B200"]
InterconnectName = Literal["nvlink", "infiniband-hdr", "infiniband-ndr", "infiniband-xdr"]

NVLINK_LATENCY = 3e-6  # seconds of a step of a ring within a node
_DATASHEETS = "https://www.nvidia.com/en-us/data-center"

GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", 80 * 10**9, 2.039e12, {16: 312e12}, 19.5e12, 300e9, 8 * 2**20, f"{_DATASHEETS}/a100 (SXM, 80 GB)"),
        GPU("H100", 80 * 10**9, 3.35e12, {16: 989e12, 8: 1979e12}, 67e12, 450e9, 32 * 2**20, f"{_DATASHEETS}/h100"),
        GPU("H200", 141 * 10**9, 4.8e12, {16: 989e12, 8: 1979e12}, 67e12, 450e9, 32 * 2**20, f"{_DATASHEETS}/h200"),
        GPU("B200", 180 * 10**9, 8.0e12, {16: 2250e12, 8: 4500e12, 4: 9000e12}, 75e12, 900e9, 32 * 2**20,
            f"{_DATASHEETS}/dgx-b200"),
    )
}  # fmt: skip
INTERCONNECTS: dict[str, Interconnect] = {
    net.name: net
    for net in (
        Interconnect("nvlink", 0.0, NVLINK_LATENCY, "no network: one node"),
        Interconnect("infiniband-hdr", 25e9, 6e-6, "200 Gb/s a GPU, as in DGX A100"),
        Interconnect("infiniband-ndr", 50e9, 6e-6, "400 Gb/s a GPU, as in DGX H100"),
        Interconnect("infiniband-xdr", 100e9, 6e-6, "800 Gb/s a GPU"),
    )
}
