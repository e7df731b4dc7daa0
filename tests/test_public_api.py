"""The public names are frozen: adding or removing one is a decision, and each has a docstring."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

PUBLIC = {
    "jaxpar": """
        Mean TrainStep init_device_mesh init_process_group init_sharded
    """,
    "jaxpar.mesh": """
        DeviceMesh MeshLike Partial PlacedArray Placement Recovery RedistributionPlan RedistributionStep Replicate
        Shard all_gather all_gather_object all_reduce all_to_all as_device_mesh as_jax_mesh
        assert_same_everywhere axes_of axis_size barrier broadcast broadcast_object destroy_process_group
        distribute empty from_local full full_array gather get_local_rank get_rank get_world_size
        init_device_mesh init_process_group is_initialized normal ones permute placements_of
        placements_to_sharding placements_to_spec process_allgather redistribute redistribution_plan reduce
        reduce_scatter ring_shift run_recoverable scatter spec_to_placements to_local uniform warm_up zeros
    """,
    "jaxpar.ddp": """
        Bucket CommHook DistributedDataParallel GradBucket Group PowerSGD StatefulHook allreduce_hook
        assign_buckets bf16_compress_hook bucketed_all_reduce convert_sync_batchnorm fp16_compress_hook
    """,
    "jaxpar.fsdp": """
        CPUOffloadPolicy MixedPrecisionPolicy ParameterRow ShardingReport full_state fully_shard load_full_state offload_optimizer_state
        register_fsdp_forward_method shard_optimizer_state sharded_call sharding_report unshard
    """,
    "jaxpar.tp": """
        AttentionParallel ColwiseParallel ContextParallel ParallelStyle PrepareModuleInput
        PrepareModuleInputOutput PrepareModuleOutput ProposedPlan RowwiseParallel SequenceParallel
        all_gather_matmul auto_plan column_linear cross_entropy matmul_reduce_scatter parallelize_module
        row_linear vocab_embedding
    """,
    "jaxpar.cp": """
        head_tail_order join_sequence padded_length ring_attention sequence_positions split_sequence
    """,
    "jaxpar.pp": """
        Action Costs Event Message Op PipelinePlan PipelineStages Schedule Timeline add_communication
        add_reduce_grad add_unshard auto_schedule chrome_trace draw gathered get_schedule
        merge_backward pipeline plan_of render schedule_names simulate with_bubbles without_bubbles
    """,
    "jaxpar.data": """
        BatchRows DataLoader DistributedSampler GrainSource PrefetchIterator global_batch join pad_batch
        prefetch_to_device
    """,
    "jaxpar.debug": """
        Collective CollectiveTable CompilationCount MemoryUse OverlapReport ScheduledCollective
        ShardingPicture ShardingTable assert_collectives collectives count_compilations memory overlap
        topology visualize_sharding
    """,
    "jaxpar.checkpoint": """
        ArrayMetadata CheckpointError CheckpointManager CheckpointMetadata Restored Tensors load_safetensors metadata
        checkpoint_to_safetensors safetensors_to_checkpoint save_safetensors steps verify
    """,
    "jaxpar.train": """
        LocalSGDStep TrainStep averaged clip_grad_norm ema skip_spikes total_norm
    """,
    "jaxpar_launch": """
        EtcdAccess Failure LaunchFailedError LaunchResult LaunchSpec LaunchSpecError LaunchTimeoutError
        RendezvousConf RendezvousError RendezvousSpec StreamChoice WorkerEnvError heartbeat launch
    """,
    "jaxpar_launch.timer": """
        expires
    """,
}


def public_names(module: str) -> set[str]:
    names = vars(importlib.import_module(module)).items()
    return {name for name, value in names if not name.startswith("_") and not inspect.ismodule(value)}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_the_frozen_ones(module: str) -> None:
    assert public_names(module) == set(PUBLIC[module].split())


def test_every_package_is_in_the_list_and_comes_with_jaxpar() -> None:
    packages = {folder.parent.name for folder in Path(jaxpar.__file__).parent.glob("*/__init__.py")}
    assert packages == {module.removeprefix("jaxpar.") for module in PUBLIC if module.startswith("jaxpar.")}
    assert all(inspect.ismodule(getattr(jaxpar, name)) for name in packages)


def test_orbax_is_imported_only_if_checkpoints_are_used() -> None:
    code = "import sys, jaxpar; assert not any(m.startswith('orbax') for m in sys.modules); jaxpar.checkpoint.CheckpointManager"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_docstring_of_its_own(module: str) -> None:
    found = vars(importlib.import_module(module))
    for name in public_names(module):
        value = found[name]
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__ and not value.__doc__.startswith(f"{name}("), name


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_function_shows_an_example_or_is_named_here(module: str) -> None:
    found = vars(importlib.import_module(module))
    without = {
        name
        for name in public_names(module)
        if inspect.isfunction(found[name]) and ">>>" not in (found[name].__doc__ or "")
    }
    assert without <= WITHOUT_EXAMPLE


# Hooks are shown where they are given (`DistributedDataParallel`); the compiler for other devices is an extra.
WITHOUT_EXAMPLE = {"allreduce_hook", "bf16_compress_hook", "fp16_compress_hook", "overlap", "topology"}
