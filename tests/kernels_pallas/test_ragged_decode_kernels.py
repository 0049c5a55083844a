"""Decode attention's TPU and GPU kernels in their simulators, against the reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lowering
from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.ragged_decode import (
    decode_attention,
    decode_mass,
    mosaic_gpu_kernel,
    paged_attention,
    paged_mass,
)
from kernels_pallas.ragged_decode import pallas_mosaic_gpu as gpu
from kernels_pallas.ragged_decode import pallas_mosaic_tpu as tpu

every_kernel = pytest.mark.parametrize("kernel", ["mosaic_tpu", "mosaic_gpu"])


@pytest.fixture(autouse=True)
def fresh_simulators():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import tpu as pltpu

    yield
    pltpu.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


@dataclasses.dataclass(frozen=True)
class Case:
    """One cache; `lengths` per row and head."""

    lengths: tuple[tuple[int, ...], ...]
    group: int = 4
    queries: int = 1
    size: int = 64
    slots: int = 136
    dtype: type = jnp.float32
    window: int = NO_WINDOW
    page: int = 16
    thread_blocks: int = 2  # that a GPU is to have; few of them make long chunks

    def arrays(self, *, paged: bool):
        """Queries, the cache, positions of queries and the log-sum-exp of what is elsewhere."""
        rng = np.random.default_rng(3)
        lengths = np.array(self.lengths, np.int32)
        batch, heads = lengths.shape

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape), self.dtype)

        queries = draw(batch, heads * self.group, self.queries, self.size)
        # Padding, and queries that see a part of the slots.
        asked = rng.integers(self.slots, 3 * self.slots, (batch, self.queries)).astype(np.int32)
        asked[-1, -1] = -1 if self.queries > 1 else 2 * self.slots
        others = jnp.asarray(rng.normal(size=queries.shape[:3]), jnp.float32)
        if not paged:
            shape = (batch, heads, self.slots)
            positions = np.sort(rng.integers(0, 3 * self.slots, shape).astype(np.int32), axis=2)
            cache = (draw(*shape, self.size), draw(*shape, self.size))
            return queries, cache, (asked, positions, lengths), others
        per_head = -(-self.slots // self.page)
        pool = heads * per_head + 2
        table = np.full((batch, heads, per_head), -1, np.int32)
        for row in range(batch):
            free = list(rng.permutation(pool))
            for head in range(heads):
                for ordinal in range(-(-lengths[row, head] // self.page)):
                    table[row, head, ordinal] = free.pop()
        shape = (batch, pool, self.page)
        positions = rng.integers(0, 3 * self.slots, shape).astype(np.int32)
        cache = (draw(*shape, self.size), draw(*shape, self.size), jnp.asarray(positions))
        return queries, cache, (table, lengths, asked), others

    def check(self, kernel: str, *, paged: bool, mass: bool = False):
        queries, cache, at, others = self.arrays(paged=paged)
        at = [jnp.asarray(array) for array in at]
        function = {
            (False, False): decode_attention,
            (False, True): decode_mass,
            (True, False): paged_attention,
            (True, True): paged_mass,
        }[paged, mass]
        arguments = (queries, *cache, *at, *([others] if mass else []), self.window)
        wanted = function(*arguments, implementation="reference")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mosaic_gpu_kernel, "_THREAD_BLOCKS", self.thread_blocks)
            found = jax.jit(functools.partial(function, implementation=kernel))(*arguments)
        rough = self.dtype == jnp.bfloat16
        close = {"atol": 2e-2, "rtol": 2e-2} if rough else {"atol": 3e-5, "rtol": 3e-5}
        assert found[0].dtype == self.dtype and found[1].dtype == jnp.float32
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), **close)


CASES = {
    "many heads per group, in bfloat16": Case(
        lengths=((130, 64),), group=8, size=128, slots=192, dtype=jnp.bfloat16
    ),
    "groups of three queries in a window": Case(
        lengths=((70, 128),), group=3, queries=2, size=80, window=60
    ),
    "more queries than one tile of rows, of one per head": Case(
        lengths=((90,),), group=1, queries=70, slots=96, dtype=jnp.bfloat16
    ),
    "fewer slots than a block": Case(lengths=((20, 7),), slots=24, size=80, dtype=jnp.bfloat16),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_kernel
@every_case
def test_attention_stops_at_each_heads_length(kernel, case):
    case.check(kernel, paged=False)


def test_a_head_may_begin_within_a_gpus_tile_of_rows():
    lengths = ((100, 99, 33, 0, 50, 1, 100, 71),)
    case = Case(lengths=lengths, group=1, slots=101, thread_blocks=16)
    case.check("mosaic_gpu", paged=False)


@every_kernel
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=((0, 64), (130, 17)), group=8, size=128, page=64, dtype=jnp.bfloat16),
        Case(lengths=((200, 128),), group=3, slots=200, queries=2, size=80, window=60, page=32),
    ],
    ids=["bfloat16", "window"],
)
def test_pages_lie_in_any_order(kernel, case):
    case.check(kernel, paged=True)


@every_kernel
@pytest.mark.parametrize("paged", [False, True], ids=["padded", "paged"])
def test_the_mass_is_the_softmax_over_slots_and_what_is_elsewhere(kernel, paged):
    # An empty head, a full one, and blocks half full.
    padded = Case(lengths=((0, 136), (65, 3)), thread_blocks=6)
    in_pages = Case(lengths=((70, 128),), group=3, queries=2, dtype=jnp.bfloat16, window=60)
    (in_pages if paged else padded).check(kernel, paged=paged, mass=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=((100, 99, 33, 0, 50, 1, 64, 71),), group=1, slots=101, thread_blocks=16),
        Case(lengths=((24, 7),), queries=2, slots=24),
        Case(lengths=((60, 9, 31, 60),), slots=62, thread_blocks=8),
    ],
    ids=["over blocks", "in less than one", "each in two"],
)
def test_logits_of_heads_within_a_gpus_tiles_are_each_slots_own(case):
    case.check("mosaic_gpu", paged=False, mass=True)


@every_kernel
@pytest.mark.parametrize("paged", [False, True], ids=["padded", "paged"])
def test_no_copy_races_with_what_reads_it(kernel, paged):
    with lowering.interpreting(detect_races=True):
        case = Case(lengths=((256, 70),), group=2, slots=256, dtype=jnp.bfloat16, page=32)
        case.check(kernel, paged=paged, mass=True)


@every_kernel
def test_the_gradient_is_the_references(kernel):
    queries, cache, at, _ = Case(lengths=((20, 7),), slots=24).arrays(paged=False)
    at = [jnp.asarray(array) for array in at]

    def loss(arrays, implementation):
        out, lse = decode_attention(*arrays, *at, implementation=implementation)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(lse))

    arrays = (queries, *cache)
    found = jax.grad(loss)(arrays, kernel)
    for a, b in zip(found, jax.grad(loss)(arrays, "reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_what_a_kernel_does_not_serve_it_names():
    def asked(module, queries=1, size=64, dtype=jnp.float32, slots=64):
        arrays = jnp.zeros((1, 2, queries, size), dtype), jnp.zeros((1, 1, slots, size), dtype)
        at = jnp.zeros((1, queries), jnp.int32), jnp.zeros((1, 1, slots), jnp.int32)
        others = jnp.zeros((1, 2, queries))
        lengths = jnp.ones((1, 1), jnp.int32)
        module.decode_mass(arrays[0], arrays[1], arrays[1], *at, lengths, others)

    for module in (tpu, gpu):
        with pytest.raises(NotImplementedError, match="logits of 18 queries per KV head"):
            asked(module, queries=9)
        with pytest.raises(NotImplementedError, match="in float8_e5m2"):
            asked(module, dtype=jnp.float8_e5m2)
    with pytest.raises(NotImplementedError, match="head size 24: allowed are multiples of 16"):
        asked(gpu, size=24)
    with pytest.raises(NotImplementedError, match="head size 12"):
        asked(tpu, size=12)
    with pytest.raises(NotImplementedError, match="in all heads together"):
        asked(gpu, slots=65)
