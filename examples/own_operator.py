"""An operator and a fusion executor of your own: python examples/own_operator.py

`swish` stands for any kernel that PyTorch cannot look into, such as one written in Triton. It is chosen for every
`F.silu` of a program, inside activation checkpoints too, and it is declined, with the reason, where it cannot be used.
"""

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts


def swish_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = x.sigmoid()
    return gradient * s * (1 + x * (1 - s))


def only_matrices(x: torch.Tensor) -> "str | None":
    return None if x.dim() == 2 else f"it takes matrices, and this has {x.dim()} dimensions"


@lts.executors.register("swish", replaces=F.silu, when=only_matrices, fake=torch.empty_like, backward=swish_backward)
def swish(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x).mul_(x)  # start your kernel here


@lts.executors.register
class Pointwise(lts.executors.FusionExecutor):
    """Takes runs of additions and multiplications."""

    name = "pointwise"

    def supports(self, node: fx.Node) -> "str | None":
        wanted = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
        return None if node.target in wanted else "it is no addition or multiplication"

    def fuse(self, region: fx.GraphModule, inputs):
        return lambda values: region(*values)  # compile the region here


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: F.silu(self.first(x)) * 2 + 1, x, use_reentrant=False)
        return self.second(y) + F.silu(x.sum())


def main() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 8)
    compiled = lts.compile(net, executors=["swish", "pointwise"])
    results = []
    for call in (compiled, net):
        net.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
    difference = max(float((a - b).abs().max()) for a, b in zip(*results))
    print(lts.explain(compiled))
    print(f"largest difference from eager PyTorch, loss and gradients: {difference:.1e}")


if __name__ == "__main__":
    main()
