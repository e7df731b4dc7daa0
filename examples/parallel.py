"""How `train_lm.py` spreads the transformer over a mesh; the model itself knows nothing of it.

pp            blocks: stages of them, microbatches between
replica, dp   rows of the batch: ddp, zero1 or fsdp
cp            the sequence of each row: attention becomes a ring
tp            the maths of each layer: columns, then rows
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.cp import split_sequence
from jaxpar.ddp import DistributedDataParallel
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard
from jaxpar.mesh import DeviceMesh, Partial, Replicate, Shard
from jaxpar.pp import pipeline
from jaxpar.tp import (
    ColwiseParallel,
    ContextParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    cross_entropy,
    parallelize_module,
)
from transformer import Transformer, TransformerConfig

AXES = ("pp", "replica", "dp", "cp", "tp")
BATCH_AXES = ("replica", "dp")
STRATEGIES = ("ddp", "zero1", "fsdp")


def parallelize(
    model: Transformer,
    mesh: DeviceMesh,
    strategy: str,
    *,
    is_sequence_parallel: bool = False,
    schedule: str = "1F1B",
    microbatches: int = 1,
) -> None:
    """Splits the model over all axes of the mesh, in place; an axis of size 1 costs nothing."""
    plan = tensor_parallel_plan(model.config, is_sequence_parallel=is_sequence_parallel)
    parallelize_module(model, mesh["tp"], plan)
    parallelize_module(model, mesh["cp"], {"blocks.*.attention.core": ContextParallel()})
    if strategy == "fsdp":
        # Each block is a unit; embedding, last norm and head are one more. Layers that compute in bf16 travel so too.
        fully_shard(
            model,
            mesh,
            shard_axis=("dp", "cp"),
            replicate_axis="replica",
            units="blocks.*",
            mp_policy=MixedPrecisionPolicy(param_dtype=model.config.dtype, reduce_dtype=jnp.float32),
        )
    else:
        DistributedDataParallel(model, mesh["replica", "dp", "cp"])
    if mesh.size("pp") > 1:
        pipeline(model, mesh["pp"], schedule=schedule, n_microbatches=microbatches)


def tensor_parallel_plan(
    config: TransformerConfig, *, is_sequence_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """Megatron's plan: two all-reduces a block forward and two backward; or gathers and scatters along the sequence.

    Logits stay split over the vocabulary, for `training_loss`.
    """
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(attend_output_layouts=Shard(-1)),
        "blocks.*.attention.qkv": ColwiseParallel(heads=config.kv_heads),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }
    if not config.tied:
        plan["head"] = ColwiseParallel()
    if is_sequence_parallel:
        # The layers work on (tokens, width), so the sequence is gathered and scattered by the modules around them.
        whole_inside = PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            output_layouts=Partial(),
            desired_output_layouts=Shard(1),
        )
        plan |= {
            "embed": RowwiseParallel(output_layouts=Shard(1), attend_output_layouts=Shard(-1)),
            "blocks.*.norm[12]": SequenceParallel(),
            "blocks.*.attention": whole_inside,
            "blocks.*.attention.out": RowwiseParallel(output_layouts=Partial()),
            "blocks.*.mlp": whole_inside,
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=Partial()),
            "norm": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
    return plan


def training_loss(model: Transformer, tokens_BT: jax.Array) -> jaxpar.Mean:
    """Mean next-token cross-entropy of this device's part: of its sequences over cp, of the vocabulary over tp."""
    inputs_BT = split_sequence(tokens_BT[:, :-1], "cp")
    targets_BT = split_sequence(
        tokens_BT[:, 1:].astype(jnp.int32), "cp", pad_value=-100
    )  # padding counts for nothing
    return cross_entropy(model(inputs_BT), targets_BT, "tp", reduction="mean_parts")


def on_mesh(rows: Any, mesh: DeviceMesh) -> jax.Array:
    """A batch that every process has whole, each device taking its rows."""
    sharding = NamedSharding(mesh.jax_mesh, PartitionSpec(BATCH_AXES))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
