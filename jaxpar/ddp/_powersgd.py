"""`PowerSGD`: matrices of gradients travel as two thin factors; what was left out is sent in a later step.

gradient of rank r   M_r [rows, cols]  = its gradient + its error of the step before
left factor          P = sum_r M_r Q   [rows, rank]    all-reduce 1, together with what is not compressed
                     P = orthonormal(P)
right factor         Q = sum_r Q_r,  Q_r = M_r^T P     all-reduce 2, [cols, rank]
everywhere           P Q^T  ~  sum_r M_r               one step of power iteration from the last step's Q
error of rank r      M_r - P Q_r^T                     so that  (sum sent) + (sum of errors) = (true sum)
"""

import functools
import math
from dataclasses import KW_ONLY, dataclass

import jax
import jax.numpy as jnp

from jaxpar._errors import ParallelizeError
from jaxpar._mean import divide
from jaxpar._module import vary, varying_axes
from jaxpar._pytree import PyTree
from jaxpar.ddp._grad_bucket import GradBucket

State = dict[str, jax.Array]
Arrays = tuple[jax.Array, ...]

_PRECISION = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class PowerSGD:
    """Low-rank compression of gradients with error feedback: PyTorch's `powerSGD_hook` and its `PowerSGDState`.

    Over the bucket's axes: before `start_powerSGD_iter` one all-reduce of the gradients; after it two, of
    `(rows + cols) * rank` numbers per compressed matrix instead of `rows * cols`. A parameter is taken as the matrix
    nearest to square that its dims allow (a convolution f32[h, w, in, out] as [h*w*in, out]), and is compressed only
    where that saves more than `min_compression_rate`. Factors and errors are float32 at least, on the wire they have
    the gradient's dtype. States are kept by `TrainStep`: per rank and compressed parameter an error of the
    parameter's size, and Q.

    The error is what this rank's own factor misses (Algorithm 2 of the paper). PyTorch takes the difference to the
    mean over ranks, which has the same sum but also piles up how ranks differ, for ever.

    Args:
        matrix_approximation_rank: number of columns of P and Q; at most rows and cols are used.
        start_powerSGD_iter: steps with a plain all-reduce, before the first compressed one.
        min_compression_rate: compress only if `(rows + cols) * rank * min_compression_rate < rows * cols`.
        use_error_feedback: add what was left out to the next step's gradient.
        warm_start: start from the last step's Q, not from a random one.
        orthogonalization_epsilon: added to norms that are divided by; not needed against zero gradients, whose
            columns stay zero.
        random_seed: of the first Q (without `warm_start`, of every Q), which is equal on all ranks.

    Raises:
        ParallelizeError: a number out of range, or error feedback or warm start from the first two steps.

    Source: Vogels et al., PowerSGD, arXiv 1905.13727; PyTorch row P33.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar.ddp import PowerSGD
        >>> hook = PowerSGD(matrix_approximation_rank=2)
        >>> {name: x.shape for name, x in hook.init(jax.ShapeDtypeStruct((64, 32), jnp.float32)).items()}
        {'step': (), 'error': (64, 32), 'q': (32, 2)}
    """

    matrix_approximation_rank: int = 1
    _: KW_ONLY
    start_powerSGD_iter: int = 1000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("matrix_approximation_rank", 1),
            ("start_powerSGD_iter", 0),
            ("min_compression_rate", 0),
            ("orthogonalization_epsilon", 0),
        ):
            if getattr(self, name) < least:
                raise ParallelizeError(f"PowerSGD({name}={getattr(self, name)}): must be at least {least}.")
        if self.start_powerSGD_iter <= 1 and (self.use_error_feedback or self.warm_start):
            raise ParallelizeError(
                f"PowerSGD(start_powerSGD_iter={self.start_powerSGD_iter}) with "
                f"use_error_feedback={self.use_error_feedback}, warm_start={self.warm_start}: training is most "
                f"sensitive in its first steps, whose errors would be fed back into later ones (PyTorch's rule). Write "
                f"start_powerSGD_iter=2 or more, or use_error_feedback=False, warm_start=False."
            )

    def init(self, gradient: jax.ShapeDtypeStruct) -> PyTree:
        """Returns the state of one parameter on one rank: steps so far, error, Q."""
        state = {"step": jnp.zeros((), jnp.float32)}
        matrix = self._matrix(gradient.shape)
        if matrix is None:
            return state
        dtype = _wide(gradient.dtype)
        if self.use_error_feedback:
            state["error"] = jnp.zeros(matrix, dtype)
        if self.warm_start:
            state["q"] = jnp.zeros((matrix[1], self._rank(matrix)), dtype)
        return state

    def __call__(self, bucket: GradBucket, states: tuple[State, ...]) -> tuple[Arrays, tuple[State, ...]]:
        """Returns the bucket's summed gradients, compressed or not, and the next states."""
        matrices = [self._matrix(g.shape) for g in bucket.gradients]
        if not any(matrices):
            return bucket.all_reduce(bucket.gradients), tuple(map(_counted, states))
        if self.start_powerSGD_iter == 0:
            return self._compressed(bucket, states)
        # The state is per rank by type, but its step is the same on all: they take the same branch.
        return jax.lax.cond(
            states[0]["step"] < self.start_powerSGD_iter,
            lambda states: (bucket.all_reduce(bucket.gradients), tuple(map(_counted, states))),
            lambda states: self._compressed(bucket, states),
            states,
        )

    def _compressed(self, bucket: GradBucket, states: tuple[State, ...]) -> tuple[Arrays, tuple[State, ...]]:
        shapes = [self._matrix(g.shape) for g in bucket.gradients]
        chosen = [i for i, shape in enumerate(shapes) if shape is not None]
        plain = [i for i, shape in enumerate(shapes) if shape is None]
        dtype = bucket.gradients[0].dtype
        ms = [
            _with_error(g, shape, state)
            for g, shape, state in zip(bucket.gradients, shapes, states, strict=True)
            if shape is not None
        ]
        ps = [_matmul(m, self._start(m, states[i])) for i, m in zip(chosen, ms, strict=True)]
        first = bucket.all_reduce((*(p.astype(dtype) for p in ps), *(bucket.gradients[i] for i in plain)))
        wide = [p.astype(m.dtype) for p, m in zip(first, ms, strict=False)]
        bases = _orthonormal_together(wide, epsilon=self.orthogonalization_epsilon)
        mine = [_matmul(m.T, basis).astype(dtype) for m, basis in zip(ms, bases, strict=True)]
        qs = bucket.all_reduce(tuple(mine))
        out = dict(zip(plain, first[len(chosen) :], strict=True))
        next_states = list(map(_counted, states))
        for i, m, basis, my_q, q in zip(chosen, ms, bases, mine, qs, strict=True):
            out[i] = _product(basis, q).astype(dtype).reshape(bucket.gradients[i].shape)
            news = {"error": m - _product(basis, my_q), "q": q.astype(m.dtype)}
            old = states[i]
            next_states[i] |= {k: vary(x, tuple(varying_axes(old[k]))) for k, x in news.items() if k in old}
        return tuple(out[i] for i in range(len(out))), tuple(next_states)

    def _matrix(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The shape as [rows, cols], nearest to square; None if compressing it would not pay."""
        splits = [(math.prod(shape[:d]), math.prod(shape[d:])) for d in range(1, len(shape))]
        if not splits:
            return None
        rows, cols = min(splits, key=sum)
        pays = (rows + cols) * self._rank((rows, cols)) * self.min_compression_rate < rows * cols
        return (rows, cols) if pays else None

    def _rank(self, matrix: tuple[int, int]) -> int:
        return min(self.matrix_approximation_rank, *matrix)

    def _start(self, m: jax.Array, state: State) -> jax.Array:
        """Q to start from, [cols, rank]; a column that is zero (none yet, or no gradient) is drawn anew."""
        key = jax.random.fold_in(jax.random.key(self.random_seed), state["step"].astype(jnp.int32))
        fresh = jax.random.normal(key, (m.shape[1], self._rank((m.shape[0], m.shape[1]))), m.dtype)
        if "q" not in state:
            return fresh
        return jnp.where(jnp.any(state["q"] != 0, axis=0), state["q"], fresh)


def orthonormal(p: jax.Array, *, epsilon: float = 0) -> jax.Array:
    """Returns columns that span those of `p` [rows, rank] and are orthonormal; columns that add nothing become 0.

    Gram-Schmidt, each column twice, as a single pass loses orthogonality where a column nearly lies in the span of
    those before it. Not QR: factorisations of thin matrices are slow on accelerators.
    """
    noise = 8 * jnp.finfo(p.dtype).eps
    basis = p[:, :0]
    for column in range(p.shape[1]):
        x = divide(p[:, column], jnp.max(jnp.abs(p[:, column])))  # squares of small numbers would underflow
        before = jnp.linalg.norm(x)
        for _ in range(2 if column else 0):
            x = x - _matmul(basis, _matmul(basis.T, x))
        norm = jnp.linalg.norm(x)
        x = jnp.where(norm > noise * before, divide(x, norm + epsilon), 0)
        basis = jnp.concatenate([basis, x[:, None]], axis=1)
    return basis


def _orthonormal_together(ps: list[jax.Array], *, epsilon: float) -> list[jax.Array]:
    """`orthonormal` of each, as one batch: few small operations instead of many. Rows and columns of zeros, which
    fill the smaller ones up, change nothing."""
    rows, rank = (max(p.shape[d] for p in ps) for d in (0, 1))
    batch = jnp.stack([jnp.pad(p, ((0, rows - p.shape[0]), (0, rank - p.shape[1]))) for p in ps])
    bases = jax.vmap(functools.partial(orthonormal, epsilon=epsilon))(batch)
    return [basis[: p.shape[0], : p.shape[1]] for basis, p in zip(bases, ps, strict=True)]


def _with_error(gradient: jax.Array, shape: tuple[int, int], state: State) -> jax.Array:
    m = gradient.astype(_wide(gradient.dtype)).reshape(shape)
    return m + state["error"] if "error" in state else m


def _product(basis: jax.Array, q: jax.Array) -> jax.Array:
    return _matmul(basis, q.T.astype(basis.dtype))


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_PRECISION)


def _counted(state: State) -> State:
    return state | {"step": state["step"] + 1}


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
