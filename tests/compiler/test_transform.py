"""Passes edit the program at each stage, and what they do shows in results, traces and cache keys."""

import operator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.transform import ProgramRefusedError, TransformError
from tests.compiler.parity import assert_same


def replace(trace, old, new):
    """Exchange the target of every operation called ``old``."""
    for node in trace.graph.nodes:
        if node.op == "call_function" and old in str(node.target):
            node.target = new


@dataclass(frozen=True)
class Subtract(lts.Transform):
    """Turns additions into subtractions in the acquired program."""

    def acquired(self, trace):
        for node in trace.graph.nodes:
            if node.target in (operator.add, torch.add):
                node.target = operator.sub


class DoubleJoint(lts.Transform):
    """Doubles every sine, and so its gradient, in the joint program."""

    def joint(self, trace):
        for node in list(trace.graph.nodes):
            if "aten.sin" in str(node.target):
                with trace.graph.inserting_after(node):
                    double = trace.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
                double.meta = dict(node.meta)
                node.replace_all_uses_with(double, delete_user_cb=lambda user, double=double: user is not double)


class CosineBackward(lts.Transform):
    """Exchanges sine and cosine: in the forward, and the other way in the backward."""

    def partitioned(self, forward, backward):
        replace(forward, "aten.sin", torch.ops.aten.cos.default)
        if backward is not None:
            replace(backward, "aten.cos", torch.ops.aten.tanh.default)


def run(function, *transforms, executors=("eager",)):
    compiled = lts.compile(function, executors=list(executors), transforms=list(transforms))
    x = torch.linspace(0.1, 1, 4).requires_grad_()
    result = compiled(x)
    return compiled, result, torch.autograd.grad(result.sum(), x)[0], x.detach()


def text(compiled, provenance):
    return "\n".join(str(trace) for trace in lts.traces(compiled)[0] if trace.provenance.startswith(provenance))


def test_a_pass_edits_the_acquired_program():
    compiled, result, grad, x = run(lambda x: x * 3 + x, Subtract())
    assert_same(result.detach(), x * 3 - x)
    assert_same(grad, torch.full((4,), 2.0))
    assert " + " in text(compiled, "as read") and " - " in text(compiled, "after Subtract")
    assert "aten.sub.Tensor" in text(compiled, "after dispatch")


def test_a_pass_edits_the_joint_program():
    compiled, result, grad, x = run(lambda x: x.sin() * x, DoubleJoint())
    assert_same(result.detach(), x.sin() * 2 * x)
    assert_same(grad, x.sin() * 2 + x * x.cos())  # the factor is put in after the derivative was taken
    stages = [trace.provenance.split(",")[0] for trace in lts.traces(compiled)[0] if trace.stage == "joint"]
    assert stages == ["forward and backward as one program", "after DoubleJoint"]


def test_a_pass_edits_forward_and_backward():
    compiled, result, grad, x = run(lambda x: x.sin(), CosineBackward())
    assert_same(result.detach(), x.cos())
    assert_same(grad, x.tanh())
    assert text(compiled, "after CosineBackward").count("def program(") == 2


def test_a_pass_edits_inference_without_a_backward():
    seen = []

    class Watch(lts.Transform):
        def partitioned(self, forward, backward):
            seen.append((forward.stage, backward))

    compiled = lts.compile(lambda x: x.sin(), executors=["eager"], transforms=[CosineBackward(), Watch()])
    x = torch.ones(2)
    assert_same(compiled(x), x.cos())
    assert seen == [("forward", None)]


def test_a_pass_edits_the_module_before_anything_is_compiled():
    class Freeze(lts.Transform):
        def module(self, module):
            module.weight.requires_grad_(False)
            module.bias.data.fill_(7.0)

    net = nn.Linear(3, 2)
    compiled = lts.compile(net, executors=["eager"], transforms=[Freeze()])
    result = compiled(torch.zeros(1, 3))
    assert_same(result.detach(), torch.full((1, 2), 7.0))
    result.sum().backward()
    assert net.weight.grad is None and net.bias.grad is not None


def test_passes_run_in_the_order_given():
    class Add(lts.Transform):
        def acquired(self, trace):
            replace(trace, "sub", operator.add)

    _, result, _, x = run(lambda x: x * 3 + x, Subtract(), Add())
    assert_same(result.detach(), x * 3 + x)
    _, result, _, x = run(lambda x: x * 3 + x, Add(), Subtract())
    assert_same(result.detach(), x * 3 - x)


