"""Writes the model in a checkpoint as other programs read it."""

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Optional, Union, get_args

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_thunder_strategy.distributed.checkpoint import alone_or_together, is_sharded_checkpoint
from lightning_thunder_strategy.distributed.files import beside, flush, remove, replacing, swap_in
from lightning_thunder_strategy.distributed.trusted import PlainValues, TrustingNobody, clear_errors

Format = Literal["safetensors", "litgpt"]
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_ROOTS = ("state_dict", "model")  # where the Trainer and Fabric programs keep the model


def export_checkpoint(
    checkpoint: Union[str, Path],
    output: Union[str, Path],
    to: Format,
    prefix: str = "",
    dtype: Optional[torch.dtype] = None,
    max_shard_size: str = "5GB",
    weights_only: bool = True,
) -> dict[str, Tensor]:
    """Write the model of a checkpoint, without optimizers, as Hugging Face or LitGPT read it.

    Args:
        checkpoint: A file or a folder of shards, as the strategies of this package and of Lightning write them.
        output: A folder; it is made if it is not there. Files of the same names in it, and parts of an earlier export
            in another number of files, are replaced once the new ones are complete. Others stay.
        to: ``"safetensors"``: ``model.safetensors``, or several with an index, for ``from_pretrained`` (beside the
            model's ``config.json``); ``"litgpt"``: ``lit_model.pth``.
        prefix: What keys must begin with to be taken, and what is cut off them: ``"model."`` where a LightningModule
            holds the model as ``self.model``.
        dtype: Converts floating-point tensors; by default they stay as they are.
        max_shard_size: Largest size of one safetensors file, such as ``"5GB"``.
        weights_only: Read only tensors and plain values; ``False`` also reads a file that can run code, such as one
            with objects among its hyperparameters.

    Returns:
        What was written, by name, on the CPU.

    Raises:
        ValueError: For an unknown format, a checkpoint without a model, or a prefix that no key has.
        pickle.UnpicklingError: If the checkpoint is damaged, or holds more than ``weights_only`` lets through.
        FileNotFoundError: If there is no checkpoint.
        ModuleNotFoundError: If ``huggingface_hub`` and ``safetensors`` are needed and missing.
    """
    if to not in get_args(Format):
        raise ValueError(f"to={to!r} is not a format: choose from {', '.join(map(repr, get_args(Format)))}.")
    path, folder = Path(checkpoint), Path(output)
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    state = _renamed(
        _read_sharded(path) if is_sharded_checkpoint(path) else _read_file(path, weights_only), prefix, path
    )
    if dtype is not None:
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if to == "litgpt":
        with replacing(folder / "lit_model.pth", beside(folder / "lit_model.pth")) as temporary:
            torch.save(state, temporary)
    else:
        _write_safetensors(state, folder, max_shard_size)
    return state


def _read_file(path: Path, weights_only: bool) -> Mapping[str, Tensor]:
    if path.is_dir():
        raise ValueError(f"The folder {path} is not a checkpoint: it has no index and meta.pt of a sharded one.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"The checkpoint {path} is damaged or holds more than tensors and plain values. If you trust where it came "
            "from, read it with weights_only=False (--trust), which can run code in it."
        ) from error
    for root in _ROOTS:
        if isinstance(content, dict) and isinstance(content.get(root), dict):
            content = content[root]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"The checkpoint {path} has no model under {' or '.join(map(repr, _ROOTS))}.")
    return content


def _read_sharded(folder: Path) -> Mapping[str, Tensor]:
    """The model's tensors, whole; optimizers are not read."""
    reader = TrustingNobody(folder)
    stored = reader.read_metadata()
    paths = stored.planner_data or {}
    root = next((root for root in _ROOTS if any(path[:1] == (root,) for path in paths.values())), None)
    if root is None:
        raise ValueError(f"The checkpoint {folder} has no model under {' or '.join(map(repr, _ROOTS))}.")
    flat, names = {}, {}
    for key, description in stored.state_dict_metadata.items():
        path = paths.get(key, ())
        if path[:1] == (root,) and isinstance(description, TensorStorageMetadata):
            flat[key] = torch.empty(description.size, dtype=description.properties.dtype)
            names[key] = ".".join(str(part) for part in path[1:])
    with alone_or_together(), clear_errors():
        dcp.load(flat, storage_reader=reader, planner=PlainValues(folder), no_dist=True)
    return {names[key]: value for key, value in flat.items()}


def _renamed(state: Mapping[str, Tensor], prefix: str, path: Path) -> dict[str, Tensor]:
    taken = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not taken:
        first = sorted({f"{name.split('.')[0]}." for name in state if "." in name})
        raise ValueError(
            f"prefix={prefix!r} fits no name in {path}: its names begin with {', '.join(map(repr, first)) or 'none'}."
        )
    coded = next((name for name in taken if name.rpartition(".")[2] == "weight_codes"), None)
    if coded is not None:
        raise ValueError(
            f"The checkpoint {path} holds weights in few bits ({coded}), which other programs cannot read: load it "
            "into the module, call lightning_thunder_strategy.restore_weights(module), and save that."
        )
    return taken


def _write_safetensors(state: dict[str, Tensor], folder: Path, max_shard_size: str) -> None:
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Writing safetensors needs huggingface_hub and safetensors ({error}): "
            "pip install 'lightning-thunder-strategy[hf]'."
        ) from error
    hidden = beside(folder / "model.safetensors")
    try:
        hidden.mkdir()
        save_torch_state_dict(state, hidden, max_shard_size=max_shard_size)
        flush(hidden)
        names = sorted((file.name for file in hidden.iterdir()), key=lambda name: name.endswith(".json"))  # index last
        for name in names:
            swap_in(hidden / name, folder / name)
        for old in folder.iterdir():
            if old.name not in names and _OURS.fullmatch(old.name):
                old.unlink()  # of an export in another number of files
    finally:
        remove(hidden)
