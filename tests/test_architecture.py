"""The shape of the house: import arrows point down, the launcher is standard library only, one version quarantine.

jaxpar_launch <- _errors <- _compat, _pytree, _module, _mean <- mesh <- ddp | fsdp | cp <- tp | pp | data | debug | checkpoint | _init_sharded <- train
_errors <- pp._schedule (no jax) <- pp
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 500

# What each part may import of jaxpar; a part is a top-level module or sub-package. Siblings never meet.
FOUNDATION = {
    "_errors",
    "_compat",
    "_pytree",
    "_module",
    "_mean",
    "_after",
    "_flat",
    "_spec",
    "_record",
    "_residuals",
    "_kept",
    "_named",
    "_as_stored",
}
MAY_IMPORT = {
    "_errors": set(),
    "_compat": {"_errors"},
    "_compat_service": set(),
    "_pytree": {"_errors"},
    "_mean": {"_errors"},
    "_module": {"_errors", "_compat", "_pytree"},
    "_after": {"_compat"},
    "_flat": set(),
    "_kept": set(),
    "_spec": set(),
    "_record": {"_flat"},
    "_residuals": {"_compat", "_module"},
    "_named": {"_errors", "_pytree", "_record", "_spec"},
    "_as_stored": {"_named", "_record"},
    "_init_sharded": FOUNDATION,
    "mesh": FOUNDATION,
    "ddp": FOUNDATION | {"mesh"},
    "fsdp": FOUNDATION | {"mesh"},
    "tp": FOUNDATION | {"mesh", "cp"},
    "cp": FOUNDATION | {"mesh"},
    "pp": FOUNDATION | {"mesh"},
    "data": FOUNDATION | {"mesh"},
    "debug": FOUNDATION | {"mesh"},
    "checkpoint": FOUNDATION | {"mesh"},
    "train": FOUNDATION | {"mesh", "ddp", "fsdp", "tp", "cp", "pp", "data", "debug"},
}
NO_JAX = {"_errors"}
PLAN_LAYER = (
    "jaxpar._errors",
    "jaxpar.pp._schedule",
)  # all that jaxpar/pp/_schedule/ may import, beside matplotlib to draw
ENVIRONMENT_READERS = {"launch/jaxpar_launch/env.py", "jaxpar/mesh/_distributed.py"}
QUARANTINE = ("_compat.py", "_compat_service.py")  # the second runs by itself, without jax
SEMI_PUBLIC = ("jax._src", "jax.interpreters", "jax.extend", "jaxlib")


def test_import_arrows_point_down() -> None:
    assert broken_arrows(sources("jaxpar")) == []


def test_every_part_of_jaxpar_has_its_arrows_written_down() -> None:
    parts = {part_of(path) for path in sources("jaxpar")} - {"__init__"}
    assert parts == set(MAY_IMPORT)


def test_the_plan_layer_is_pure_python() -> None:
    assert outside_plan_layer(sources("jaxpar/pp/_schedule")) == []


def test_launcher_imports_the_standard_library_only() -> None:
    assert foreign_imports(sources("launch/jaxpar_launch")) == []


def test_semi_public_jax_names_and_versions_stay_in_compat() -> None:
    assert quarantine_breaks(sources("jaxpar")) == []


def test_environment_is_read_in_two_files() -> None:
    readers = {
        name for name, tree in trees(sources("jaxpar", "launch/jaxpar_launch")) if reads_environment(tree)
    }
    assert readers <= ENVIRONMENT_READERS


def test_no_file_is_longer_than_one_concept_needs() -> None:
    long = {
        p.relative_to(ROOT): n for p in ROOT.rglob("*.py") if is_ours(p) and (n := num_lines(p)) > MAX_LINES
    }
    assert long == {}


def test_check_vma_is_never_switched_off() -> None:
    off = [
        name for name, tree in trees(sources("jaxpar", "examples", "benchmarks")) if switches_off_vma(tree)
    ]
    assert off == []


@pytest.mark.parametrize(
    ("part", "text", "check"),
    [
        ("ddp", "from jaxpar.data import global_batch", "arrows"),
        ("mesh", "import jaxpar.train", "arrows"),
        ("_errors", "import jax", "arrows"),
        ("mesh", "def f():\n    from jaxpar.ddp import Bucket", "arrows"),
        ("mesh", "from jax._src import core", "quarantine"),
        ("mesh", "import jax\nif jax.__version__ > '0.11': pass", "quarantine"),
        ("launch", "import numpy", "stdlib"),
        ("pp/_schedule", "import jax", "plan"),
        ("pp/_schedule", "from jaxpar.pp._stage import Stage", "plan"),
    ],
)
def test_these_tests_can_fail(tmp_path: Path, part: str, text: str, check: str) -> None:
    path = tmp_path / "jaxpar" / part / "_x.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    checks = {
        "arrows": broken_arrows,
        "quarantine": quarantine_breaks,
        "stdlib": foreign_imports,
        "plan": outside_plan_layer,
    }
    assert len(checks[check]([path])) == 1


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, folders
    return found


def is_ours(path: Path) -> bool:
    return not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(ROOT).parts)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def trees(paths: list[Path]) -> Iterator[tuple[str, ast.Module]]:
    for path in paths:
        yield (
            str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name,
            ast.parse(path.read_text()),
        )


def part_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return parts[len(parts) - 1 - parts[::-1].index("jaxpar") + 1]


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """All imports, inside functions too; `from a import b` counts as `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def broken_arrows(paths: list[Path]) -> list[tuple[str, str]]:
    broken = []
    for path in paths:
        part = part_of(path)
        if part == "__init__":
            continue
        for name in imported_modules(ast.parse(path.read_text())):
            pieces = name.split(".")
            if pieces[0] == "jaxpar" and pieces[1] not in MAY_IMPORT[part] | {part}:
                broken.append((part, name))
            if part in NO_JAX and pieces[0] in ("jax", "jaxlib", "flax", "numpy"):
                broken.append((part, name))
    return broken


def outside_plan_layer(paths: list[Path]) -> list[tuple[str, str]]:
    return [
        (path.name, name)
        for path in paths
        for name in sorted(set(imported_modules(ast.parse(path.read_text()))))
        if not name.startswith(PLAN_LAYER)
        and name.split(".")[0] not in {*sys.stdlib_module_names, "matplotlib"}
    ]


def foreign_imports(paths: list[Path]) -> list[str]:
    names = {name.split(".")[0] for path in paths for name in imported_modules(ast.parse(path.read_text()))}
    return sorted(names - set(sys.stdlib_module_names) - {"jaxpar_launch"})


def quarantine_breaks(paths: list[Path]) -> list[tuple[str, str]]:
    broken = []
    for path in paths:
        if path.name in QUARANTINE:
            continue
        tree = ast.parse(path.read_text())
        broken += [(path.name, name) for name in set(imported_modules(tree)) if name.startswith(SEMI_PUBLIC)]
        broken += [
            (path.name, ast.unparse(node))
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node).startswith(
                ("jax.__version", "jax._src", "jax.extend.", "jax.interpreters.")
            )
        ]
    return broken


def reads_environment(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
        for node in ast.walk(tree)
    )


def switches_off_vma(tree: ast.Module) -> bool:
    keywords = (node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "check_vma")
    return any(isinstance(k.value, ast.Constant) and k.value.value is False for k in keywords)
