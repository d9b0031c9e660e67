"""Steps of optimizers by kernels against torch's own: on a GPU, a CPU, or in Triton's interpreter (``make triton``)."""

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext as nothing
from typing import Any

import pytest
import torch
from torch import nn

from lightning_thunder_strategy.compiler.report import CompileWarning
from lightning_thunder_strategy.executors.packages import import_problem
from lightning_thunder_strategy.executors.triton import interpreted
from lightning_thunder_strategy.optimizers import steps as module
from lightning_thunder_strategy.optimizers.steps import OptimizerSteps

CUDA = torch.cuda.is_available() and not interpreted() and import_problem("triton") is None
DEVICE = "cuda" if CUDA else "cpu"
BY = "triton" if CUDA or interpreted() else "torch fused"

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
CASES = [
    (ADAMW, {}), (ADAMW, {"amsgrad": True, "maximize": True, "weight_decay": 0.1}), (ADAMW, {"betas": (0.3, 0.6)}),
    (ADAM, {"weight_decay": 0.1, "eps": 1e-3}), (ADAMW, {"lr": torch.tensor(1e-2, dtype=torch.float64)}), (SGD, {}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}), (SGD, {"momentum": 0.9, "dampening": 0.5}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]  # fmt: skip


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(3, 5), (), (2048,), (2, 2049), (0, 4)]
    made = [nn.Parameter(torch.randn(shape, dtype=dtype, device=DEVICE)) for shape in shapes]
    made.append(nn.Parameter(torch.randn(6, 4, dtype=dtype, device=DEVICE).t()))  # dense, in another order
    return [*made, nn.Parameter(torch.randn(9, dtype=dtype, device=DEVICE))]  # which gets no gradient


