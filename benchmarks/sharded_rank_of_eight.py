"""Compiles and runs the program of one rank of many, on one device.

Torch's fake process group takes the place of the other ranks: collectives return at once with arbitrary data. The loss
means nothing; the graphs, the collectives and their order, the kernels and the peak memory are those of a real rank.

    python benchmarks/sharded_rank_of_eight.py --model Llama-3.2-1B --batch 1 --length 2048
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from litgpt import GPT, Config
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.initialization import materialize
from lightning_thunder_strategy.distributed.schemes import Sharded
from lightning_thunder_strategy.distributed.sharding import gathering, parallelize
from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from lightning_thunder_strategy.transforms.refuse_lost_edits import RefuseLostEdits
from lightning_thunder_strategy.transforms.unshard_policy import GatherAgain


def measure(args: argparse.Namespace, sharding: str) -> dict:
    """Train a few steps and describe the program."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(Config.from_name(args.model, n_layer=args.layers) if args.layers else Config.from_name(args.model))
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    transforms: list[lts.Transform] = []
    if sharding != "none":
        scheme = Sharded(init_device_mesh(device.type, (args.world_size,), mesh_dim_names=("data",)))
        materialize(model, device, scheme.place)
        parallelize(model, scheme)
        transforms = [RefuseLostEdits(), DeduplicateUnshard(), *([GatherAgain()] if sharding == "zero3" else [])]
    else:
        materialize(model, device, None)
    model.max_seq_length = args.length
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    config = lts.CompileConfig(fullgraph=True)
    step = lts.compile(loss_of, executors=[args.executor], transforms=transforms, config=config)
    tokens = torch.randint(0, model.config.vocab_size, (args.batch, args.length + 1), device=device)
    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        start = time.perf_counter()
        with gathering():
            loss = step(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    report = lts.explain(step).to_dict()["steps"][loss_of.__qualname__]
    sizes = {
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
    return {
        "sharding": sharding, "first_step_seconds": seconds[0], "step_seconds": min(seconds[1:]),
        "graphs": report["graphs"], "executors": report["executors"], "collectives": report["collectives"], **sizes,
    }  # fmt: skip


def main() -> None:
    """Measure one way to shard."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama-3.2-1B")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model, 0 for all")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--sharding", choices=["none", "zero2", "zero3"], default="zero3")
    parser.add_argument("--executor", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.distributed.init_process_group("fake", rank=0, world_size=args.world_size, store=FakeStore())
    print(json.dumps({"torch": torch.__version__, **measure(args, args.sharding)}, indent=2))


if __name__ == "__main__":
    main()
