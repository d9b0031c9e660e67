"""A stand-in for the module ``nvfuser_direct`` that records a fusion and computes it with torch on the CPU.

It has the operations of nvFuser's ``python/python_direct/ops.cpp``, with their argument names and their refusals.
"""

import enum
from collections.abc import Callable
from typing import Any

import torch


class DataType(enum.Enum):
    Double = torch.float64
    Float = torch.float32
    Half = torch.float16
    BFloat16 = torch.bfloat16
    Int = torch.int64
    Int32 = torch.int32
    Bool = torch.bool


class Value:
    """A value of a fusion: how it is computed, and its type."""

    def __init__(self, compute: Callable[[Callable], Any], dtype: torch.dtype, rank: int = 0, tensor: bool = True):
        self.compute, self.torch_dtype, self.ndim, self.tensor = compute, dtype, rank, tensor

    def dtype(self) -> DataType:
        assert self.tensor
        return DataType(self.torch_dtype)


def _probe(value: Any) -> Any:
    """Something whose type is promoted as that of ``value``."""
    if not isinstance(value, Value):
        return value
    return torch.ones((1,) if value.tensor else (), dtype=value.torch_dtype)


def _numbers(values: Any) -> None:
    assert isinstance(values, (list, tuple))
    for value in values:
        assert type(value) is int or (isinstance(value, Value) and not value.tensor), value


