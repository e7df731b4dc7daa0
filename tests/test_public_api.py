"""The public names are frozen: adding or removing one is a decision, and each has a docstring."""

import inspect
from types import ModuleType

PUBLIC = {
    "jaxpar": {"Mean", "TrainStep", "init_device_mesh", "init_process_group", "init_sharded"},
}
SUBPACKAGES = {"mesh", "ddp", "data", "debug", "train"}


def public_names(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
