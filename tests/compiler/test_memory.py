"""What a compiled function holds is freed when eager PyTorch would free it."""

import gc
import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import lightning_thunder_strategy as lts
from tests.compiler.executors import Pointwise
from tests.compiler.parity import eager_compiled


def live_tensors() -> int:
    gc.collect()
    return sum(type(item) in (torch.Tensor, nn.Parameter) for item in gc.get_objects())


class Wide(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh().cos()
        return x


def test_a_compiled_module_and_its_parameters_are_freed():
    net = Wide(2)
    compiled = eager_compiled(net)
    compiled(torch.randn(3, 8)).sum().backward()
    held = [weakref.ref(item) for item in (net, compiled, net.layers[0].weight)]
    del net, compiled
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


def test_a_compiled_function_and_what_it_closes_over_are_freed():
    held = []

    def train():
        net = Wide(2)
        compiled = eager_compiled(lambda x: net(x).sum())
        compiled(torch.randn(3, 8)).backward()
        held.extend(weakref.ref(item) for item in (compiled, net, net.layers[0].weight))

    train()
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


def test_inputs_and_results_are_freed_without_the_garbage_collector():
    compiled = eager_compiled(Wide())
    compiled(torch.randn(3, 8)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(3, 8, requires_grad=True)
        result = compiled(x)
        held = [weakref.ref(x), weakref.ref(result)]
        result.sum().backward()
        del x, result
        assert [ref() for ref in held] == [None, None]
        with torch.no_grad():
            x = torch.randn(3, 8)
            result = compiled(x)
        held = [weakref.ref(x), weakref.ref(result)]
        del x, result
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_nothing_grows_over_many_calls():
    for executors in (["eager"], [Pointwise()]):
        compiled = lts.compile(Wide(), executors=executors)

        def call(compiled=compiled):
            x = torch.randn(3, 8, requires_grad=True)
            compiled(x).sum().backward()
            with torch.no_grad():
                compiled(x)

        for _ in range(2):
            call()
        before = live_tensors()
        record = compiled._lts_records()[0]
        programs = len(record.programs)
        for _ in range(50):
            call()
        assert live_tensors() <= before
        assert len(record.programs) == programs and len(record.recompiles) <= programs


class Watched:
    """Every storage that passed by, and how many of them were alive each time."""

    storages: list = []
    counts: list = []

    @classmethod
    def note(cls, *tensors):
        cls.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        cls.counts.append(sum(not storage.expired() for storage in cls.storages))

    @classmethod
    def start(cls):
        cls.storages, cls.counts = [], []


@torch.library.custom_op("lts_tests::watch", mutates_args=())
def watch(x: torch.Tensor) -> torch.Tensor:
    """A copy of its input; both are watched from now on."""
    result = x.clone()
    Watched.note(x, result)
    return result


@watch.register_fake
def _(x):
    return torch.empty_like(x)


watch.register_autograd(lambda ctx, grad: watch(grad), setup_context=lambda ctx, inputs, output: None)


def counts_of(call, x):
    """Live tensors of the watched size at each point of forward and backward."""
    Watched.start()
    loss = call(x).sum()
    forward = len(Watched.counts)
    loss.backward()
    return Watched.counts[:forward], Watched.counts[forward:]


def chain(x):
    for _ in range(6):
        x = watch(torch.exp(torch.sin(x)))
    return x


def test_the_backward_frees_saved_values_as_it_goes():
    compiled = eager_compiled(chain)
    counts_of(compiled, torch.randn(5, 77, requires_grad=True))  # compiles
    _, eager = counts_of(chain, torch.randn(5, 77, requires_grad=True))
    _, ours = counts_of(compiled, torch.randn(5, 77, requires_grad=True))
    assert ours[-1] < ours[0] - 4, "saved values stay until the end of the backward"
    assert max(ours) <= max(eager) + 2, (ours, eager)


def test_the_forward_frees_intermediates_as_it_goes():
    compiled = eager_compiled(chain)
    counts = []
    with torch.no_grad():
        compiled(torch.randn(5, 77))
        for call in (chain, compiled):
            Watched.start()
            call(torch.randn(5, 77))
            counts.append(Watched.counts)
    assert max(counts[1]) <= max(counts[0]) + 1, counts


def test_traces_do_not_hold_the_programs_or_their_inputs():
    net = Wide(2)
    compiled = eager_compiled(net)
    x = torch.randn(3, 8)
    compiled(x).sum().backward()
    traces = lts.traces(compiled)
    held = [weakref.ref(net), weakref.ref(net.layers[0].weight), weakref.ref(x)]
    del net, compiled, x
    gc.collect()
    assert [ref() for ref in held] == [None, None, None] and len(traces[0]) == 6
