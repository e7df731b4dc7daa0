"""Bytes per device that a compiled program needs, as XLA planned them.

total = arguments + outputs - alias + temporaries         alias: outputs that reuse donated arguments
"""

from dataclasses import dataclass
from typing import Any

from jaxpar.debug._program import Program, compile_program
from jaxpar.debug._text import format_bytes


@dataclass(frozen=True)
class MemoryUse:
    """Bytes per device of one compiled program.

    Attributes:
        argument_bytes: All arguments, sharded as they come in.
        output_bytes: All results.
        alias_bytes: The part of the results that is written over donated arguments.
        temp_bytes: Everything in between at its peak: activations, gradients, gathered parameters.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """What must fit on the device."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.total_bytes)} per device: arguments {format_bytes(self.argument_bytes)} + outputs "
            f"{format_bytes(self.output_bytes)} - alias {format_bytes(self.alias_bytes)} + temporaries "
            f"{format_bytes(self.temp_bytes)}"
        )


def memory(program: Program, *args: Any, **kwargs: Any) -> MemoryUse:
    """Read the memory plan of the compiled program of `program(*args, **kwargs)`, without running it.

    Argument, output and alias bytes are exact on every platform. Temporaries are those of the platform compiled
    for: XLA:CPU fuses less than XLA:GPU and widens bfloat16, so compare slopes there rather than absolute bytes.

    Args:
        program: A function, something with `.lower(*args)`, a `jax.stages.Lowered` or `Compiled`.
        *args: Arguments to lower with; arrays or `jax.ShapeDtypeStruct`s with shardings.
        **kwargs: Keyword arguments to lower with.

    Raises:
        TypeError: `program` is text or cannot be compiled, or the backend keeps no memory plan.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> use = memory(jax.jit(lambda x: x + 1, donate_argnums=0), jnp.ones(256))
        >>> use.argument_bytes, use.output_bytes, use.alias_bytes
        (1024, 1024, 1024)
    """
    if isinstance(program, str):
        raise TypeError("memory() needs the program itself: HLO text does not hold XLA's memory plan.")
    stats = compile_program(program, *args, **kwargs).memory_analysis()
    if stats is None:
        raise TypeError("memory(): this backend keeps no memory plan (memory_analysis() returned None).")
    return MemoryUse(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
