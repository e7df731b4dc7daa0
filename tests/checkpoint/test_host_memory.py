"""W13: no second copy of the state in host memory, when it is saved, restored, or turned into files.

Measured in a process of its own, as the growth of its peak over what it had before: CPU devices keep their arrays in host memory.
"""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, re, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from flax import nnx
import jaxpar
from jaxpar.checkpoint import CheckpointManager, checkpoint_to_safetensors, load_safetensors, save_safetensors
from jaxpar.fsdp import full_state, fully_shard

NUM, SIDE = 32, 1024  # 128 MiB


class Layers(nnx.Module):
    def __init__(self, value):
        self.layers = nnx.List([nnx.Param(jnp.full((SIDE, SIDE), value + i)) for i in range(NUM)])

    def __call__(self, x):
        return x


def peak(what):
    highest, before, is_done = [0], used(), threading.Event()

    def watch():
        while not is_done.wait(0.001):
            highest[0] = max(highest[0], used())

    watcher = threading.Thread(target=watch)
    watcher.start()
    what()
    is_done.set()
    watcher.join()
    return (highest[0] - before) / (4 * NUM * SIDE * SIDE)


def used():
    # Without mapped files, whose pages the system takes back when it needs them.
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])


def model_of(value):
    model = Layers(value)
    fully_shard(model, jaxpar.init_device_mesh((4,), ("dp",)))
    return model


def once(folder, value=0.0):
    # What a first use loads and allocates for good is no copy of the state.
    small = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with CheckpointManager(folder / "small") as manager:
        manager.save(1, small)
        manager.wait()
        manager.restore(small)
    save_safetensors(small, folder / "small-files")
    load_safetensors(small, folder / "small-files")
    checkpoint_to_safetensors(folder / "small", folder / "small-files")


folder = Path(sys.argv[1])
once(folder)
model = model_of(1.0)
jax.block_until_ready(nnx.state(model))
found = {}
with CheckpointManager(folder / "run", memory_bytes=8 << 20) as manager:
    found["save"] = peak(lambda: (manager.save(1, model), manager.wait()))
    found["restore"] = peak(lambda: manager.restore(model))
budget = {"budget_bytes": 8 << 20}
found["save_safetensors"] = peak(lambda: save_safetensors(model, folder / "files", **budget))
found["load_safetensors"] = peak(lambda: load_safetensors(model, folder / "files"))
found["checkpoint_to_safetensors"] = peak(lambda: checkpoint_to_safetensors(folder / "run", folder / "files", **budget))
copies = []
found["a whole copy"] = peak(lambda: copies.append(full_state(model)))
assert float(model.layers[3][0, 0]) == 4.0
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of the peak, as a share of the state's bytes."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("memory"))]
    # What is free goes back to the system at once: else it would hide what is taken next, or be counted twice.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_second_copy_of_the_state(growth: dict[str, float]) -> None:
    """At most twice the 8 of 128 MiB that may be on their way, and what threads and tables take."""
    assert growth.pop("a whole copy") > 0.9
    assert len(growth) == 5 and max(growth.values()) < 0.15, growth
