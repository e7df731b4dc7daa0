"""Reading HLO text: types, comments, quoted parentheses, typed operands."""

import pytest

from jaxpar.debug._hlo import array_types, parse_module

TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8], q: f32[8]) -> (f32[8], /*index=1*/f32[8]) {
  %p = f32[8]{0:T(8,128)} parameter(0), metadata={op_name="x, calls=%nothing {(" stack_frame_id=3}
  %q = f32[8]{0} parameter(1)
  ROOT %all = (f32[8]{0}, /*index=1*/f32[8]{0}) all-reduce(%p, /*index=1*/f32[8]{0} %q), to_apply=%add
}
"""


def test_module_header_and_instructions() -> None:
    module = parse_module(TEXT)
    assert (module.entry, module.is_scheduled, module.num_devices) == ("main", True, 4)
    root = module.computations["main"].root
    assert (root.opcode, root.operands, root.called) == ("all-reduce", ("p", "q"), ("add",))
    assert [t.num_bytes for t in module.computations["main"].operand_types(root)] == [32, 32]


def test_metadata_is_kept_apart_from_attributes() -> None:
    parameter = parse_module(TEXT).computations["main"].by_name["p"]
    assert parameter.op_name == "x, calls=%nothing {("
    assert parameter.called == ()


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [
        ("f32[8,4]{1,0}", "float32", 128),
        ("bf16[3]", "bfloat16", 6),
        ("pred[5]", "bool", 5),
        ("s4[5]", "int4", 3),
        ("f8e4m3fn[7]{0}", "float8_e4m3fn", 7),
        ("f32[<=8]", "float32", 32),
        ("c128[]", "complex128", 16),
    ],
)
def test_bytes_of_types(shape: str, dtype: str, num_bytes: int) -> None:
    (found,) = array_types(shape)
    assert (found.dtype, found.num_bytes) == (dtype, num_bytes)


def test_tokens_take_no_bytes() -> None:
    assert array_types("(token[], f32[2])") == array_types("f32[2]")


def test_text_without_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_module("HloModule nothing\n")
