"""Delayed scaling: the scales of a step follow from the largest magnitudes (amaxes) of the steps before it.

A cast then need not wait until a tensor's own amax is known. As NVIDIA Transformer Engine's ``DelayedScaling`` with
``amax_compute_algo="max"`` and no margin (https://docs.nvidia.com/deeplearning/transformer-engine, "FP8 primer"; the
formats: https://arxiv.org/abs/2209.05433), with these differences:

- A history moves on once an optimizer step, by the largest amax of all micro-batches, instead of once a forward.
- An amax of zero, or one that is not finite, is left out of the history: it says nothing about the next step.
- Before the first amax of a tensor is known, Transformer Engine's scale is one, at which small gradients of the first
  steps round to zero. Here weights are taken to reach up to 4, and gradients up to 1, until then.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.report import warn
from lightning_thunder_strategy.precision.formats import FORMATS
from lightning_thunder_strategy.precision.recipe import Recipe
from lightning_thunder_strategy.precision.scaling import largest_to_scale

KINDS = ("input", "weight", "gradient")  # the columns of all tensors here
_FIRST_GUESS = {"weight": 4.0, "gradient": 1.0}
_CALLS_WITHOUT_UPDATE = 1000


class DelayedScales:
    """The amax histories and scales of all linears that a pass has rewritten, by the linear's name.

    Args:
        recipe: With ``amax_history_len``.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._largest = [FORMATS[getattr(recipe, kind)].largest for kind in KINDS]
        self.start_over()

    def start_over(self) -> None:
        """Forget everything: another module is about to be computed."""
        self._rows: dict[str, int] = {}
        self._loaded: dict[str, Tensor] = {}  # histories of linears that have not been met
        self._calls = 0  # with gradients, since there has been an update
        self._history = _zeros(self._recipe.amax_history_len, 0, len(KINDS))  # newest first; zero: not known
        self._scales = _zeros(0, len(KINDS))
        self._observed = _zeros(0, len(KINDS))  # since the last update; zero: nothing, infinity: not finite

    # ------------------------------------------------------------------------------------------- what programs do

    def rows(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Where the linears of a program are kept, which is found when it is compiled.

        Returns:
            int64 ``[names]`` on ``device``, for the other methods.
        """
        with _torch_compat.outside_fake_mode(), torch.inference_mode(False), torch.no_grad():
            new = [name for name in dict.fromkeys(names) if name not in self._rows]
            self._rows.update({name: len(self._rows) + index for index, name in enumerate(new)})
            added = _zeros(len(self._history), len(new), len(KINDS))
            for index, name in enumerate(new):
                if name in self._loaded:
                    added[:, index] = self._loaded.pop(name)
            self._history = torch.cat([self._history.to(device), added.to(device)], 1)
            self._observed = torch.cat([self._observed.to(device), _zeros(len(new), len(KINDS)).to(device)])
            self._rescale()
            return torch.tensor([self._rows[name] for name in names], device=device)

    def scales(self, rows: Tensor) -> Tensor:
        """The scales of a program's linears now.

        Returns:
            float32 ``[rows, 3]``: of input, weight and gradient.
        """
        self._calls += 1
        if self._calls == _CALLS_WITHOUT_UPDATE:
            warn(
                f"Delayed scaling: {self._calls} calls with gradients, and the scales have not been updated. A loop of "
                "your own must call `update()` of the pass's `delayed` after each optimizer step."
            )
        return self._scales[rows]

    def observe(self, rows: Tensor, amaxes: Tensor, kinds: slice) -> None:
        """Note amaxes of a forward or backward, of the micro-batch that one call is.

        Args:
            rows: Of which linears; one may come several times.
            amaxes: float32 ``[rows, kinds]``.
            kinds: Of which columns.
        """
        with torch.no_grad():
            amaxes = torch.where(amaxes.isfinite(), amaxes, float("inf"))
            self._observed[:, kinds].scatter_reduce_(0, rows[:, None].expand_as(amaxes), amaxes, "amax")

    # -------------------------------------------------------------------------------------------- what a loop does

    def update(self, maximum: Optional[Callable[[Tensor], None]] = None) -> None:
        """After an optimizer step: histories move on by what was observed since the last one, and scales follow.

        Args:
            maximum: Makes a tensor the maximum over all ranks, in place, so that all have the same scales.
        """
        self._calls = 0
        if not self._rows:
            return
        with torch.inference_mode(False), torch.no_grad():
            if maximum is not None:
                maximum(self._observed)
            known = (self._observed > 0) & self._observed.isfinite()
            moved = torch.cat([self._observed[None], self._history[:-1]])
            self._history = torch.where(known, moved, self._history)
            self._rescale()
            self.forget_observed()

    def forget_observed(self) -> None:
        """What was observed since the last update does not count."""
        self._observed.zero_()

    def _rescale(self) -> None:
        amax = self._history.amax(0)
        columns = []
        for index, (kind, largest) in enumerate(zip(KINDS, self._largest)):
            seen = torch.where(amax[:, index] > 0, amax[:, index], _FIRST_GUESS.get(kind, largest))
            columns.append(largest_to_scale(seen, largest, self._recipe.power_of_two_scales))
        self._scales = torch.stack(columns, 1)

    # ----------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> dict[str, Any]:
        """The amax histories by linear, newest first, float32 ``[amax_history_len, 3]``; scales follow from them.

        The same on all ranks. What was observed since the last optimizer step is left out, as gradients are.
        """
        history = self._history.detach().cpu()
        known = {name: history[:, row].clone() for name, row in self._rows.items()}
        return {**self._loaded, **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a history of another length is cut or filled up.

        Raises:
            ValueError: If it is not such a state.
        """
        length = self._recipe.amax_history_len
        loaded = {}
        for name, history in state.items():
            if not isinstance(history, Tensor) or history.ndim != 2 or history.shape[1] != len(KINDS):
                raise ValueError(
                    f"The state of delayed scaling has {history!r:.80} for {name!r} instead of an amax history of "
                    f"[steps, {len(KINDS)}] numbers: load a checkpoint that ThunderPrecision has written."
                )
            kept = history[:length].to(torch.float32)
            loaded[name] = torch.cat([kept, kept.new_zeros(length - len(kept), len(KINDS))])
        with torch.inference_mode(False), torch.no_grad():
            for name, row in self._rows.items():
                self._history[:, row] = loaded.pop(name, _zeros(1)).to(self._history.device)
            self._loaded = loaded
            self._rescale()
            self.forget_observed()


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32)  # the default type is bfloat16 in a step with bf16-true