class Operations:
    """What ``FusionDefinition.ops`` has."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _make(self, function: Callable, *args: Any, rank: int, dtype: Any = None, check: bool = True) -> Value:
        if dtype is None:
            dtype = function(*map(_probe, args)).dtype
        return Value(lambda get: function(*[_given(get, value) for value in args]), dtype, rank)

    def _pointwise(self, name: str, *args: Any) -> Value:
        self.calls.append(name)
        tensors = [value for value in args if isinstance(value, Value) and value.tensor]
        assert tensors, f"{name} of numbers alone"
        assert len({value.ndim for value in tensors}) == 1 or min(v.ndim for v in tensors) == 0
        return self._make(_POINTWISE[name], *args, rank=max(value.ndim for value in tensors))

    def __getattr__(self, name: str) -> Callable:
        if name in _POINTWISE:
            return lambda *args: self._pointwise(name, *args)
        if name in _REDUCTIONS:
            return lambda arg, dims, keepdim=False, dtype=None: self._reduce(name, arg, dims, keepdim)
        raise AttributeError(name)

    def _reduce(self, name: str, arg: Value, dims: list[int], keepdim: bool) -> Value:
        self.calls.append(name)
        assert dims and all(type(dim) is int for dim in dims), "no reduction axis specified"
        rank = arg.ndim if keepdim else arg.ndim - len(dims)
        dtype = _REDUCTIONS[name](torch.ones((1,), dtype=arg.torch_dtype), [0], False).dtype
        return self._make(lambda x: _REDUCTIONS[name](x, dims, keepdim), arg, rank=rank, dtype=dtype)

    def cast(self, arg: Value, dtype: DataType) -> Value:
        self.calls.append("cast")
        return self._make(lambda x: x.to(dtype.value), arg, rank=arg.ndim)

    def var(self, arg: Value, dims: list[int], correction: int = 1, keepdim: bool = False) -> Value:
        self.calls.append("var")
        assert type(correction) is int and arg.torch_dtype.is_floating_point
        rank = arg.ndim if keepdim else arg.ndim - len(dims)
        return self._make(
            lambda x: x.var(dims, correction=correction, keepdim=keepdim), arg, rank=rank, dtype=arg.torch_dtype
        )

    def var_mean(self, arg: Value, dims: list[int], correction: int = 1, keepdim: bool = False) -> tuple[Value, Value]:
        mean = self._reduce("mean", arg, dims, keepdim)
        return self.var(arg, dims, correction, keepdim), mean

    def broadcast(self, arg: Value, is_broadcast_dim: list[bool]) -> Value:
        self.calls.append("broadcast")
        assert sum(not new for new in is_broadcast_dim) == arg.ndim

        def compute(x: torch.Tensor) -> torch.Tensor:
            for dim, new in enumerate(is_broadcast_dim):
                x = x.unsqueeze(dim) if new else x
            return x

        return self._make(compute, arg, rank=len(is_broadcast_dim), dtype=arg.torch_dtype)

    def broadcast_in_dim(self, arg: Value, shape: list, broadcast_dims: list[int]) -> Value:
        self.calls.append("broadcast_in_dim")
        _numbers(shape)
        assert len(broadcast_dims) == arg.ndim and len(set(broadcast_dims)) == arg.ndim

        def compute(x: torch.Tensor, *sizes: int) -> torch.Tensor:
            for dim in range(len(sizes)):
                if dim not in broadcast_dims:
                    x = x.unsqueeze(dim)
                    assert sizes[dim] != -1
            return x.expand(sizes)

        return self._make(compute, arg, *shape, rank=len(shape), dtype=arg.torch_dtype)

    def reshape(self, arg: Value, new_shape: list) -> Value:
        self.calls.append("reshape")
        _numbers(new_shape)
        return self._make(lambda x, *s: x.reshape(s), arg, *new_shape, rank=len(new_shape), dtype=arg.torch_dtype)

    def permute(self, arg: Value, dims: list[int]) -> Value:
        self.calls.append("permute")
        assert len(dims) == arg.ndim
        return self._make(lambda x: x.permute(dims), arg, rank=arg.ndim, dtype=arg.torch_dtype)

    def squeeze(self, arg: Value, dims: list[int], squeeze_expanded: bool = False) -> Value:
        self.calls.append("squeeze")

        def compute(x: torch.Tensor) -> torch.Tensor:
            assert all(x.shape[dim] == 1 for dim in dims)
            return x.squeeze(tuple(dims))

        return self._make(compute, arg, rank=arg.ndim - len(dims), dtype=arg.torch_dtype)

    def slice(self, arg: Value, start_indices: list, end_indices: list, strides: list) -> Value:
        self.calls.append("slice")
        for numbers in (start_indices, end_indices, strides):
            _numbers(numbers)
            assert len(numbers) == arg.ndim
        assert strides == [1] * arg.ndim, "All slice operation strides must be of const size 1."
        assert all(not isinstance(a, int) or a >= 0 for a in start_indices)
        rank = arg.ndim

        def compute(x: torch.Tensor, *numbers: int) -> torch.Tensor:
            return x[tuple(slice(a, b) for a, b in zip(numbers[:rank], numbers[rank:]))]

        return self._make(compute, arg, *start_indices, *end_indices, rank=rank, dtype=arg.torch_dtype)

    def pad(self, arg: Value, pad_widths: list[int], value: Any = None) -> Value:
        self.calls.append("pad")
        _numbers(pad_widths)
        assert len(pad_widths) <= 2 * arg.ndim
        widths = tuple(pad_widths)
        return self._make(lambda x: torch.constant_pad_nd(x, widths), arg, rank=arg.ndim, dtype=arg.torch_dtype)

    def cat(self, tensors: list[Value], dim: int = 0) -> Value:
        self.calls.append("cat")
        assert len({value.torch_dtype for value in tensors}) == 1 and dim >= 0
        return self._make(lambda *x: torch.cat(x, dim), *tensors, rank=tensors[0].ndim, dtype=tensors[0].torch_dtype)

    def full(self, shape: list, fill_value: Any, dtype: DataType) -> Value:
        self.calls.append("full")
        _numbers(shape)
        return self._make(
            lambda n, *s: torch.full(s, n, dtype=dtype.value), fill_value, *shape, rank=len(shape), dtype=dtype.value
        )

    def size(self, arg: Value, dim: int) -> Value:
        return Value(lambda get: get(arg).shape[dim], torch.int64, tensor=False)

    def stride_order(self, arg: Value, stride_order: list[int]) -> Value:
        self.calls.append("stride_order")
        assert sorted(stride_order) == list(range(arg.ndim))
        outer_first = sorted(range(arg.ndim), key=lambda dim: -stride_order[dim])

        def compute(x: torch.Tensor) -> torch.Tensor:
            inverse = [outer_first.index(dim) for dim in range(x.dim())]
            return x.permute(outer_first).contiguous().permute(inverse)

        return self._make(compute, arg, rank=arg.ndim, dtype=arg.torch_dtype)


def _given(get: Callable, value: Any) -> Any:
    return get(value) if isinstance(value, Value) else value


_POINTWISE: dict[str, Callable] = {
    name: getattr(torch, name)
    for name in (
        *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "exp", "exp2", "expm1"),
        *("erf", "erfc", "erfinv", "floor", "lgamma", "log", "log10", "log1p", "log2", "neg", "bitwise_not"),
        *("reciprocal", "round", "rsqrt", "sign", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
        *("isfinite", "add", "atan2", "fmod", "mul", "nextafter", "pow", "remainder", "maximum", "minimum"),
        *("eq", "ge", "gt", "le", "lt", "ne", "bitwise_and", "bitwise_or", "bitwise_xor", "where"),
        *("bitwise_left_shift", "bitwise_right_shift"),
    )
}
_POINTWISE["set"] = lambda x: x  # an alias, as nvFuser may make
_POINTWISE["sub"] = lambda a, b: a - b
_POINTWISE["div"] = lambda a, b: _div(a, b)
for _name in ("maximum", "minimum", "fmod", "remainder", "atan2", "nextafter"):
    _POINTWISE[_name] = lambda a, b, f=getattr(torch, _name): f(*_tensors(a, b))
_REDUCTIONS: dict[str, Callable] = {
    "sum": lambda x, dims, keep: x.sum(dims, keepdim=keep),
    "mean": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "max": lambda x, dims, keep: x.amax(dims, keepdim=keep),
    "min": lambda x, dims, keep: x.amin(dims, keepdim=keep),
}


def _prod(x: torch.Tensor, dims: list[int], keep: bool) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        x = x.prod(dim, keepdim=keep)
    return x


_REDUCTIONS["prod"] = _prod


def _tensors(a: Any, b: Any) -> tuple:
    like = a if isinstance(a, torch.Tensor) else b
    return tuple(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=like.dtype) for x in (a, b))


def _div(a: Any, b: Any) -> torch.Tensor:
    """Of integers towards zero, as in C."""
    floating = any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in (a, b))
    return torch.div(a, b) if floating else torch.div(*_tensors(a, b), rounding_mode="trunc")


class FusionDefinition:
    """Records a fusion; ``execute`` computes it."""

    made: list["FusionDefinition"] = []

    def __init__(self) -> None:
        self.ops = Operations()
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.static: list[bool] = []
        self.runs = 0
        self.open = False
        FusionDefinition.made.append(self)

    def __enter__(self) -> "FusionDefinition":
        assert type(torch.empty(1)) is torch.Tensor, "Cannot access data pointer of Tensor (e.g. FakeTensor)"
        self.open = True
        return self

    def __exit__(self, *error: Any) -> None:
        self.open = False

    def define_tensor(
        self, *, sizes: list[int], strides: list[int], dtype: DataType, static_sizes: bool = False, is_cpu: bool = False
    ) -> Value:
        _numbers(sizes), _numbers(strides)
        assert self.open and len(sizes) == len(strides)
        value = Value(lambda get: None, dtype.value, len(sizes))
        value.sizes, value.strides = sizes, strides
        self.inputs.append(value)
        self.static.append(static_sizes)
        return value

    def define_scalar(self, value: None, dtype: DataType) -> Value:
        assert self.open and value is None
        made = Value(lambda get: None, dtype.value, tensor=False)
        self.inputs.append(made)
        return made

    def add_output(self, value: Value) -> None:
        assert isinstance(value, Value) and value.tensor
        self.outputs.append(value)

    def execute(self, inputs: list, *, device: Any = None) -> list[torch.Tensor]:
        assert not self.open and self.outputs and len(inputs) == len(self.inputs)
        self.runs += 1
        known: dict[Value, Any] = {}
        for value, given in zip(self.inputs, inputs):
            assert isinstance(given, torch.Tensor) == value.tensor
            if value.tensor:
                assert given.dtype == value.torch_dtype and given.dim() == value.ndim
                if all(self.static):
                    assert list(given.shape) == value.sizes
            else:  # nvFuser refuses numbers of another type
                assert isinstance(given, float) == value.torch_dtype.is_floating_point, (given, value.torch_dtype)
            known[value] = given

        def get(value: Value) -> Any:
            if value not in known:
                known[value] = value.compute(get)
                if value.tensor:
                    assert known[value].dtype == value.torch_dtype and known[value].dim() == value.ndim
            return known[value]

        return [get(value) for value in self.outputs]
