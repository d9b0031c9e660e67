"""``export``: the model of a checkpoint as Hugging Face or LitGPT read it."""

import argparse
import pickle
import sys
from typing import Any, get_args

import torch

from lightning_thunder_strategy.distributed.export import Format, export_checkpoint

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}


def add_command(commands: Any) -> None:
    command = commands.add_parser("export", help="the model of a checkpoint as Hugging Face or LitGPT read it")
    command.add_argument("checkpoint", help="a file, or a folder of shards")
    command.add_argument("output", help="a folder; made if it is not there")
    command.add_argument("--to", required=True, choices=get_args(Format), help="model.safetensors or lit_model.pth")
    command.add_argument("--prefix", default="", help="cut off names, which must begin with it: model. for self.model")
    command.add_argument("--dtype", choices=_DTYPES, help="convert floating-point tensors")
    command.add_argument("--max-shard-size", default="5GB", help="largest safetensors file (default: 5GB)")
    command.add_argument(
        "--trust", action="store_true", help="also read a file that can run code, such as one with objects"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the files and say what was written; the exit status is 1 if that failed."""
    try:
        state = export_checkpoint(
            options.checkpoint,
            options.output,
            to=options.to,
            prefix=options.prefix,
            dtype=_DTYPES.get(options.dtype),
            max_shard_size=options.max_shard_size,
            weights_only=not options.trust,
        )
    except (ValueError, OSError, ModuleNotFoundError, RuntimeError, pickle.UnpicklingError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    size = sum(value.numel() * value.element_size() for value in state.values())
    print(f"{options.output}: {len(state)} tensors, {size / 2**20:.1f} MiB")
    return 0
