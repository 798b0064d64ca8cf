"""Arrays in pickles of others, read as data: a walk over the opcodes that imports, calls and unpickles nothing.

Known are lists, tuples, dicts with texts as keys, numbers, texts, and numpy's arrays and scalars, as numpy 1 and 2
write them in protocols 2 to 5. All else is refused by its name.
"""

import math
import pickletools
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cosmos_rl_core.canonical import canonical_json

MAX_OPCODES = 2**16
"""Most steps of a pickle, and most values in it. An array takes about forty."""
MAX_DEPTH = 8
"""Most containers that lie in each other."""
MAX_DIMENSIONS = 8
PLAIN = (bool, int, float, str, type(None))

_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_RECONSTRUCT, _SCALAR, _FROM_BUFFER = "_reconstruct", "scalar", "_frombuffer"
_NDARRAY, _DTYPE, _ENCODE, _BYTES = "numpy.ndarray", "numpy.dtype", "_codecs.encode", "__builtin__.bytes"
_KNOWN = {
    **{f"{module}.{name}": name for module in _MULTIARRAY for name in (_RECONSTRUCT, _SCALAR)},
    **{f"{module}.{_FROM_BUFFER}": _FROM_BUFFER for module in _NUMERIC},
    # Protocol 2 has no bytes: Python writes them as a text that is encoded, or as a call of `bytes`.
    **{name: name for name in (_NDARRAY, _DTYPE, _ENCODE, _BYTES)},
}
_DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT", "MEMOIZE"), ("BINGET", "LONG_BINGET")


class PickleError(ValueError):
    """A pickle with something else than arrays, or a damaged one. The message says what was found."""


class _Global(NamedTuple):
    """A name that a pickle would import."""

    name: str


class _Dtype:
    """A type of numbers."""

    def __init__(self, code: str):
        self.code, self.order = code, "<"


class _Array:
    """An array, empty until the pickle says what is in it."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None


class _Mark:
    """The beginning of the elements of a container on the stack."""


def arrays_in(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays in a pickle, and its other values, by their places: ``0.embeddings`` is ``[0]["embeddings"]``.

    All arrays share the bytes of ``data``, or are as large as their bytes in it together. Raises :class:`PickleError`.
    """
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    left = [("", _Reader(data).value, 0)]
    size = count = 0
    while left:
        place, value, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH or count + len(left) > MAX_OPCODES:
            raise PickleError(f"containers deeper than {MAX_DEPTH}, or with more than {MAX_OPCODES} values")
        if isinstance(value, list | tuple | dict):
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            left += ((f"{place}.{key}".removeprefix("."), each, depth + 1) for key, each in inside)
            continue
        name = place or "0"
        if name in arrays or name in values or name.startswith("__"):
            raise PickleError(f"{name!r} is the place of two values, or a reserved one")
        found = value.value if isinstance(value, _Array) else value
        if isinstance(found, np.ndarray):
            arrays[name], size = found, size + found.nbytes
        elif isinstance(value, PLAIN):
            values[name] = value
        else:
            raise PickleError(f"{_described(value)} at {name}, expected an array")
        if size > len(data):
            raise PickleError("an array comes several times: together they are larger than the file")
    return dict(sorted(arrays.items())), _checked(dict(sorted(values.items())))


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    try:
        canonical_json(values)
    except ValueError as error:
        raise PickleError(f"a value that JSON has not: {error}") from error
    return values


def _key(key: object) -> str:
    if not isinstance(key, str) or not key.isprintable() or not key:
        raise PickleError(f"{_described(key)} as a key of a dict, expected a text")
    return key


