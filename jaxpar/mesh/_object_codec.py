"""Plain values as JSON text and back: exact types, exact bits, no pickle.

None True 7 2.5 "a"          themselves
[1, 2]  (1, 2)  {k: v}       ["list", [..]]  ["tuple", [..]]  ["dict", [[k, v], ..]]
b"..."                       ["bytes", base64]
np.ndarray, np scalar        ["array" | "scalar", dtype, shape, base64]      bfloat16 and float8 included
"""

import base64
import json
from typing import Any

import ml_dtypes
import numpy as np

MAX_OBJECT_BYTES = 32 << 20


class UnencodableError(ValueError):
    """A value that the codec does not carry; the message holds its path. Internal: callers add rank and name."""


def encode_object(value: Any) -> str:
    """JSON text of a value.

    Raises:
        UnencodableError: It holds something else than the types above, or is too large.
    """
    try:
        text = json.dumps(_pack(value, "value"), separators=(",", ":"))
    except RecursionError as error:
        raise UnencodableError("value is nested too deeply, or contains itself") from error
    if len(text) > MAX_OBJECT_BYTES:
        raise UnencodableError(
            f"value takes {len(text)} bytes as text, over the limit of {MAX_OBJECT_BYTES} bytes: objects travel"
            " through the job's store. Gather large arrays on the devices (jaxpar.mesh.full_array)"
        )
    return text


def decode_object(text: str) -> Any:
    """The value that `encode_object` turned into text."""
    return _unpack(json.loads(text))


def _pack(value: Any, path: str) -> Any:
    # Exact types on purpose: a subclass (named tuple, enum, defaultdict) would come back as something else.
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [kind.__name__, [_pack(item, f"{path}[{i}]") for i, item in enumerate(value)]]
    if kind is dict:
        return [
            "dict",
            [[_pack_key(key, path), _pack(item, f"{path}[{key!r}]")] for key, item in value.items()],
        ]
    if kind is bytes:
        return ["bytes", _text(value)]
    if isinstance(value, np.generic) and value.dtype.kind not in "OV":
        return ["scalar", value.dtype.str, [], _text(value.tobytes())]
    if isinstance(value, np.generic | np.ndarray):
        return _pack_array(value, path)
    raise UnencodableError(f"{path} is a {kind.__module__}.{kind.__qualname__}. {_cure(value)}")


def _pack_key(key: Any, path: str) -> Any:
    if key is None or type(key) in (bool, int, float, str):
        return key
    raise UnencodableError(
        f"{path} has the key {key!r} of type {type(key).__qualname__}. Keys must be str, int, float, bool or None"
    )


def _pack_array(value: Any, path: str) -> Any:
    dtype = value.dtype
    is_small_float = hasattr(ml_dtypes, dtype.name)  # NumPy knows bfloat16 and its kin only as raw bytes
    if dtype.hasobject or dtype.fields is not None or (dtype.kind == "V" and not is_small_float):
        raise UnencodableError(
            f"{path} is an array of dtype {dtype}. Only numbers, booleans, text and dates travel"
        )
    kind = "array" if type(value) is np.ndarray else "scalar"
    if kind == "scalar" and not isinstance(value, np.generic):
        raise UnencodableError(f"{path} is a {type(value).__qualname__}. {_cure(value)}")
    name = dtype.name if is_small_float else dtype.str
    return [kind, name, list(value.shape), _text(value.tobytes())]


def _cure(value: Any) -> str:
    if hasattr(value, "__array__"):
        return "Write np.asarray(value), or jaxpar.mesh.full_array(value) if it is spread over processes"
    return (
        "None, bool, int, float, str, bytes, NumPy arrays and scalars, and list, tuple, dict of these travel"
    )


def _unpack(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    match packed[0]:
        case "list":
            return [_unpack(item) for item in packed[1]]
        case "tuple":
            return tuple(_unpack(item) for item in packed[1])
        case "dict":
            return {key: _unpack(item) for key, item in packed[1]}
        case "bytes":
            return base64.b64decode(packed[1])
    kind, name, shape, data = packed
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    return array if kind == "array" else array[()]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
