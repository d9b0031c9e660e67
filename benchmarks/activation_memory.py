"""What ActivationCheckpointing does to the memory of a step, as the planner sees it. Needs no GPU.

    python benchmarks/activation_memory.py
    python benchmarks/activation_memory.py --model Llama-3-8B --batch 1 --length 32768 --policies block

A LitGPT model in bf16 with fused AdamW on one device. For each policy it is the whole pipeline with fake tensors: what
the forward keeps for the backward, the peak of the step, the total with the workspaces of libraries, and the step's
floating-point operations.
"""

import argparse
import json
import time
from typing import Any

import torch
from planner_memory import Pretrains

import lightning_thunder_strategy as lts


def planned(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    value = float(policy) if policy.replace(".", "").isdigit() else policy
    strategy = lts.ThunderStrategy(executors=args.executors, transforms=[lts.ActivationCheckpointing(value)])
    tokens = torch.zeros(args.batch, args.length + 1, dtype=torch.long)
    module = Pretrains(args.model, args.layers, args.length)
    found = lts.plan(module, tokens, strategy, devices=1, precision="bf16-true", gpu="H200")
    return found.to_dict()


def main() -> None:
    """Plan each policy, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama-3.2-1B")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model, 0 for all")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--executors", nargs="+", default=["inductor"])
    parser.add_argument("--policies", nargs="+", default=["none", "selective", "block", "8"])
    args = parser.parse_args()
    results = {}
    print(f"torch {torch.__version__}, {args.model}, batch {args.batch}, length {args.length}, bf16, {args.executors}")
    for policy in args.policies:
        begun = time.perf_counter()
        found = planned(args, policy)
        memory, work = found["memory"], found["time"]["flops"]
        sizes = {name: memory[name] for name in ("saved", "peak")} | {"total": found["total"]}
        results[policy] = {**sizes, "flops": work, "fits": found["fits"]}
        shown = ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in sizes.items())
        seconds = time.perf_counter() - begun
        print(f"{policy}: {shown}, {work / 1e12:.1f} TFLOP, fits: {found['fits']}; {seconds:.0f} s to plan", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
