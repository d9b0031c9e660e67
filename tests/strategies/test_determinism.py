"""``Trainer(deterministic=True)``: two runs are the same, bit for bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx, nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler import _torch_inductor
from lightning_thunder_strategy.executors import OperatorExecutor
from tests.compiler.executors import Running, overload
from tests.strategies.modules import Classifier
from tests.strategies.training import FEATURES, assert_same_training, classification_data, fit


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The Trainer sets flags of the whole process."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


class Scattering(Classifier):
    """Adds rows at equal places: in the forward, and in the backward of embedding and indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        places = (x.detach()[:, 0] > 0).long()
        x = x + self.table(places)
        sums = torch.zeros(2, FEATURES).index_add(0, places, x)
        return super().forward(x + sums[places])


def twice(executors: list[Any], threads: int, **options: Any) -> Any:
    """Two fits that compile each for itself, on several threads."""
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        torch.set_num_threads(threads)
        strategy = lts.ThunderStrategy(executors=executors)
        data = classification_data(samples=64, batch_size=32, shuffle=True)
        runs.append(fit(Scattering, strategy, data, deterministic=True, **options))
    assert_same_training(*runs)
    assert torch.are_deterministic_algorithms_enabled()
    return runs[0]


def test_eager() -> None:
    assert twice(["eager"], threads=2).step()["executors"].keys() == {"eager"}


def test_inductor_with_its_deterministic_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compile_program = _torch_inductor.inductor_compile

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch._inductor.config.deterministic)
        return compile_program(*args, **kwargs)

    monkeypatch.setattr(_torch_inductor, "inductor_compile", noting)
    with torch._inductor.config.patch(force_disable_caches=True):
        run = twice(["inductor"], threads=2, max_epochs=1)
    assert run.step()["executors"].keys() == {"inductor"}
    assert len(seen) >= 4 and all(seen)
    torch.use_deterministic_algorithms(False)
    assert not torch._inductor.config.deterministic


class AtomicRelu(OperatorExecutor):
    """Stands for a kernel whose result depends on the order of threads."""

    name = "atomic"

    def considers(self, node: fx.Node) -> bool:
        return "relu" in str(getattr(node.target, "__name__", node.target))

    def replacement(self, node: fx.Node) -> Any:
        return torch.nn.functional.relu6

    def nondeterministic(self, node: fx.Node) -> str:
        return "its threads add in any order"


class AtomicSums(Running):
    """Stands for a fusion executor with such kernels."""

    name = "atomics"

    def nondeterministic(self, node: fx.Node) -> Any:
        return "atomic additions" if "sum" in overload(node) else None


@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_that_are_not_deterministic_are_declined_and_named(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    compiled = lts.compile(lambda x: torch.relu(x).sum(0), executors=[AtomicRelu(), AtomicSums(), "eager"])
    compiled(torch.randn(4, 3))
    (program,) = compiled.record.programs
    reasons = {(claim.executor, claim.reason) for claim in program.claims if not claim.accepted}
    expected = {
        ("atomic", "it is not deterministic: its threads add in any order"),
        ("atomics", "it is not deterministic: atomic additions"),
    }
    assert reasons == (expected if deterministic else set())
