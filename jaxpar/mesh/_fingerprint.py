"""Do all processes mean the same program? Compared once, before the first step, instead of hanging in it.

    facts of rank 0   {"mesh": "dp=2 tp=2", "program": "sha256 ab12.."}
    facts of rank 1   {"mesh": "dp=4 tp=1", "program": "sha256 ab12.."}   -> mesh: rank 1 differs from rank 0

Collectives carry no tag: processes that disagree hang for ever or add up the wrong arrays in silence (rows W1, W2).
"""

from collections.abc import Mapping

from jaxpar._errors import DesyncError
from jaxpar.mesh._meeting import meet
from jaxpar.mesh._process_group import current_group

_SHOWN_CHARS = 200


def assert_same_everywhere(what: str, facts: Mapping[str, str], *, timeout_s: float | None = None) -> None:
    """Checks that every process states the same facts; costs nothing in a world of one.

    Args:
        what: What is about to happen, for the message: "the first step of TrainStep".
        facts: Name to value, for example the mesh, a hash of the program, the configuration.
        timeout_s: Deadline for the others to come; default the `timeout_s` of `init_process_group`. A difference is
            named as soon as all have come.

    Raises:
        DesyncError: On every process, naming for each fact which ranks differ from rank 0 and the values.
        ProcessGroupError: Some ranks did not come in time.

    Example:
        >>> assert_same_everywhere("the first step", {"mesh": "dp=8", "program": "sha256 ab12"})
    """
    group = current_group()
    if group.world_size == 1:
        return
    said = {str(name): str(value) for name, value in facts.items()}
    verdict, _ = meet(
        group, f"assert_same_everywhere {what!r}", said, judge=_differences, timeout_s=timeout_s
    )
    if verdict is not True:
        raise DesyncError(
            f"the {group.world_size} processes disagree before {what} (this is rank {group.rank}):\n"
            + "\n".join(f"    {line}" for line in verdict)
            + "\nCollectives carry no tag, so processes that disagree hang or mix up arrays in silence. Start every"
            " process with the same script, arguments, data shapes and environment."
        )


def _differences(all_facts: list[dict[str, str]]) -> bool | list[str]:
    """True, or one line for each fact that is not the same on all ranks."""
    names = dict.fromkeys(name for facts in all_facts for name in facts)
    lines = []
    for name in names:
        by_value: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(all_facts):
            by_value.setdefault(facts.get(name), []).append(rank)
        if len(by_value) > 1:
            shown = "; ".join(
                f"ranks {ranks}: {_shown(value, by_value)}" for value, ranks in by_value.items()
            )
            lines.append(f"{name}: {shown}")
    return lines or True


def _shown(value: str | None, others: Mapping[str | None, list[int]]) -> str:
    """The value, shortened to the part in which it differs from the others."""
    if value is None:
        return "(not stated)"
    if len(value) <= _SHOWN_CHARS:
        return repr(value)
    texts = [text for text in others if text is not None]
    same = next(
        (i for i, chars in enumerate(zip(*texts, strict=False)) if len(set(chars)) > 1), min(map(len, texts))
    )
    start = max(0, same - _SHOWN_CHARS // 4)
    return f"{'...' if start else ''}{value[start : start + _SHOWN_CHARS]!r}... ({len(value)} characters)"
