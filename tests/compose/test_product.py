"""Each with each: {ddp, fsdp, hsdp} x tp x sequence parallel x context parallel x accumulation, over 8 devices.

Of the 60 products 21 are run: 15 in float64, at 1e-12, and 6 others in float32, at 1e-5. In float64 each pair of values meets;
what float32 adds is the dtype, which each value meets, and in which kind, cp and accumulation meet each other.
Dropout, clipping, tied embeddings and AdamW are on. The reference is the same step on one device without
accumulation, which `test_compose.py` compares with plain Flax and optax. Gradients are compared through the
parameters after three steps.
"""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.ddp import DistributedDataParallel
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import init_device_mesh
from jaxpar.tp import ContextParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tiny import Transformer, loss_fn, plan, sequence_loss_fn

NUM_STEPS = 3
TP = ((1, False), (2, False), (2, True), (4, False), (4, True))


@dataclasses.dataclass(frozen=True)
class Product:
    kind: str
    tp: int = 1
    is_sequence_parallel: bool = False
    cp: int = 1
    accumulate: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        left = 8 // (self.tp * self.cp)
        replica = 2 if self.kind == "hsdp" and left > 1 else 1
        return {"replica": replica, "dp": min(2, left // replica), "cp": self.cp, "tp": self.tp}

    def __str__(self) -> str:
        sp, acc = "-sp" if self.is_sequence_parallel else "", "-acc" if self.accumulate > 1 else ""
        return f"{self.kind}-tp{self.tp}{sp}-cp{self.cp}{acc}"

    def parallelize(self, model: nnx.Module, mesh: Any) -> None:
        """The order alternates from layout to layout: it does not matter."""
        steps = [self._split, self._replicate_or_shard]
        for step in steps if (self.tp + self.cp + self.accumulate) % 2 else reversed(steps):
            step(model, mesh)

    def _split(self, model: nnx.Module, mesh: Any) -> None:
        parallelize_module(model, mesh["tp"], plan(is_sequence_parallel=self.is_sequence_parallel))
        parallelize_module(model, mesh["cp"], {"**.core": ContextParallel(rotate="ppermute")})

    def _replicate_or_shard(self, model: nnx.Module, mesh: Any) -> None:
        if self.kind == "ddp":
            DistributedDataParallel(model, mesh["replica", "dp", "cp"])
        elif self.kind == "fsdp":
            fully_shard(
                model, mesh["replica", "dp", "cp"], shard_axis=("replica", "dp", "cp"), units="blocks.*"
            )
        else:
            fully_shard(model, mesh, shard_axis=("dp", "cp"), replicate_axis="replica", units="blocks.*")


FLOAT32 = (
    Product("ddp", accumulate=2),
    Product("ddp", tp=2, is_sequence_parallel=True, cp=2),
    Product("fsdp", cp=2),
    Product("fsdp", tp=4, accumulate=2),
    Product("hsdp", tp=2),
    Product("hsdp", tp=4, is_sequence_parallel=True, cp=2, accumulate=2),
)


def products(dtype: str) -> tuple[Product, ...]:
    """float64: 15, each pair of values meets. float32: 6 others, each pair meets but those with tp."""
    if dtype == "float32":
        return FLOAT32
    return tuple(
        Product(kind, tp, sp, cp=1 + (i + j) % 2, accumulate=1 + (i + j // 2) % 2)
        for (i, kind), (j, (tp, sp)) in itertools.product(enumerate(("ddp", "fsdp", "hsdp")), enumerate(TP))
    )


CASES = [(dtype, product) for dtype in ("float64", "float32") for product in products(dtype)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_pair_of_values_meets(dtype: str) -> None:
    """In float32 every value is there, and every pair but those with tp."""
    values = [
        {"kind": p.kind, "tp": (p.tp, p.is_sequence_parallel), "cp": p.cp, "accumulate": p.accumulate}
        for p in products(dtype)
    ]
    every = {"kind": {"ddp", "fsdp", "hsdp"}, "tp": set(TP), "cp": {1, 2}, "accumulate": {1, 2}}
    assert {name: {v[name] for v in values} for name in every} == every
    for one, other in itertools.combinations(every, 2):
        if dtype == "float64" or "tp" not in (one, other):
            met = {(v[one], v[other]) for v in values}
            assert met == set(itertools.product(every[one], every[other]))


def test_each_dtype_has_products_of_its_own() -> None:
    assert [len(products(dtype)) for dtype in ("float64", "float32")] == [15, 6]
    assert len({product for _, product in CASES}) == 21


def trained(product: Product, dtype: str, devices: list[Any]) -> tuple[list[float], list[float], Any]:
    rng = np.random.default_rng(0)
    weights = (rng.uniform(size=(16, 8)) < 0.7).astype(dtype)
    batch = {"tokens": rng.integers(0, 16, (16, 9)).astype(np.int32), "weights": weights}
    mesh = init_device_mesh(tuple(product.sizes.values()), tuple(product.sizes), devices=devices)
    model = Transformer(dropout=0.25, dtype=dtype)
    model.train()
    product.parallelize(model, mesh)
    step = jaxpar.TrainStep(
        loss_fn if product.cp == 1 else sequence_loss_fn,
        model,
        nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param),
        mesh=mesh,
        batch_axes=("replica", "dp"),
        sequence_axes="cp",
        accumulate=product.accumulate,
        clip_norm=0.1,
    )
    metrics = [step(batch) for _ in range(NUM_STEPS)]
    return (
        [float(m["loss"]) for m in metrics],
        [float(m["grad_norm"]) for m in metrics],
        nnx.state(model, nnx.Param),
    )


@functools.cache
def reference(dtype: str) -> Any:
    """Of any accumulation: weights and dropout are those of the rows, wherever they are."""
    return trained(One("ddp"), dtype, jax.devices()[:1])


class One(Product):
    @property
    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(("replica", "dp", "cp", "tp"), 1)


@pytest.mark.parametrize(("dtype", "product"), CASES, ids=str)
def test_product_equals_one_device(dtype: str, product: Product) -> None:
    tolerance = {"float64": 1e-12, "float32": 1e-5}[dtype]
    num_devices = int(np.prod(list(product.sizes.values())))
    with jax.enable_x64(dtype == "float64"):
        losses, norms, state = trained(product, dtype, jax.devices()[:num_devices])
        expected_losses, expected_norms, expected_state = reference(dtype)
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    np.testing.assert_allclose(norms, expected_norms, rtol=tolerance)
    for ours, theirs in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
