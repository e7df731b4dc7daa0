"""Trains a pipelined model for some steps, one rank of the pipeline after the other; every rank prints what all must agree on.

argv: a folder, in which rank 0 leaves `<case>.npz`: losses, norms, and all parameters.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import jax
import numpy as np
import pipeline_models as models

import jaxpar
from jaxpar.mesh import get_rank, get_world_size

jaxpar.init_process_group(timeout_s=60)
folder = Path(sys.argv[1])
with jax.enable_x64(True):
    for case in models.cases(get_world_size(), jax.device_count()):
        metrics, params = models.train(case)
        print(case.name, metrics, flush=True)
        if get_rank() == 0:
            np.savez(folder / f"{case.name}.npz", *params, **metrics)
