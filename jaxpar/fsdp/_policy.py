"""`MixedPrecisionPolicy`: which dtype is stored, which travels, which computes.

stored shards f32  --cast-->  bf16  --all-gather-->  bf16 compute  -->  gradients bf16
gradients          --cast-->  reduce_dtype  --reduce-scatter-->  cast to the stored dtype
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit; None leaves them as they are. PyTorch's `MixedPrecisionPolicy` (rows F6, X20).

    Only floating arrays are cast. The stored parameters (the master weights that the optimizer sees) keep their
    dtype, and so do gradients as the optimizer gets them.

    Args:
        param_dtype: parameters are cast to it before the all-gather, so it is what travels and what computes.
        reduce_dtype: gradients travel and are summed in it; default `param_dtype`.
        output_dtype: what the module returns.
        cast_forward_inputs: cast the module's inputs to `param_dtype`.

    Raises:
        ParallelizeError: a dtype is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar.fsdp import MixedPrecisionPolicy
        >>> MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32).reduce_dtype
        dtype('float32')
    """

    param_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike | None = None
    output_dtype: DTypeLike | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ParallelizeError(
                    f"MixedPrecisionPolicy({name}={dtype!r}): {jnp.dtype(dtype)} is not a floating dtype. Parameters and "
                    f"gradients are cast to it and back; write {name}=jnp.bfloat16 or jnp.float32."
                )
            object.__setattr__(self, name, jnp.dtype(dtype))

    def cast_inputs(self, values: PyTree) -> PyTree:
        """Casts what goes into the module."""
        return cast_floating(values, self.param_dtype if self.cast_forward_inputs else None)

    def cast_outputs(self, values: PyTree) -> PyTree:
        """Casts what comes out of it."""
        return cast_floating(values, self.output_dtype)


def cast_floating(values: PyTree, dtype: Any) -> PyTree:
    """Casts the floating arrays of a tree; modules and variables in it, and everything else, are left alone."""
    if dtype is None:
        return values

    def cast(x: Any) -> Any:
        is_floating = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if is_floating else x

    return jax.tree.map(cast, values, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
