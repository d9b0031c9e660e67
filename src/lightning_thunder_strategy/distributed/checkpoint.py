"""Model and optimizer states of sharded and plain modules, as one full file or as a folder of shards.

Full: what a single process would have written. Sharded: a folder of ``torch.distributed.checkpoint`` with a
``meta.pt``, as Lightning's own sharded strategies write it, so that its consolidate command reads it.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_thunder_strategy.distributed.schemes import place_like, whole
from lightning_thunder_strategy.distributed.trusted import PlainValues, TrustingNobody, clear_errors

# ------------------------------------------------------------------------------------------------------- full states


def full_state(state: Any, keep: bool) -> Any:
    """A state with distributed tensors made whole, on the CPU (collectives, in the order of the state).

    Args:
        state: Nested dictionaries and lists.
        keep: Whether this rank needs the values. Others get tensors without storage (``meta``) of the right shapes.
    """

    def convert(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        tensor = whole(value.detach())
        return tensor.cpu() if keep else torch.empty_like(tensor, device="meta")

    return tree_map(convert, state)


def has_distributed_tensors(state: Any) -> bool:
    """Whether a state holds tensors of which this rank has only a part."""
    return any(isinstance(value, DTensor) for value in tree_leaves(state))


def place_state(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """A plain model state with each tensor cut to this rank's shard where the module's is distributed. No
    collectives."""
    own = module.state_dict()
    return {key: place_like(value, own.get(key)) for key, value in state.items()}


def load_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """Load a full or sharded state into a plain or sharded module; keys and shapes are checked as always."""
    return module.load_state_dict(place_state(state, module), strict=strict)


# ---------------------------------------------------------------------------------------------------- optimizer states


def parameter_names(*modules: nn.Module) -> dict[nn.Parameter, str]:
    """The qualified name of each parameter: the first one if it has several."""
    return {parameter: name for module in reversed(modules) for name, parameter in module.named_parameters()}


def named_optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """The optimizer's state with parameter names instead of numbers, as ``torch.distributed.checkpoint`` keeps it."""
    state = optimizer.state_dict()
    number_to_name = dict(enumerate(_parameter_keys(optimizer, names)))
    return {
        "state": {number_to_name[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [number_to_name[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def exchange_parameters(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer hold new parameters in place of old ones; the state it keeps for them stays as it is."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old in [parameter for parameter in optimizer.state if parameter in replaced]:
        optimizer.state[replaced[old]] = optimizer.state.pop(old)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
    """Load a state with numbers or names for the parameters, full or sharded, into an optimizer.

    Args:
        optimizer: The optimizer.
        state: Its state as :func:`named_optimizer_state` or ``Optimizer.state_dict`` gave it.
        names: The names of its parameters.

    Raises:
        KeyError: If the state has no entry for the name of one of the optimizer's parameters.
    """
    groups = state["param_groups"]
    if any(isinstance(key, str) for group in groups for key in group["params"]):
        state = _with_numbers(optimizer, state, names)
    optimizer.load_state_dict(placed_optimizer_state(optimizer, state))


def placed_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with whole tensors cut to this rank's shard where the parameter is distributed. No
    collectives."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(saved, parameters))
    placed = {
        number: {key: _place_entry(key, value, by_number.get(number)) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": placed}


def _place_entry(key: str, value: Any, parameter: Optional[Tensor]) -> Any:
    if key == "step" or not isinstance(value, Tensor):
        return value
    return place_like(value, parameter)


def _parameter_keys(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(parameter, f"parameter_{index}") for index, parameter in enumerate(parameters)]


def _with_numbers(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """A state keyed by names, in the order of this optimizer's parameters."""
    numbers = {name: number for number, name in enumerate(_parameter_keys(optimizer, names))}
    saved_groups = state["param_groups"]
    missing = sorted(numbers.keys() - {name for group in saved_groups for name in group["params"]})
    if missing:
        raise KeyError(f"The checkpoint's optimizer has no entry for the parameters {', '.join(missing[:5])}.")
    groups = []
    for group, own in zip(saved_groups, optimizer.state_dict()["param_groups"]):
        groups.append({**group, "params": own["params"]})
    return {
        "state": {numbers[name]: value for name, value in state.get("state", {}).items() if name in numbers},
        "param_groups": groups,
    }


# ----------------------------------------------------------------------------------------------------- folder of shards


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder written by :func:`save_sharded` or by Lightning's sharded strategies."""
    return path.is_dir() and (path / METADATA_FILENAME).is_file()


def save_sharded(
    folder: Path,
    state: Mapping[str, Any],
    metadata: Mapping[str, Any],
    main: bool,
    group: Optional[ProcessGroup] = None,
) -> None:
    """Write tensors as shards and everything else to ``meta.pt``. Every rank calls it.

    Args:
        folder: An existing, empty folder.
        state: What is stored in shards: model states and named optimizer states.
        metadata: The rest; taken from the ``main`` rank.
        main: Whether this is rank zero.
        group: All ranks, for the communication of writing; by default the group that everything uses.
    """
    # What is written in a thread is on the CPU; copying ahead would open a context on the first GPU.
    ahead = {} if group is None else {"per_thread_copy_ahead": 0}
    with alone_or_together() as no_dist:
        writer = dcp.FileSystemWriter(folder, **ahead)
        dcp.save(dict(state), storage_writer=writer, process_group=group, no_dist=no_dist)
    if main:
        torch.save(dict(metadata), folder / METADATA_FILENAME)


@contextmanager
def alone_or_together() -> Iterator[bool]:
    """Whether to write and read without communication. Torch's warning that one process is alone is left out."""
    if torch.distributed.is_initialized():
        yield False
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield True


def load_sharded(
    folder: Path, likes: Mapping[str, Mapping[str, Any]], optimizers: Iterable[str], weights_only: Optional[bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a folder of shards, each rank only its part.

    Args:
        folder: The checkpoint.
        likes: For each stored model, tensors by name: stored tensors of the same name and shape, and the states that
            optimizers keep for them, are read in the same distribution.
        optimizers: Keys under which optimizer states are stored.
        weights_only: ``False`` reads anything, also what can run as code; otherwise only tensors and plain values.

    Returns:
        The states as they were stored, and the content of ``meta.pt``.
    """
    trusting = weights_only is False
    reader = dcp.FileSystemReader(folder) if trusting else TrustingNobody(folder)
    planner = dcp.DefaultLoadPlanner() if trusting else PlainValues(folder)
    stored = reader.read_metadata()
    by_name = {f"{key}.{name}": value for key, like in likes.items() for name, value in like.items()}
    by_name.update({name: value for like in likes.values() for name, value in like.items()})
    optimizers = set(optimizers)
    flat: dict[str, Any] = {}
    for key, description in stored.state_dict_metadata.items():
        path = (stored.planner_data or {}).get(key, tuple(key.split(".")))
        like = None
        if path[0] in likes:
            like = likes[path[0]].get(".".join(str(part) for part in path[1:]))
        elif path[0] in optimizers and len(path) == 4 and path[1] == "state" and path[3] != "step":
            like = by_name.get(path[2])
        flat[key] = _empty(description, like)
    state = _nest(flat, stored.planner_data or {})
    with alone_or_together() as no_dist, clear_errors():
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=no_dist)
    metadata = torch.load(folder / METADATA_FILENAME, map_location="cpu", weights_only=weights_only)
    return state, metadata


def _empty(description: Any, like: Any) -> Any:
    """A value for ``torch.distributed.checkpoint`` to read into."""
    if not isinstance(description, TensorStorageMetadata):
        return None
    if isinstance(like, DTensor) and like.shape == description.size:
        local = torch.empty_like(like.to_local(), dtype=description.properties.dtype)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return torch.empty(description.size, dtype=description.properties.dtype)


def _nest(flat: Mapping[str, Any], paths: Mapping[str, tuple]) -> dict[str, Any]:
    """Nested dictionaries and lists from flat keys."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        path = paths.get(key, tuple(key.split(".")))
        here: Any = root
        for part, following in zip(path, [*path[1:], None]):
            new = value if following is None else ([] if isinstance(following, int) else {})
            if isinstance(here, list):
                while len(here) <= part:
                    here.append(None)
                if here[part] is None or following is None:
                    here[part] = new
            elif following is None or part not in here:
                here[part] = new
            here = here[part]
    return root
