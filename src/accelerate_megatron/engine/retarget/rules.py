"""The rewrite rules: what each one finds in a `megatron.core` module and puts in its place.

They apply only where the engine runs on the CPU, and only to the syntax tree of the module
being imported. To add a rule: write a class like the ones below, put it in `RULES`, and add
its hits to `expected_hits.py`.
"""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

DEVICE_NAME = "_retargeted_device"
"""The global name under which a rewritten module finds our `facade.device`."""

PLACEHOLDER_NAME = "_retargeted_placeholder"
"""The global name under which a rewritten module finds our `placeholder.Placeholder`."""


class Rule(ABC):
    """One kind of rewriting.

    A rule sees every node of the types in `node_types`, after the node's children were
    rewritten, and returns what replaces it, or None to leave it. Where several rules
    match one node, the first in `RULES` wins.
    """

    name: ClassVar[str]
    rewrites: ClassVar[str]
    why: ClassVar[str]
    node_types: ClassVar[tuple[type[ast.AST], ...]]

    @abstractmethod
    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Return the replacement of `node`, found in `module`, or None."""


class CudaImport(Rule):
    """`from torch.cuda import a, b` and `import torch.cuda.nvtx as nvtx`."""

    name = "cuda-import"
    rewrites = "imports from torch.cuda -> the same names of our device facade"
    why = "names imported on their own would escape the rule torch-cuda"
    node_types = (ast.Import, ast.ImportFrom)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Turn the import into assignments from the facade."""
        match node:
            case ast.ImportFrom(level=0, module=str(path), names=names):
                pairs = [(alias.asname or alias.name, f"{path}.{alias.name}") for alias in names]
            case ast.Import(names=[ast.alias(name=path, asname=str(bound))]):
                pairs = [(bound, path)]
            case _:
                return None
        if path != "torch.cuda" and not path.startswith("torch.cuda."):
            return None
        targets: list[ast.expr] = [ast.Name(bound, ast.Store()) for bound, _ in pairs]
        values = [_expression(path.replace("torch.cuda", DEVICE_NAME, 1)) for _, path in pairs]
        if len(pairs) == 1:
            return ast.Assign(targets, values[0])
        return ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple(values, ast.Load()))


class GpuPackageImport(Rule):
    """`import triton`, `from transformer_engine... import ...` and the like."""

    name = "gpu-package-import"
    rewrites = "imports of packages of GPU kernels -> raise ModuleNotFoundError"
    why = (
        "where such a package is installed, Megatron-Core calls its kernels, which refuse CPU "
        "tensors; Megatron-Core has a path of its own for each that is missing"
    )
    node_types = (ast.Import, ast.ImportFrom)

    packages = frozenset(
        {
            "amp_C",
            "apex",
            "causal_conv1d",
            "cudnn",
            "deep_ep",
            "fast_hadamard_transform",
            "fla",
            "flash_attn",
            "flash_attn_2_cuda",
            "flash_attn_3",
            "flash_mla",
            "flashattn_hopper",
            "flashinfer",
            "flashinfer_cubin",
            "flashinfer_jit_cache",
            "fused_weight_gradient_mlp_cuda",
            "grouped_gemm",
            "mamba_ssm",
            "nvidia_kitchen",
            "scaled_masked_softmax_cuda",
            "scaled_softmax_cuda",
            "scaled_upper_triang_masked_softmax_cuda",
            "tilelang",
            "transformer_engine",
            "transformer_engine_torch",
            "triton",
        }
    )

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Raise what the import raises where the package is missing."""
        package = _imported_package(node)
        if package not in self.packages:
            return None
        message = f"{package} is for GPUs; this process runs Megatron-Core on the CPU"
        error = ast.Call(
            ast.Name("ModuleNotFoundError", ast.Load()),
            [ast.Constant(message)],
            [ast.keyword("name", ast.Constant(package))],
        )
        return ast.Raise(error, None)


class TritonPlaceholder(Rule):
    """`import triton` in a module that Megatron-Core needs even without triton."""

    name = "triton-placeholder"
    rewrites = "unguarded imports of triton in paged_stash -> a placeholder in that module"
    why = (
        "megatron-core 0.18 and later import that module, hence triton, whatever the model. A "
        "stub in sys.modules would make torch believe that triton is installed"
    )
    node_types = (ast.Import,)

    modules = frozenset(
        {
            "megatron.core.transformer.moe.paged_stash",
            "megatron.core.transformer.moe.ops.paged_stash",
        }
    )

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Bind the placeholder to the name that the import would bind."""
        if module not in self.modules or _imported_package(node) != "triton":
            return None
        assert isinstance(node, ast.Import)
        bound = node.names[0].asname or "triton"
        value = ast.Call(
            ast.Name(PLACEHOLDER_NAME, ast.Load()), [ast.Constant(node.names[0].name)], []
        )
        return ast.Assign([ast.Name(bound, ast.Store())], value)


