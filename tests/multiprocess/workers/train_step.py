"""Trains the models for some steps on its part of the batch; every rank prints what all of them must agree on.

argv: a folder with `batch.npz`, in which rank 0 leaves `result-<case>.npz`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import train_step_models as models

import jaxpar
from jaxpar.mesh import get_rank, get_world_size

jaxpar.init_process_group()
folder = Path(sys.argv[1])
whole = dict(np.load(folder / "batch.npz"))
for name, accumulate, strategy in models.CASES if get_world_size() < 4 else models.FEW_CASES:
    losses, params = models.train(
        name, models.own_rows(whole, strategy), accumulate=accumulate, strategy=strategy
    )
    print(name, accumulate, strategy, losses, flush=True)
    if get_rank() == 0:
        np.savez(folder / f"result-{name}-{accumulate}-{strategy}.npz", *params, losses=losses)