def test_a_new_operation_from_a_pass_is_printed_and_counted():
    class Noise(lts.Transform):
        def acquired(self, trace):
            (output,) = trace.graph.find_nodes(op="output")
            with trace.graph.inserting_before(output):
                made = trace.graph.call_function(torch.add, (output.args[0][0], 5))
            output.args = ((made,),)

    compiled, result, _, x = run(lambda x: x.sin(), Noise())
    assert_same(result.detach(), x.sin() + 5)
    assert "torch.add(" in text(compiled, "after Noise")


def test_a_pass_that_fails_is_an_error_that_names_it():
    class Broken(lts.Transform):
        def joint(self, trace):
            raise KeyError("oops")

    class Dangling(lts.Transform):
        def acquired(self, trace):
            output = trace.graph.output_node()
            output.append(output.args[0][0])  # uses a value before it is made

    for broken, stage in ((Broken(), "joint"), (Dangling(), "acquired")):
        for fullgraph in (True, False):
            config = lts.CompileConfig(fullgraph=fullgraph)
            compiled = lts.compile(lambda x: x.sin(), executors=["eager"], transforms=[broken], config=config)
            with pytest.raises(TransformError, match=f"The pass {broken.name} failed on the {stage} program"):
                compiled(torch.ones(2, requires_grad=True))


def test_a_pass_can_refuse_a_program():
    class Refuse(lts.Transform):
        def acquired(self, trace):
            raise ProgramRefusedError("not this program")

    compiled = lts.compile(lambda x: x.sin(), executors=["eager"], transforms=[Refuse()])
    with pytest.raises(ProgramRefusedError, match="^not this program$"):
        compiled(torch.ones(2))


def test_bad_transforms_are_named():
    with pytest.raises(ValueError, match="transforms=.*<class .*Subtract.* is not a Transform"):
        lts.compile(lambda x: x, transforms=[Subtract])


# --------------------------------------------------------------------------------------------------------- cache keys


class Options(lts.Transform):
    def __init__(self, **options):
        self.__dict__.update(options)


def test_equal_passes_have_equal_keys_and_other_options_other_keys():
    assert Options(scale=2).cache_key() == Options(scale=2).cache_key()
    keys = {Options(scale=2).cache_key(), Options(scale=3).cache_key(), Options(scale=2, name_="a").cache_key()}
    assert len(keys) == 3 and None not in keys
    assert Options(sizes=(1, 2)).cache_key() != Options(sizes=(2, 1)).cache_key()
    assert Options(dtype=torch.float16).cache_key() != Options(dtype=torch.bfloat16).cache_key()


def test_classes_of_the_same_name_with_other_code_have_other_keys():
    def make(value):
        if value:

            class Pass(lts.Transform):
                def acquired(self, trace):
                    return None

        else:

            class Pass(lts.Transform):
                def acquired(self, trace):
                    trace.graph.lint()

        return Pass()

    assert make(True).cache_key() != make(False).cache_key()


def test_what_is_not_plain_data_disables_the_cache():
    assert Options(function=lambda x: x).cache_key() is None
    assert Options(table=torch.ones(2)).cache_key() is None
    assert Options(module=nn.Linear(1, 1)).cache_key() is None
    counting = Options(values=[1])
    assert counting.cache_key() is not None


def test_a_class_closed_over_a_value_disables_the_cache():
    def make(target):
        class Pass(lts.Transform):
            def acquired(self, trace):
                replace(trace, "sin", target)

        return Pass()

    first, second = make(torch.cos).cache_key(), make(torch.tan).cache_key()
    assert first is None or first != second


def test_inherited_code_is_part_of_the_key():
    namespace = {"lts": lts}

    class Base(lts.Transform):
        def acquired(self, trace):
            return None

    class Child(Base):
        pass

    def other_base():
        class Base(lts.Transform):
            def acquired(self, trace):
                return trace.graph.lint()

        return Base

    class Sibling(other_base()):
        pass

    Sibling.__qualname__ = Child.__qualname__
    del namespace
    assert Child().cache_key() != Sibling().cache_key()
