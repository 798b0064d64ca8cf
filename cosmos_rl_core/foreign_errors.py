"""Out-of-memory errors of libraries, recognised by their texts because most libraries have no class for them."""

import errno
import re
from collections.abc import Iterator

from cosmos_rl_core.errors import CosmosRLError

_AT_THE_BEGINNING = (
    # CUDA and PyTorch's allocators, on each kind of device.
    r"(?:CUDA|HIP|XPU)(?: driver| runtime)?(?: [Ee]rror)?(?: \(2\))?\s?:? out of memory\b(?!/)",
    r"CUDA driver error: 2(?=$|:| \()",
    r"(?:cuda|hip|cu)(?:Malloc|Mem[A-Z])\w* failed\b[^\n]*: out of memory\b(?!/)",
    r"Triton Error \[(?:CUDA|HIP)\]: out of memory\b(?!/)",
    r"nvrtc: error: out of memory\b(?!/)",
    r"MPS backend out of memory\b",
    # Indirect texts: no memory for a handle or for the workspace of a convolution.
    r"(?:CU|HIP)BLAS_STATUS_NOT_INITIALIZED,? when calling `?(?:cu|hip)blas(?:Lt)?Create\(",
    r"Unable to find a valid (?:cuDNN|MIOpen) algorithm to run convolution\b",
    r"(?:GET|FIND) was unable to find an engine to execute this computation\b",
    # NCCL.
    r"Cuda failure (?:\d+ )?'out of memory'",
    r"Failed to (?:CUDA )?(?:host )?(?:malloc|calloc|alloc)(?: async)? \d+ bytes\b",
    # numpy's text in an error of another class.
    r"Unable to allocate [\d.]+ \w+ for an array\b",
)
"""Texts at the beginning of a line or of a quoted message, never inside a path or a prompt."""
_ANYWHERE = (
    r"(?<![\w/.'-])DefaultCPUAllocator: (?:can't allocate|not enough) memory\b",
    r"(?<![\w/.-])(?:cudaErrorMemoryAllocation|(?:CUDA|NVRTC)_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory)(?![\w/.-])",
    # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuRAND, cuFFT.
    r"(?<![\w/.-])(?:CU|HIP|ROC|MIOPEN)[A-Z]*_(?:[A-Z]+_)*ALLOC(?:ATION)?_FAILED(?![\w/.-])",
    # C++, the system, onnxruntime.
    r"(?<![\w/.-])std::bad_alloc(?![\w/])",
    r"\bCannot allocate memory \((?:os error )?12\)",
    r"(?:^|(?<=[:\]>] )|(?<=\())\[Errno 12\] Cannot allocate memory\b",
    r"\bFailed to allocate memory for requested buffer of size \d+",
)
_BEGINNING = rf"(?:^|(?<=[:\]>] ))(?:{'|'.join(_AT_THE_BEGINNING)})"
_TEXTS = re.compile("|".join([_BEGINNING, *_ANYWHERE]), re.MULTILINE)
"""Texts of out-of-memory errors without a class of their own."""
_NATIVE = re.compile(
    r"RuntimeError|torch\.AcceleratorError|torch\.distributed\.Dist\w*Error|onnxruntime\..*|(?:.*\.)?SafetensorError"
)
"""Names of the classes whose texts come from C++ or Rust, spelled like in tracebacks."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` or one of its causes means that a device or the host ran out of memory.

    Errors of this project never match, because they have a kind. A full disk does not match.
    """
    return any(
        means_out_of_memory(_traced_name(kind), str(one))
        for one in _chain(error)
        if not isinstance(one, CosmosRLError)
        for kind in type(one).__mro__
    )


def means_out_of_memory(class_name: str, text: str) -> bool:
    """Return whether an error means out of memory, given the name of its class, with the module, and its text."""
    if class_name.endswith("MemoryError"):
        return True
    if class_name == "OSError":
        return text.startswith(f"[Errno {errno.ENOMEM}] ")
    return _NATIVE.fullmatch(class_name) is not None and _TEXTS.search(text) is not None


def _traced_name(kind: type) -> str:
    """Return a class's name the way tracebacks spell it."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
