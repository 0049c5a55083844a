"""Collectives of a compiled program are counted as often as the loop around them runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.hlo import traffic

PROGRAM = """
import json
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from benchmarks.hlo import traffic

mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))

def layers(x, weights):
    def layer(x, weight):  # columns times rows: a sum over devices
        return jax.lax.with_sharding_constraint(x @ weight, columns), None
    return jax.lax.scan(layer, x, weights)[0]

x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=columns)
weights = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "x")))
found = traffic(jax.jit(layers).lower(x, weights).compile().as_text())
print(json.dumps([dict(found.count), dict(found.bytes), found.unknown_loops]))
"""


def test_a_loop_over_layers_counts_each_layer():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    count, size, unknown = json.loads(done.stdout)
    (kind,) = count
    assert kind in ("all-reduce", "reduce-scatter") and count[kind] == 5 and unknown == 0
    each = 8 * 64 * 4 // (4 if kind == "reduce-scatter" else 1)
    assert size[kind] == 5 * each


def test_nested_loops_multiply_and_what_starts_counts_its_result():
    text = """HloModule made_up

%inner (p: f32[4]) -> f32[4] {
  %a = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(bf16[4,8]{1,0} %p), channel_id=1
  %b = bf16[16,8]{1,0} all-gather-done(%a)
}

%outer (p: f32[4]) -> f32[4] {
  %w = f32[4]{0} while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = f32[4]{0} while(%p), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"2"}}
  %u = f32[4]{0} while(%p), condition=%c, body=%inner
  ROOT %r = f32[] all-reduce(f32[] %x), channel_id=2, to_apply=%add
}
"""
    found = traffic(text)
    assert found.count == {"all-gather": 7, "all-reduce": 1}
    assert found.bytes == {"all-gather": 7 * 16 * 8 * 2, "all-reduce": 4}
    assert found.unknown_loops == 1 and found.total_bytes == 7 * 256 + 4


def tpu_like(*, end="constant(12)", start="constant(0)", step="constant(1)"):
    return f"""HloModule made_up

%begin (p: f32[4]) -> f32[16] {{
  ROOT %a.1 = f32[16]{{0:T(128)}} all-gather(%p), channel_id=7, dimensions={{0}}
}}

%async_collective_fusion.1 (p: f32[4]) -> f32[16] {{
  ROOT %a.2 = f32[16]{{0:T(128)}} all-gather(%p), channel_id=7, dimensions={{0}}
}}

%finish (p: f32[4]) -> f32[16] {{
  ROOT %a.3 = f32[16]{{0:T(128)}} all-gather(%p), channel_id=7, dimensions={{0}}
}}

%body (p: (f32[4], s32[])) -> (f32[4], s32[]) {{
  %p = (f32[4]{{0}}, s32[]) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%p), index=0
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=1
  %one = s32[]{{:T(128)}} {step}
  %k = f32[4]{{0}} custom-call(%x), custom_call_target="kernel", frontend_attributes={{settings={{
"block": "{{\\"q\\": 128}}"
}}}}, metadata={{op_name="kernel"}}
  %async-collective-start = f32[16]{{0}} fusion(%x), kind=kCustom, calls=%begin
  %f = f32[16]{{0}} fusion(%x), kind=kOutput, calls=%async_collective_fusion.1
  %async-collective-done = f32[16]{{0}} fusion(%x), kind=kCustom, calls=%finish
  %next = s32[]{{:T(128)}} add(%i, %one), metadata={{op_name="add"}}
  ROOT %t = (f32[4]{{0}}, s32[]) tuple(%x, %next)
}}

%test (p: (f32[4], s32[])) -> pred[] {{
  %end = s32[]{{:T(128)}} {end}
  %p = (f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=1
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %end), direction=LT, metadata={{op_name="lt"}}
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %zero = s32[]{{:T(128)}} {start}
  %moved = s32[]{{:T(128)}} copy(%zero), backend_config={{"flag_configs":[]}}
  %t = (f32[4]{{0}}, s32[]) tuple(%x, %moved)
  %w = (f32[4]{{0}}, /*index=1*/s32[]) while(%t), condition=%test, body=%body
  ROOT %r = f32[4]{{0}} get-tuple-element(%w), index=0
}}
"""


def test_a_loop_without_a_count_runs_as_often_as_its_counter_says():
    found = traffic(tpu_like())
    assert found.unknown_loops == 0
    assert found.count == {"all-gather": 12}, "what starts, goes on and ends is one collective"
    assert found.bytes == {"all-gather": 12 * 64}
    assert traffic(tpu_like(start="constant(3)", step="constant(2)")).count == {"all-gather": 5}
    assert traffic(tpu_like(end="constant(0)")).count["all-gather"] == 0


def test_what_starts_a_collective_counts_its_results_alone():
    text = """HloModule made_up

ENTRY %main (p: f32[4]) -> f32[4] {
  %a = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1
  %b = (f32[8]{0}, f32[2,3]{1,0}) all-reduce-start(%p, %q), channel_id=2, to_apply=%add
  %c = f32[] all-reduce(%p), channel_id=3, to_apply=%add
}
"""
    assert traffic(text).bytes == {"collective-permute": 32, "all-reduce": 32 + 24 + 4}


@pytest.mark.parametrize("changed", ["end", "start", "step"])
def test_a_loop_whose_length_is_data_counts_once_and_says_so(changed):
    found = traffic(tpu_like(**{changed: "parameter(1)"}))
    assert found.unknown_loops == 1 and found.count == {"all-gather": 1}


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%less, %more}", "true_computation=%more, false_computation=%less"],
)
def test_of_branches_the_one_counts_that_exchanges_most(branches):
    text = f"""HloModule made_up

%less (p: f32[4]) -> f32[4] {{
  ROOT %a = f32[4]{{0}} all-reduce(%p), channel_id=1, to_apply=%add
}}

%more (p: f32[4]) -> f32[4] {{
  ROOT %a = f32[8]{{0}} all-gather(%p), channel_id=2
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  ROOT %c = f32[8]{{0}} conditional(s32[] %i, f32[4] %p, f32[4] %p), {branches}
}}
"""
    assert traffic(text).bytes == {"all-gather": 32}


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        traffic("nothing")


def test_collectives_of_one_channel_count_each():
    text = """HloModule made_up

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %keys = f32[16]{0} all-gather(%p), channel_id=1, dimensions={0}
  %values = f32[16]{0} all-gather(%p), channel_id=1, dimensions={0}
  ROOT %turned = f32[4]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1}}
}
"""
    found = traffic(text)
    assert found.count == {"all-gather": 2, "collective-permute": 1}
    assert found.bytes == {"all-gather": 2 * 64, "collective-permute": 16}
