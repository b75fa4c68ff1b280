"""XLA's kernels are read from the text of a compiled module."""

from benchmarks.xla_kernels import Kernel, kernels, parsed, size_of

TEXT = """HloModule jit_f

%fused_slice (param_0.1: f32[8,4], param_1.1: f32[4]) -> f32[2,4] {
  %param_0.1 = f32[8,4]{1,0} parameter(0)
  %part = f32[2,4]{1,0} slice(%param_0.1), slice={[0:2], [0:4]}
  %param_1.1 = f32[4]{0} parameter(1)
  %wide = f32[2,4]{1,0} broadcast(%param_1.1), dimensions={1}
  ROOT %sum = f32[2,4]{1,0} add(%part, %wide)
}

%fused_update (param_0.2: f32[8,4], param_1.2: f32[1,4], param_2.2: s32[]) -> f32[8,4] {
  %param_0.2 = f32[8,4]{1,0} parameter(0)
  %param_1.2 = f32[1,4]{1,0} parameter(1)
  %twice = f32[1,4]{1,0} add(%param_1.2, %param_1.2)
  %param_2.2 = s32[] parameter(2)
  ROOT %new = f32[8,4]{1,0} dynamic-update-slice(%param_0.2, %twice, %param_2.2, %param_2.2)
}

%body (state: (f32[8,4], f32[1,4], s32[])) -> (f32[8,4], f32[1,4], s32[]) {
  %state = (f32[8,4]{1,0}, f32[1,4]{1,0}, s32[]) parameter(0)
  %rows = f32[8,4]{1,0} get-tuple-element(%state), index=0
  %row = f32[1,4]{1,0} get-tuple-element(%state), index=1
  %n = s32[] get-tuple-element(%state), index=2
  %update = f32[8,4]{1,0} fusion(%rows, %row, %n), kind=kLoop, calls=%fused_update
  ROOT %all = (f32[8,4]{1,0}, f32[1,4]{1,0}, s32[]) tuple(%update, %row, %n)
}

ENTRY %main (x: f32[8,4], y: f32[4], z: f32[1,4]) -> f32[2,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %z = f32[1,4]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %start = (f32[8,4]{1,0}, f32[1,4]{1,0}, s32[]) tuple(%x, %z, %zero)
  %loop = (f32[8,4]{1,0}, f32[1,4]{1,0}, s32[]) while(%start), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %last = f32[8,4]{1,0} get-tuple-element(%loop), index=0
  %turned = f32[8,4]{0,1} copy(%last)
  ROOT %result = f32[2,4]{1,0} fusion(%turned, %y), kind=kLoop, calls=%fused_slice
}
"""


def test_kernels_are_counted_with_what_they_take_and_change():
    assert list(kernels(parsed(TEXT))) == [
        Kernel("update", 5, 16.0 + 4.0, 16.0),  # a row in its place, and its number
        Kernel("turned", 1, 128.0, 128.0),
        Kernel("result", 1, 32.0 + 16.0, 32.0),  # two rows of eight
    ]


def test_sizes_of_types():
    assert size_of("(bf16[2,3]{1,0}, pred[5]{0}, s32[])") == 12 + 5 + 4
