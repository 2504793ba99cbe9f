"""Test that accesses to a TPU's memory are counted from a compiled program's text."""

from tests.support.tpu_memory import hbm_bytes

WEIGHT, IN_VMEM = "bf16[64,128]{1,0:T(8,128)}", "bf16[64,128]{1,0:T(8,128)S(1)}"
STATE, ROW = "f32[8,128]{1,0:T(8,128)}", "f32[1,128]{1,0:T(1,128)S(1)}"
PROGRAM = f"""HloModule step

%inner (p: f32[8,128]) -> f32[8,128] {{
  %p = {STATE} parameter(0)
  ROOT %same = {STATE} bitcast(%p)
}}

%rows (table: bf16[64,128], id: s32[2]) -> f32[2,128] {{
  %table = {WEIGHT} parameter(0)
  %id = s32[2]{{0:T(128)}} parameter(1)
  %found = bf16[2,128]{{1,0:T(2,128)}} gather(%table, %id), offset_dims={{1}}
  ROOT %wide = f32[2,128]{{1,0:T(2,128)S(1)}} convert(%found)
}}

%update (state: f32[8,128], row: f32[1,128], at: s32[]) -> f32[8,128] {{
  %state = {STATE} parameter(0)
  %row = {ROW} parameter(1)
  %at = s32[]{{:T(128)S(1)}} parameter(2)
  ROOT %new = {STATE} dynamic-update-slice(%state, %row, %at, %at)
}}

%sum (old: f32[8,128], w: bf16[64,128]) -> f32[8,128] {{
  %old = {STATE} parameter(0)
  %w = {IN_VMEM} parameter(1)
  %whole = {STATE} fusion(%old), kind=kLoop, calls=%inner
  ROOT %out = {STATE} add(%whole, %whole)
}}

ENTRY %main (w: bf16[64,128], h: f32[8,128], ids: s32[2]) -> f32[8,128] {{
  %w = {WEIGHT} parameter(0)
  %h = {STATE} parameter(1)
  %ids = s32[2]{{0:T(128)}} parameter(2)
  %start = ({IN_VMEM}, {WEIGHT}, u32[]{{:S(2)}}) copy-start(%w)
  %near = {IN_VMEM} copy-done(%start)
  %seen = f32[2,128]{{1,0:T(2,128)S(1)}} fusion(%w, %ids), kind=kLoop, calls=%rows
  %more = {STATE} fusion(%h, %near), kind=kLoop, calls=%sum
  %one = {ROW} slice(%seen), slice={{[0:1], [0:128]}}
  %zero = s32[]{{:T(128)S(1)}} constant(0)
  ROOT %done = {STATE} fusion(%more, %one, %zero), kind=kLoop, calls=%update
}}
"""
COPIED = 64 * 128 * 2  # the weight, from HBM to VMEM; the product reads VMEM
FOUND = 2 * 128 * 2 + 2 * 4  # two rows of the weight, and their ids
SUMMED = 2 * 8 * 128 * 4  # the state, read and written
UPDATED = 128 * 4  # one row, in place


def test_only_the_memory_outside_the_chip_counts():
    assert hbm_bytes(PROGRAM) == COPIED + FOUND + SUMMED + UPDATED


def test_an_operand_outside_the_chip_is_read_by_the_product():
    """The same program without the copy ahead."""
    direct = PROGRAM.replace("fusion(%h, %near)", "fusion(%h, %w)")
    unread = COPIED + FOUND + SUMMED + UPDATED  # %sum does not use its weight
    assert hbm_bytes(direct) == unread
    used = direct.replace("add(%whole, %whole)", "custom-call(%whole, %w)")
    assert hbm_bytes(used) == unread + COPIED
