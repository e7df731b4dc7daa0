"""Renews the parts of README.md that are made from the tree: `python .ci/readme.py [--write]`.

    <!-- tree -->          the captioned file tree, from the files' own first sentences
    <!-- resnet-diff -->   what makes the ResNet example data-parallel

Without --write it only checks, and exits with 1 if the README is not true.
"""

import ast
import difflib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CAPTIONS = {
    ".ci": "what a change must pass",
    ".ci/run": "lint, types, tests, wheel; in an environment of its own",
    "benchmarks": "one script per claim, JSON lines",
    "docs": "more than the front page holds",
    "docs/from_pytorch.md": "PyTorch to jaxpar, row by row, and what JAX makes void",
    "examples": "real scripts on real data",
    "jaxpar": "the library",
    "launch": "a folder, not a package",
    "notebooks": "executed by the tests, outputs committed",
    "tests": "mirrors jaxpar/ and launch/",
    "CONTRIBUTING.md": "how a change gets done",
    "pyproject.toml": 'one distribution "jaxpar": packages jaxpar and jaxpar_launch, command jaxpar-launch',
}
WIDTH = 34


def tree() -> str:
    """The captioned tree of the files that git knows; tests are shown by folder."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    files = sorted(Path(f) for f in tracked if (ROOT / f).exists() and is_shown(Path(f)))
    lines, seen = [], set()
    for file in files:
        for folder in list(file.parents)[-2::-1]:
            if folder not in seen:
                seen.add(folder)
                lines.append(line(len(folder.parts) - 1, f"{folder.name}/", folder_caption(folder)))
        if file.parts[0] != "tests" or len(file.parts) == 2:
            lines.append(line(len(file.parts) - 1, file.name, file_caption(file)))
    return "```\n" + "\n".join(lines) + "\n```\n"


def is_shown(file: Path) -> bool:
    if file.name in ("__init__.py", "py.typed") or file.suffix in (".png", ".svg"):
        return False
    return file.suffix in (".py", ".ipynb") or str(file) in CAPTIONS


def line(depth: int, name: str, caption: str) -> str:
    left = "  " * depth + name
    return f"{left:<{WIDTH}} {caption}".rstrip()


def folder_caption(folder: Path) -> str:
    if str(folder) in CAPTIONS:
        return CAPTIONS[str(folder)]
    init = ROOT / folder / "__init__.py"
    return first_sentence(ast.get_docstring(ast.parse(init.read_text())) or "") if init.exists() else ""


def file_caption(file: Path) -> str:
    if str(file) in CAPTIONS:
        return CAPTIONS[str(file)]
    if file.suffix == ".ipynb":
        cells = json.loads((ROOT / file).read_text())["cells"]
        return first_sentence("".join(cells[0]["source"]).lstrip("# "))
    return first_sentence(ast.get_docstring(ast.parse((ROOT / file).read_text())) or "")


def first_sentence(text: str) -> str:
    """The first line, up to its full stop: captions are one line."""
    head = text.split("\n", 1)[0]
    return head.split(". ")[0].rstrip(".:").replace("`", "")


def resnet_diff() -> str:
    """The single-device script and its data-parallel version, as a unified diff without its header."""
    scripts = [
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("resnet_single.py", "train_resnet.py")
    ]
    lines = list(difflib.unified_diff(*scripts, n=1, lineterm=""))[2:]
    return "```diff\n" + "\n".join(line for line in lines if not line.startswith("@@")) + "\n```\n"


def with_part(text: str, name: str, content: str) -> str:
    head, rest = text.split(f"<!-- {name} -->\n")
    return f"{head}<!-- {name} -->\n{content}<!-- /{name} -->" + rest.split(f"<!-- /{name} -->", 1)[1]


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = with_part(with_part(text, "tree", tree()), "resnet-diff", resnet_diff())
    if "--write" in sys.argv[1:]:
        readme.write_text(new)
        return 0
    if new != text:
        print("README.md: a generated part is not true; run python .ci/readme.py --write")
    return int(new != text)


if __name__ == "__main__":
    raise SystemExit(main())
