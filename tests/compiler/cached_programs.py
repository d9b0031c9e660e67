"""Run as a script in fresh processes by ``test_cache.py``: compiles with Inductor and prints what happened as JSON."""

import json
import sys
from dataclasses import dataclass

import torch
from torch import nn

import lightning_thunder_strategy as lts


@dataclass(frozen=True)
class Flip(lts.Transform):
    """Changes the sign of what the forward returns first, by another way for each option."""

    sign: int
    stage: str = "partitioned"

    def partitioned(self, forward, backward):
        if self.sign < 0:
            output = forward.graph.output_node()
            with forward.graph.inserting_before(output):
                flipped = forward.graph.call_function(torch.ops.aten.neg.default, (output.args[0][0],))
            flipped.meta = dict(output.args[0][0].meta)
            output.args = ((flipped, *output.args[0][1:]),)


class Secret(lts.Transform):
    """Depends on something that no key can hold."""

    def __init__(self, function):
        self.function = function

    def joint(self, trace):
        print("joint was called", file=sys.stderr)


def run(name, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = lts.compile(net, executors=["inductor"], **options)
    x = torch.ones(2, 4)
    result = compiled(x)
    result.square().sum().backward()
    (traces,) = lts.traces(compiled)
    values = [parameter.detach() for parameter in net.parameters()]
    acquired = next(trace for trace in traces if trace.stage == "acquired")
    ordered = [x if item.kind == "argument" else dict(net.named_parameters())[item.origin] for item in acquired.inputs]
    return name, {
        "result": result.flatten().tolist(),
        "gradient": net[0].weight.grad.flatten().tolist(),
        "report": lts.explain(compiled).to_dict(),
        "traces": [str(trace) for trace in traces],
        "inputs": [[item.origin for item in trace.inputs] for trace in traces],
        "rerun": torch.equal(acquired.run(*ordered)[0].detach(), result.detach().abs() * result.detach().sign()),
        "values": len(values),
    }


def main():
    results = dict(
        [
            run("plain"),
            run("positive", transforms=[Flip(1)]),
            run("negative", transforms=[Flip(-1)]),
            run("random", config=lts.CompileConfig(eager_random=True)),
            run("secret", transforms=[Secret(lambda: None)]),
        ]
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