def give_gradients(held: list, seed: int, without: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in held[:-without]:
        values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        parameter.grad = values.to(parameter.device, parameter.dtype)


def optimizer_of(cls: Any, held: list, options: dict) -> torch.optim.Optimizer:
    groups = [{"params": held[:3]}, {"params": held[3:], "lr": 0.003}]
    return cls(groups, **{"lr": 1e-2, **copy.deepcopy(options)})


@contextmanager
def torch_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def step(optimizer: torch.optim.Optimizer, steps: "OptimizerSteps | None" = None) -> dict[str, Any]:
    """A step by kernels, and what was written down of it."""
    steps = steps or OptimizerSteps("auto", on_error="raise")
    with steps.taken(optimizer):
        optimizer.step()
    return steps.records[0].to_dict()


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_values_and_states_are_torchs_and_schedules_are_followed(cls: Any, options: dict) -> None:
    theirs, ours = parameters(), parameters()
    reference, optimizer = optimizer_of(cls, theirs, options), optimizer_of(cls, ours, options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (reference, optimizer)]
    for index in range(4):
        for held in (theirs, ours):
            give_gradients(held, index, without=2 if index == 0 else 1)  # one parameter's first step is the second
        reference.step()
        done = step(optimizer)
        assert done == {"name": cls.__name__, "parameters": {BY: 5 + (index > 0)}, "reasons": {}}
        for scheduler in schedulers:
            scheduler.step()
    for a, b in zip(ours, theirs):
        assert_close(a, b)
    assert_close(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize(("cls", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_below_float64_are_rounded_once_a_step(cls: Any, options: dict, dtype: torch.dtype) -> None:
    if cls is SGD and dtype is torch.bfloat16 and BY == "torch fused":
        pytest.skip("left to torch: the next test")
    theirs, ours = [p.detach().double().requires_grad_() for p in parameters(dtype)], parameters(dtype)
    reference, optimizer = optimizer_of(cls, theirs, options), optimizer_of(cls, ours, options)
    for index in range(3):
        give_gradients(ours, index)
        for wide, held in zip(theirs, ours):
            wide.grad = None if held.grad is None else held.grad.double()
        reference.step()
        assert step(optimizer)["parameters"] == {BY: 6}
    rounding = 2**-7 if interpreted() else 2**-8  # the interpreter cuts bits off
    limit = 3 * (1e-6 if dtype == torch.float32 else rounding)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)


@pytest.mark.skipif(BY != "torch fused", reason="Triton takes them")
@pytest.mark.parametrize(("cls", "dtype"), [(SGD, torch.bfloat16), (SGD, torch.float16), (ADAM, torch.float16)])
def test_types_that_torchs_fused_kernel_gets_wrong_are_left(cls: Any, dtype: torch.dtype) -> None:
    theirs, ours = parameters(dtype), parameters(dtype)
    reference, optimizer, steps = cls(theirs, lr=0.1), cls(ours, lr=0.1), OptimizerSteps("auto")
    give_gradients(theirs, 0), give_gradients(ours, 0)
    reference.step()
    with pytest.warns(CompileWarning, match=f"they are {dtype}, for which torch's fused kernel on a CPU is not exact"):
        assert step(optimizer, steps)["parameters"] == {"torch": 6}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("cls", "options"), [(ADAMW, {"amsgrad": True}), (SGD, {"momentum": 0.9})])
def test_a_state_of_torch_goes_on_here_and_the_reverse(cls: Any, options: dict) -> None:
    theirs, ours = parameters(), parameters()
    del theirs[5], ours[5]  # torch's own SGD keeps a buffer in the order of the first gradient
    reference, optimizer = optimizer_of(cls, theirs, options), optimizer_of(cls, ours, options)
    for index in range(4):
        give_gradients(theirs, index), give_gradients(ours, index)
        reference.step()
        step(optimizer) if index % 2 else optimizer.step()
        optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for a, b in zip(ours, theirs):
        assert_close(a, b)


def test_steps_may_be_counted_in_another_type() -> None:
    theirs, ours = parameters(), parameters()
    with torch_default(torch.float64):  # as Lightning's precision 64-true has it in steps
        for held, take in ((theirs, lambda each: each.step()), (ours, step)):
            give_gradients(held, 0)
            optimizer = ADAMW(held)
            take(optimizer), take(optimizer)
            assert optimizer.state[held[0]]["step"].dtype == torch.float64 and optimizer.state[held[0]]["step"] == 2
    for a, b in zip(ours, theirs):
        assert_close(a, b)


def test_a_gradient_of_another_type_is_left_to_torch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    held = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    held.grad_dtype = torch.float32
    held.grad = torch.ones(3)
    steps = OptimizerSteps("auto")
    with pytest.warns(CompileWarning, match="their gradients or states have another type than they have"):
        assert step(SGD([held]), steps)["parameters"] == {"torch": 1}


def test_autograd_sees_that_the_parameters_have_changed() -> None:
    held = parameters()[:1]
    loss = (held[0] * held[0]).sum()
    loss.backward(retain_graph=True)
    step(ADAMW(held))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_and_closures_run_and_the_closure_sees_an_optimizer_as_it_is() -> None:
    held, seen = parameters(), []
    optimizer, steps = optimizer_of(ADAMW, held, {}), OptimizerSteps("auto", on_error="raise")
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        give_gradients(held, 0)
        seen.append("_init_group" in vars(optimizer))
        return 3.0

    with steps.taken(optimizer) as outside:
        assert optimizer.step(outside(closure)) == 3.0
    assert seen == ["before", False, "after"]
    assert steps.records[0].parameters == {BY: 6}


def test_another_optimizer_is_not_affected_and_nothing_stays_after_an_error() -> None:
    ours, theirs = parameters(), parameters()
    give_gradients(ours, 0), give_gradients(theirs, 0)
    optimizer, other = ADAMW(ours), ADAMW(theirs)
    steps = OptimizerSteps("auto", on_error="raise")
    before = {name: getattr(ADAMW, name) for name in ("step", "_init_group")}

    def fails() -> None:
        raise KeyError("the user's own error")

    with pytest.raises(KeyError), steps.taken(optimizer) as outside:
        other.step()
        thread = threading.Thread(target=other.step)
        thread.start(), thread.join()
        optimizer.step(outside(fails))
    assert [record.to_dict()["parameters"] for record in steps.records] == [{}]
    assert "_init_group" not in vars(optimizer) and other.state[theirs[0]]["step"] == 2
    assert before == {name: getattr(ADAMW, name) for name in ("step", "_init_group")}


class Own(ADAMW):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


class OwnSgd(SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


class Renamed(Own):
    pass


LEFT = [
    (ADAMW, {"foreach": True}, "foreach=True asks for an implementation of torch"),
    (ADAMW, {"fused": True}, "fused=True asks for an implementation of torch"),
    (SGD, {"foreach": False}, "foreach=False asks for an implementation of torch"),
    (ADAM, {"differentiable": True}, "differentiable=True needs an implementation of torch"),
    (torch.optim.RMSprop, {}, "there is no kernel for RMSprop"),
    (Own, {}, "its class has a step of its own, other than that of AdamW"),
    (Renamed, {}, "its class has a step of its own, other than that of AdamW"),
    (OwnSgd, {}, "its class has a step of its own, other than that of SGD"),
]


@pytest.mark.parametrize(("cls", "options", "reason"), LEFT)
def test_what_torch_must_do_is_left_to_it_and_told_once(cls: Any, options: dict, reason: str) -> None:
    theirs, ours = parameters(), parameters()
    if options.get("differentiable"):  # parameters must not be leaves that require gradients
        theirs, ours = ([p.detach() for p in held] for held in (theirs, ours))
    reference, optimizer = optimizer_of(cls, theirs, options), optimizer_of(cls, ours, options)
    steps = OptimizerSteps("auto")
    with pytest.warns(CompileWarning) as caught:
        for index in range(2):
            give_gradients(theirs, index), give_gradients(ours, index)
            reference.step()
            step(optimizer, steps)
    told = [str(item.message) for item in caught if item.category is CompileWarning]
    assert len(told) == 1 and told[0].endswith(f"by torch's own step, because {reason}."), told
    done = steps.records[0].to_dict()
    assert list(done["parameters"]) == ["torch"] and list(done["reasons"]) == [reason]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=rf"compile_optimizer='auto' cannot take over .*{reason}.*on_error='raise'"):
        step(optimizer)


@pytest.mark.parametrize("cls", [SGD, ADAMW])
@pytest.mark.parametrize("refused", ["option", "type"])
def test_what_is_refused_of_a_later_group_is_an_error_before_any_parameter_changes(cls: Any, refused: str) -> None:
    held = [nn.Parameter(torch.ones(3, dtype=torch.float64, device=DEVICE)) for _ in range(3)]
    if refused == "type":
        held[2] = nn.Parameter(torch.ones(3, dtype=torch.complex128, device=DEVICE))
    give_gradients([*held[:2], None], 0), setattr(held[2], "grad", torch.ones_like(held[2]))
    last = {"params": held[2:], **({"foreach": True} if refused == "option" else {})}
    optimizer = cls([{"params": [parameter]} for parameter in held[:2]] + [last])
    before, steps = copy.deepcopy(held), OptimizerSteps("auto", on_error="raise")
    with pytest.raises(RuntimeError, match="cannot take over 1 parameters of .*(foreach=True|complex128)"):
        step(optimizer, steps)
    torch.testing.assert_close(held, before, rtol=0, atol=0)
    held[2].grad = None  # without a gradient nothing has to update it
    assert step(optimizer, steps)["parameters"] == {BY: 2}


def test_a_step_compiled_by_the_user_is_left_to_torch() -> None:
    held = parameters()
    give_gradients(held, 0)
    optimizer = ADAMW(held)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    with pytest.raises(RuntimeError, match="its step is compiled with torch.compile"):
        step(optimizer)


def test_only_the_parameters_that_need_it_are_left() -> None:
    theirs, ours = parameters(torch.float32), parameters(torch.float32)
    for held in (theirs, ours):
        gaps = torch.arange(24.0, device=DEVICE).reshape(4, 6)[:, ::2]
        held[-1] = nn.Parameter(torch.arange(12.0, device=DEVICE).cfloat())
        held.append(nn.Parameter(gaps))
    reference, optimizer = optimizer_of(ADAMW, theirs, {}), optimizer_of(ADAMW, ours, {})
    steps = OptimizerSteps("auto")
    for index in range(3):
        for held in (theirs, ours):
            give_gradients(held, index, without=2)
            held[-2].grad, held[-1].grad = torch.ones_like(held[-2]), torch.ones_like(held[-1])
        reference.step()
        with pytest.warns(CompileWarning) if index == 0 else nothing():
            done = step(optimizer, steps)
    assert done["parameters"] == {BY: 6, "torch": 2}
    reasons = {"their type is torch.complex64", "their memory is in another order than that of their states"}
    assert set(done["reasons"]) == reasons
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs])
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict())


