"""Turn whatever a user holds - function, step, lowered, compiled, text - into a compiled program.

    f(x)           -> jax.jit(f).lower(x).compile()
    step           -> step.lower(batch).compile()       anything with `.lower`
    Lowered        -> .compile()
    Compiled, str  -> as they are

Nothing is executed. The mesh is the one given, else the one in the shardings of the program's own inputs, outputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar._errors import MeshError
from jaxpar.debug._groups import mesh_in_text
from jaxpar.debug._hlo import Module, parse_module
from jaxpar.mesh import MeshLike, as_jax_mesh


@runtime_checkable
class CanLower(Protocol):
    """What `jax.jit` returns, and jaxpar's `TrainStep`: something that lowers to a program for given arguments."""

    def lower(self, *args: Any, **kwargs: Any) -> Any: ...


@runtime_checkable
class CanCompile(Protocol):
    """A lowered program (`jax.stages.Lowered` and what wraps it)."""

    def compile(self) -> Any: ...


@runtime_checkable
class HasText(Protocol):
    """A compiled program (`jax.stages.Compiled` and what wraps it)."""

    def as_text(self) -> str | None: ...


Program: TypeAlias = str | CanLower | CanCompile | HasText | Callable[..., Any]


@dataclass(frozen=True)
class ReadProgram:
    """A parsed program and the axis sizes of its mesh (empty if no mesh is known)."""

    module: Module
    axis_sizes: dict[str, int]


def compile_program(program: Program, *args: Any, **kwargs: Any) -> Any:
    """The compiled object for `program` called with the arguments; nothing runs.

    Raises:
        TypeError: `program` is none of the things that can be compiled.
    """
    if isinstance(program, CanLower) and not isinstance(program, str):
        return program.lower(*args, **kwargs).compile()
    if isinstance(program, CanCompile):
        return program.compile()
    if isinstance(program, HasText):
        return program
    if callable(program):
        return jax.jit(program).lower(*args, **kwargs).compile()
    raise TypeError(
        f"Cannot compile {program!r} ({type(program).__name__}). Pass a function, something with .lower(...) such "
        "as a jitted function or a TrainStep, a jax.stages.Lowered or Compiled, or the text of an HLO module."
    )


def read_program(program: Program, *args: Any, mesh: MeshLike | None = None, **kwargs: Any) -> ReadProgram:
    """Compile if needed, parse, and find the mesh.

    Raises:
        TypeError: `program` is none of the things that can be read.
        MeshError: The mesh given has another number of devices than the program.
    """
    compiled = program if isinstance(program, str) else compile_program(program, *args, **kwargs)
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    _refuse_continuation_fusions(text or "")
    module = parse_module(text or "")
    if mesh is not None:
        return ReadProgram(module, _checked_sizes(as_jax_mesh(mesh), module))
    meshes = () if isinstance(compiled, str) else _meshes(compiled)
    found = next((m for m in meshes if m.size == module.num_devices), None)
    sizes = dict(found.shape) if found else mesh_in_text(text or "")
    return ReadProgram(module, {str(name): size for name, size in (sizes or {}).items()})


def _refuse_continuation_fusions(text: str) -> None:
    """XLA:TPU may cut a collective over several fusions, each of which prints it: counts would be wrong."""
    if "AsyncCollectiveStart" in text:
        raise NotImplementedError(
            "This program holds continuation fusions of XLA:TPU, which print one collective several times; they "
            "cannot be counted yet. Compile it with "
            "compiler_options={'xla_tpu_enable_async_collective_fusion': False}."
        )


def _meshes(compiled: Any) -> Iterator[Mesh]:
    """Meshes named by the shardings of a compiled program's inputs and outputs."""
    for name in ("input_shardings", "output_shardings"):
        for sharding in jax.tree.leaves(getattr(compiled, name, ())):
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                yield sharding.mesh


def _checked_sizes(mesh: Mesh, module: Module) -> dict[str, int]:
    if mesh.size != module.num_devices:
        raise MeshError(
            f"mesh={dict(mesh.shape)} has {mesh.size} devices, but the program was compiled for "
            f"{module.num_devices}. Collectives name positions in the mesh of their own program. Pass that mesh, or "
            "leave mesh= out to take it from the program's shardings."
        )
    return {str(name): size for name, size in mesh.shape.items()}