class TorchCuda(Rule):
    """`torch.cuda`, in `torch.cuda.current_device()` and everywhere else."""

    name = "torch-cuda"
    rewrites = "torch.cuda -> our device facade"
    why = (
        "patching torch.cuda itself would tell every library in the process that a GPU exists; "
        "torch.backends.cuda and torch.version.cuda are settings, and stay"
    )
    node_types = (ast.Attribute,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace the attribute by the name of the facade."""
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                return ast.Name(DEVICE_NAME, node.ctx)
        return None


class TorchCompile(Rule):
    """`torch.compile`, as a decorator or called."""

    name = "torch-compile"
    rewrites = "torch.compile -> a decorator that leaves the function alone"
    why = (
        "for CPU code it needs a C++ compiler, which a laptop or a container need not have, and "
        "seconds per function where a step takes milliseconds; naming it imports the compiler's "
        "Python side, a second more at every start"
    )
    node_types = (ast.Attribute,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace the attribute by the facade's decorator."""
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="compile"):
                return _expression(f"{DEVICE_NAME}.uncompiled")
        return None


class IndexedDevice(Rule):
    """`torch.device("cuda", index)`."""

    name = "indexed-device"
    rewrites = 'torch.device("cuda", index) -> torch.device("cpu")'
    why = "the index is torch.cuda.current_device(), which is a device here, not a number"
    node_types = (ast.Call,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Drop the index. The rule device-string has rewritten the string before."""
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="device"),
                args=[ast.Constant(value="cpu") as device, _],
            ):
                return ast.Call(node.func, [device], [])
        return None


class DeviceString(Rule):
    """`"cuda"`, as in `device="cuda"`, `x.to("cuda")` and `x.device.type == "cuda"`."""

    name = "device-string"
    rewrites = '"cuda" and "cuda:N" -> "cpu"'
    why = "every string that is exactly this names a device; those that contain it do not"
    node_types = (ast.Constant,)

    _pattern = re.compile(r"cuda(:\d+)?")

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace the whole string, or nothing."""
        match node:
            case ast.Constant(value=str(text)) if self._pattern.fullmatch(text):
                return ast.Constant("cpu")
        return None


class DeviceFString(Rule):
    """`f"cuda:{torch.cuda.current_device()}"`."""

    name = "device-fstring"
    rewrites = 'f"cuda:{index}" -> "cpu"'
    why = "it names a device by its index, and there is one CPU"
    node_types = (ast.JoinedStr,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace a formatted string that is `cuda:` and one value."""
        match node:
            case ast.JoinedStr(values=[ast.Constant(value="cuda:"), ast.FormattedValue()]):
                return ast.Constant("cpu")
        return None


class TensorTypeString(Rule):
    """`"torch.cuda.FloatTensor"`, what `tensor.type()` gives on a GPU."""

    name = "tensor-type-string"
    rewrites = '"torch.cuda.FloatTensor" -> "torch.FloatTensor"'
    why = "the optimizers sort parameters by tensor.type(), which has no `cuda` on a CPU"
    node_types = (ast.Constant,)

    _pattern = re.compile(r"torch\.cuda\.(\w+Tensor)")

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Drop `cuda` from the name of the type."""
        match node:
            case ast.Constant(value=str(text)) if found := self._pattern.fullmatch(text):
                return ast.Constant(f"torch.{found[1]}")
        return None


class CudaCall(Rule):
    """`tensor.cuda()` and `module.cuda()`."""

    name = "cuda-call"
    rewrites = "x.cuda() -> x"
    why = "x is where it should be; on a GPU, too, .cuda() gives x itself if it is there already"
    node_types = (ast.Call,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace the call by the object it is called on."""
        return _receiver_of_call(node, "cuda")


class IsCuda(Rule):
    """`tensor.is_cuda`."""

    name = "is-cuda"
    rewrites = 'x.is_cuda -> x.device.type == "cpu"'
    why = "Megatron-Core means `is on the device`; token counts stay tensors otherwise"
    node_types = (ast.Attribute,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace the attribute by a comparison of the device's type."""
        match node:
            case ast.Attribute(attr="is_cuda", ctx=ast.Load()):
                device = ast.Attribute(node.value, "device", ast.Load())
                kind = ast.Attribute(device, "type", ast.Load())
                return ast.Compare(kind, [ast.Eq()], [ast.Constant("cpu")])
        return None


class PinMemoryArgument(Rule):
    """`torch.empty(..., pin_memory=True)`."""

    name = "pin-memory-argument"
    rewrites = "pin_memory=... in a call -> pin_memory=False"
    why = "torch refuses to pin memory where there is no accelerator"
    node_types = (ast.keyword,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Keep the keyword, so that what takes it still gets it, and switch it off."""
        match node:
            case ast.keyword(arg="pin_memory"):
                return ast.keyword("pin_memory", ast.Constant(False))
        return None


class PinMemoryCall(Rule):
    """`tensor.pin_memory()`."""

    name = "pin-memory-call"
    rewrites = "x.pin_memory() -> x"
    why = "torch refuses to pin memory where there is no accelerator"
    node_types = (ast.Call,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace the call by the tensor it is called on."""
        return _receiver_of_call(node, "pin_memory")


class RecordStream(Rule):
    """`tensor.record_stream(stream)`."""

    name = "record-stream"
    rewrites = "x.record_stream(stream) -> None"
    why = "CPU tensors belong to no stream, and torch refuses the call on them"
    node_types = (ast.Call,)

    def rewrite(self, node: ast.AST, module: str) -> ast.AST | None:
        """Replace the call by what it returns."""
        return ast.Constant(None) if _receiver_of_call(node, "record_stream") else None


RULES: Sequence[Rule] = (
    CudaImport(),
    TritonPlaceholder(),
    GpuPackageImport(),
    TorchCuda(),
    TorchCompile(),
    DeviceString(),
    DeviceFString(),
    IndexedDevice(),
    TensorTypeString(),
    CudaCall(),
    IsCuda(),
    PinMemoryArgument(),
    PinMemoryCall(),
    RecordStream(),
)

_WORDS = (
    *("compile", "cuda", "is_cuda", "pin_memory", "record_stream"),
    *sorted(GpuPackageImport.packages),
)
TRIGGER = re.compile(rb"\b(?:%s)\b" % "|".join(_WORDS).encode())
"""What is in every source that some rule matches; a source without it need not be parsed."""


def _imported_package(node: ast.AST) -> str | None:
    """Return the top-level package that an import statement names, None for relative ones."""
    match node:
        case ast.Import(names=[ast.alias(name=path), *_]):
            return path.split(".")[0]
        case ast.ImportFrom(level=0, module=str(path)):
            return path.split(".")[0]
    return None


def _receiver_of_call(node: ast.AST, method: str) -> ast.expr | None:
    """Return `x` if `node` is the call `x.method(...)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)) if name == method:
            return receiver
    return None


def _expression(path: str) -> ast.expr:
    """Return the expression that a dotted path is."""
    return ast.parse(path, mode="eval").body