def test_strides_of_dimensions_of_one_do_not_matter() -> None:
    held = nn.Parameter(torch.ones(1, 8, dtype=torch.float64, device=DEVICE)[:, 4:])
    held.grad = torch.ones(1, 4, dtype=torch.float64, device=DEVICE)
    optimizer = SGD([held], momentum=0.9)
    optimizer.state[held]["momentum_buffer"] = torch.zeros_like(held.grad)
    assert held.stride() == (8, 1) and held.grad.stride() == (4, 1)
    assert step(optimizer)["parameters"] == {BY: 1}


def test_sparse_gradients_are_left_to_torch() -> None:
    theirs, ours = ([nn.Embedding(5, 3, sparse=True, device=DEVICE) for _ in range(1)] for _ in range(2))
    ours[0].load_state_dict(theirs[0].state_dict())
    for (embedding,), steps in ((theirs, None), (ours, OptimizerSteps("auto"))):
        embedding(torch.tensor([1, 3], device=DEVICE)).sum().backward()
        optimizer = SGD(embedding.parameters(), lr=0.1)
        if steps is None:
            optimizer.step()
            continue
        with pytest.warns(CompileWarning, match="their gradients are sparse"):
            step(optimizer, steps)
    torch.testing.assert_close(ours[0].weight, theirs[0].weight, rtol=0, atol=0)


