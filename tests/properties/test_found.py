"""What random examples have found, each as small as it gets."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_thunder_strategy as lts
from tests.compiler.parity import check_function, check_module, eager_compiled
from tests.properties.blocks import BLOCKS, WRAPPERS


class Transposed(nn.Module):
    """BatchNorm gives other strides than its fake kernel says; views of its result follow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x), x.reshape(-1)


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_batch_norm_between_transposes(train: bool) -> None:
    check_module(Transposed, [(torch.randn(2, 3, 4),), (torch.randn(5, 5, 4),)], train=train, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        check_module(Transposed, [(torch.randn(2, 3, 4),)], train=train, backward=False, rtol=1e-5, atol=1e-6)


class ReturnsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x[0], x.reshape(-1)


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_views_of_batch_norm_that_are_returned(train: bool) -> None:
    for dynamic in (True, None):
        make = lambda module: eager_compiled(module, dynamic=dynamic)  # noqa: B023, E731
        calls = [(torch.randn(3, 2, 4),), (torch.randn(5, 5, 4),)]
        check_module(ReturnsAView, calls, train=train, compiler=make, rtol=1e-5, atol=1e-5)


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x.relu(), 0.5) + F.alpha_dropout(x, 0.5, training=True) + torch.rand_like(x)


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_random_numbers_after_batch_norm_between_transposes(train: bool) -> None:
    """They come in the order of memory, which BatchNorm decides."""
    norm = nn.BatchNorm1d(4).train(train)

    def function(x: Tensor) -> Tensor:
        return _dropped(norm(x.transpose(1, 2)).transpose(1, 2))

    x = torch.randn(5, 3, 4)
    results = []
    for call in (function, lts.compile(function, executors=["eager"], config=lts.CompileConfig(fullgraph=True))):
        torch.manual_seed(0)
        result = call(x)
        results.append((result.detach().clone(), torch.rand(1), result.add_(1).detach()))
    torch.testing.assert_close(*results)


def test_gradients_of_cross_entropy_of_transposed_scores() -> None:
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    target = torch.tensor([0, 3, 1])
    check_function(lambda x, weight: F.cross_entropy((weight @ x).t(), target), x, weight)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_alpha_dropout_of_permuted_tensors_draws_as_eager(order: tuple[int, ...]) -> None:
    x = torch.randn(3, 5, 4).permute(order)
    check_function(lambda x: (F.alpha_dropout(x, 0.3, training=True), torch.rand(2)), x)
    check_function(lambda x: torch.empty_like(x).bernoulli_(0.4), x)


def test_a_fault_inside_dynamo_is_a_compile_error_that_names_the_line() -> None:
    make = lambda: WRAPPERS["Twice"](WRAPPERS["Checkpointed"](BLOCKS["Embedded"](4)))  # noqa: E731
    x = torch.randn(3, 2, 4)
    try:
        torch.testing.assert_close(eager_compiled(make(), dynamic=True)(x).shape, x.shape)  # a torch without the fault
    except lts.CompileError as error:
        assert "cannot be compiled as one program" in str(error) and len(str(error).splitlines()) <= 2, error
        assert error.file is not None and error.file.endswith(".py") and error.line
    torch._dynamo.reset()
    check_module(make, [(x,)], compiler=lambda module: eager_compiled(module, dynamic=True, fullgraph=False))


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["equal", "views"])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_two_parameters_with_one_gradient_do_not_share_its_memory(executor: str, shape: tuple[int, ...]) -> None:
    """Clipping edits gradients in place: once each."""
    a, b = torch.randn(4, requires_grad=True), torch.randn(shape, requires_grad=True)
    compiled = lts.compile(lambda a, b: (a + b.flatten().clone()).square().sum(), executors=[executor])
    compiled(a, b).backward()
    assert torch.equal(a.grad, b.grad.flatten())
    assert a.grad.untyped_storage().data_ptr() != b.grad.untyped_storage().data_ptr()


def test_a_compiled_step_updates_batch_norm_of_a_checkpointed_region_once() -> None:
    """Eager PyTorch computes the region again in the backward, and updates it once more."""
    module = WRAPPERS["Checkpointed"](BLOCKS["BatchNorm"](4))
    eager_compiled(module)(torch.randn(3, 2, 4, requires_grad=True)).square().sum().backward()
    assert [buffer.item() for name, buffer in module.named_buffers() if name.endswith("num_batches_tracked")] == [1]
