"""Bytes and arithmetic of kernels, read from optimised HLO, and their times, from a profiler's trace."""

from __future__ import annotations

import gzip
import json

import pytest
from benches.device import trace
from benches.device.hlo import Kernel, kernels_of, nbytes

TEXT = """\
HloModule jit_run, is_scheduled=true

%fused_gather (param_0.1: f32[1000,64], param_1.2: s32[8]) -> bf16[8,64] {
  %param_0.1 = f32[1000,64]{1,0} parameter(0)
  %param_1.2 = s32[8]{0} parameter(1)
  %gather.1 = f32[8,64]{1,0} gather(%param_0.1, %param_1.2), offset_dims={1}, slice_sizes={1,64}
  ROOT %convert.1 = bf16[8,64]{1,0} convert(%gather.1)
}

%fused_scatter (param_0.3: bf16[1000,32], param_1.4: s32[8,1], param_2.5: bf16[8,32]) -> bf16[1000,32] {
  %param_0.3 = bf16[1000,32]{1,0} parameter(0)
  %param_1.4 = s32[8,1]{1,0} parameter(1)
  %param_2.5 = bf16[8,32]{1,0} parameter(2)
  ROOT %scatter.1 = bf16[1000,32]{1,0} scatter(%param_0.3, %param_1.4, %param_2.5), to_apply=%second
}

%fused_add (param_0.6: f32[8,32], param_1.7: f32[8,32]) -> (f32[8,32], bf16[8,32]) {
  %param_0.6 = f32[8,32]{1,0} parameter(0)
  %param_1.7 = f32[8,32]{1,0} parameter(1)
  %add.1 = f32[8,32]{1,0} add(%param_0.6, %param_1.7)
  %convert.2 = bf16[8,32]{1,0} convert(%add.1)
  ROOT %tuple.1 = (f32[8,32]{1,0}, bf16[8,32]{1,0}) tuple(%add.1, %convert.2)
}

ENTRY %main (table: f32[1000,64], at: s32[8], y: bf16[1000,32], w: bf16[64,32]) -> f32[8,32] {
  %table = f32[1000,64]{1,0} parameter(0)
  %at = s32[8]{0} parameter(1)
  %y = bf16[1000,32]{1,0} parameter(2)
  %w = bf16[64,32]{1,0} parameter(3)
  %gathered = bf16[8,64]{1,0} fusion(%table, %at), kind=kLoop, calls=%fused_gather
  %product = (f32[8,32]{1,0}, s8[4096]{0}) custom-call(%gathered, %w), custom_call_target="__cublas$lt$matmul"
  %first = f32[8,32]{1,0} get-tuple-element(%product), index=0
  %places = s32[8,1]{1,0} bitcast(%at)
  %both = (f32[8,32]{1,0}, bf16[8,32]{1,0}) fusion(%first, %first), kind=kLoop, calls=%fused_add
  %second = bf16[8,32]{1,0} get-tuple-element(%both), index=1
  %written = bf16[1000,32]{1,0} fusion(%y, %places, %second), kind=kInput, calls=%fused_scatter
  ROOT %out = f32[8,32]{1,0} copy(%first)
}
"""


def test_what_a_kernel_moves_is_what_it_reads_and_writes() -> None:
    found = {kernel.name: kernel for kernel in kernels_of(TEXT)}
    assert [*found] == ["gathered", "product", "both", "written", "out"]
    assert found["gathered"].bytes == 8 * 64 * 2 + 8 * 64 * 4 + 8 * 4  # of the table, the rows alone
    assert found["written"].bytes == 2 * 8 * 32 * 2 + 8 * 4  # of y, the rows alone
    assert found["both"].bytes == 8 * 32 * (4 + 2) + 2 * 8 * 32 * 4
    assert found["out"] == Kernel("out", "copy", "f32[8,32]{1,0}", 2 * 8 * 32 * 4, 0)


def test_a_products_arithmetic_is_told_by_its_shapes() -> None:
    (product,) = (kernel for kernel in kernels_of(TEXT) if "cublas" in kernel.operation)
    assert product.flops == 2 * 8 * 64 * 32
    assert product.bytes == 8 * 32 * 4 + 4096 + 8 * 64 * 2 + 64 * 32 * 2


def test_sizes_of_shapes() -> None:
    assert nbytes("(bf16[2,3]{1,0}, pred[5], f8e4m3fn[4]{0}, s64[])") == 12 + 5 + 4 + 8


def event(name: str, seconds: float, thread: int) -> dict[str, object]:
    return {"ph": "X", "pid": 1, "tid": thread, "ts": 0.0, "dur": 1e6 * seconds, "name": name}


def test_a_traces_kernels_are_those_of_compute_streams_by_group() -> None:
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #14(Compute,Memset)"}},
        {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "Stream #15(MemcpyH2D)"}},
        event("nvjet_sm90_tss_128x128", 2e-3, 7),
        event("loop_add_fusion_3", 1e-3, 7),
        event("loop_add_fusion_12", 1e-3, 7),
        event("sparse_matmul_mosaic_gpu_kernel", 4e-3, 7),
        event("copy", 9.0, 8),
    ]
    found = trace.figures_of(trace.kernels_of(gzip.compress(json.dumps({"traceEvents": events}).encode())), 2)
    assert found["kernels"] == 2 and found["device_seconds"] == pytest.approx(4e-3)
    assert found["groups"] == pytest.approx({"kernels of our own": 2e-3, "products": 1e-3, "element-wise": 1e-3})
    assert found["longest"]["loop_add_fusion"] == pytest.approx(1e-3)