def test_a_kernel_that_fails_is_told_and_torch_takes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler here\nmore")

    monkeypatch.setattr(module, "implementation_for", lambda *_: ("triton", ""))
    monkeypatch.setattr(module.UPDATES[0], "triton", fails, raising=False)
    theirs, ours = parameters(), parameters()
    give_gradients(theirs, 0), give_gradients(ours, 0)
    ADAMW(theirs).step()
    steps = OptimizerSteps("auto")
    with pytest.warns(CompileWarning, match="because the Triton kernel failed: .*no compiler here"):
        assert step(ADAMW(ours), steps)["parameters"] == {"torch": 6}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no compiler here"):
        step(ADAMW(ours))


def test_records_are_of_the_newest_step_and_stay_in_their_process() -> None:
    held = parameters()
    optimizer, steps = ADAMW(held), OptimizerSteps("auto")
    give_gradients(held, 0)
    step(optimizer, steps)
    held[0].grad = None
    assert step(optimizer, steps)["parameters"] == {BY: 5}
    copied = pickle.loads(pickle.dumps(steps))
    assert (copied.wanted, copied.on_error, copied.records) == ("auto", "fallback", [])
    steps.forget()
    assert steps.records == []


def test_nothing_happens_unless_it_is_asked_for() -> None:
    held = parameters()
    give_gradients(held, 0)
    optimizer, steps = ADAMW(held), OptimizerSteps()
    with steps.taken(optimizer):
        assert "_init_group" not in vars(optimizer)
        optimizer.step()
    assert steps.records == []