class _Reader:
    """The stack machine of pickles, without what imports, calls or builds anything of its own."""

    def __init__(self, data: bytes):
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        # What calls make may not exceed what the file holds: each byte is decoded once and used once.
        self._room = 2 * len(data)
        self._calls: dict[str, Callable[..., Any]] = {
            _RECONSTRUCT: self._reconstruct,
            _SCALAR: self._scalar,
            _FROM_BUFFER: self._from_buffer,
            _DTYPE: self._dtype,
            _ENCODE: self._encode,
            _BYTES: lambda: b"",
        }
        try:
            for count, (opcode, argument, place) in enumerate(pickletools.genops(data)):
                if count >= MAX_OPCODES:
                    raise PickleError(f"more than {MAX_OPCODES} opcodes")
                self._step(opcode.name, argument)
                if opcode.name == "STOP" and place != len(data) - 1:
                    raise PickleError(f"{len(data) - 1 - (place or 0)} bytes after its end")
            (self.value,) = self._stack
        except PickleError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise PickleError(f"a damaged pickle: {str(error)[:200] or type(error).__name__}") from error

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PUTS:
            # As pickle writes them: one after the other.
            if argument not in (None, len(self._memo)):
                raise PickleError(f"the memo's entry {argument} after {len(self._memo)}")
            self._memo[len(self._memo)] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_Mark)
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(self._top(_TUPLES[name]))]
        elif name in ("TUPLE", "LIST", "DICT"):
            self._from_mark(name)
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[name]())
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
            self._extend(name)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._global(name, argument)
        elif name == "REDUCE":
            function, arguments = self._top(2)
            stack[-2:] = [self._call(function, arguments)]
        elif name == "BUILD":
            self._build()
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"the opcode {name}{'' if argument is None else f' {str(argument)[:100]!r}'}")

    def _top(self, count: int) -> list[Any]:
        """Return the topmost values. Raises ``IndexError`` if there are fewer."""
        found = self._stack[-count:]
        if len(found) < count or _Mark in found:
            raise IndexError("fewer values than are used")
        return found

    def _since_mark(self) -> list[Any]:
        """Take the values above the last mark from the stack."""
        place = len(self._stack) - 1 - self._stack[::-1].index(_Mark)
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found

    def _from_mark(self, name: str) -> None:
        found = self._since_mark()
        made = dict(_pairs(found)) if name == "DICT" else tuple(found) if name == "TUPLE" else found
        self._stack.append(made)

    def _extend(self, name: str) -> None:
        count = {"APPEND": 1, "SETITEM": 2}.get(name)
        found = self._top(count) if count else self._since_mark()
        if count:
            del self._stack[-count:]
        target = self._stack[-1]
        if not isinstance(target, list if name.startswith("APPEND") else dict):
            raise PickleError(f"{_described(target)} that is added to")
        target.extend(found) if isinstance(target, list) else target.update(_pairs(found))

    def _global(self, name: str, argument: Any) -> None:
        if name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
        else:
            module, attribute = self._top(2)
            del self._stack[-2:]
            if not isinstance(module, str) or not isinstance(attribute, str):
                raise PickleError(f"a name of {_described(module)} and {_described(attribute)}")
        found = f"{module}.{attribute}"
        if found not in _KNOWN:
            raise PickleError(f"{found[:200]}, expected numpy's arrays alone")
        self._stack.append(_Global(_KNOWN[found]))

    def _call(self, function: Any, arguments: Any) -> Any:
        call = self._calls.get(function.name) if isinstance(function, _Global) else None
        if call is None or not isinstance(arguments, tuple):
            raise PickleError(f"a call of {_described(function)}")
        return call(*arguments)

    def _build(self) -> None:
        target, state = self._top(2)
        self._stack.pop()
        if not isinstance(state, tuple):
            raise PickleError(f"{_described(target)} with {_described(state)} as its state")
        if isinstance(target, _Dtype):
            _, target.order, of_arrays, names, *_ = state
            if target.order not in ("<", ">", "|", "=") or of_arrays is not None or names is not None:
                raise PickleError("a dtype of fields or arrays, expected numbers")
        elif isinstance(target, _Array) and target.value is None:
            _, shape, dtype, by_columns, data = state
            target.value = self._shaped(data, dtype, shape, "F" if by_columns else "C")
        else:
            raise PickleError(f"{_described(target)} that is built")

    def _dtype(self, code: Any, *_: Any) -> _Dtype:
        if code not in _DTYPES:
            raise PickleError(f"the dtype {reprlib.repr(code)}, expected numbers: {', '.join(sorted(_DTYPES))}")
        return _Dtype(code)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise PickleError(f"a text in {reprlib.repr(encoding)}, expected bytes in latin1")
        self._take(len(text))
        return text.encode("latin1")

    def _reconstruct(self, kind: Any, _shape: Any, _code: Any) -> _Array:
        if kind != _Global(_NDARRAY):
            raise PickleError(f"{_described(kind)}, expected {_NDARRAY}")
        return _Array()

    def _scalar(self, dtype: Any, data: Any) -> _Array:
        return self._from_buffer(data, dtype, (), "C")

    def _from_buffer(self, data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        array = _Array()
        array.value = self._shaped(data, dtype, shape, order)
        return array

    def _shaped(self, data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
        """Return an array if its bytes are as many as its shape needs, in the byte order of safetensors."""
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
            raise PickleError(f"an array of {_described(dtype)} from {_described(data)}")
        sizes = shape if isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS else (None,)
        if any(type(each) is not int or each < 0 for each in sizes):
            raise PickleError(f"an array of shape {reprlib.repr(shape)}")
        kind = np.dtype(f"{'>' if dtype.order == '>' else '<'}{dtype.code}")
        if math.prod(shape) * kind.itemsize != len(data):
            raise PickleError(f"an array of shape {shape} and {dtype.code} in {len(data)} bytes")
        self._take(len(data))
        found = np.frombuffer(data, kind).reshape(shape, order=order)
        return np.ascontiguousarray(found, kind.newbyteorder("<")).reshape(shape)

    def _take(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise PickleError("bytes that are used several times: together they are larger than the file")


def _pairs(values: list[Any]) -> list[tuple[str, Any]]:
    return [(_key(key), value) for key, value in zip(values[::2], values[1::2], strict=True)]


def _described(value: object) -> str:
    return value.name if isinstance(value, _Global) else f"a value of type {type(value).__name__.lstrip('_')}"
