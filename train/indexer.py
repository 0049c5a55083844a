"""Training of IndexMem's indexer: what later queries will attend to, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.pooled_max import pooled_max
from kvjax.learned import modules
from kvjax.learned.indexer import (
    Activation,
    Indexer,
    IndexerConfig,
    head_gates,
    importance,
    index_keys,
    index_queries,
    init_indexer,
)
from kvjax.models.decoder import Decoder
from train.passes import Layer, differentiated_at_once, frozen_pass
from train.recipe import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerTraining:
    """The distillation of IndexMem (arXiv 2605.25475), its first stage.

    loss = mean over documents and layers of KL(softmax_t max_s T[s, t] || softmax_t max_s A[s, t])

    T are the frozen model's logits, A the indexer's scores. The paper takes raw logits ("logit")
    and leaves open what becomes of the heads. "logprob" subtracts each query's and head's
    log-sum-exp first: what is pooled is then the largest share of attention that a key ever gets,
    and heads with large logits do not outvote the others. "concat" is one dot product of all
    heads side by side over sqrt(H D), which has logits only.

    In the paper both pool over all queries. With `foresee` every document is cut at a random place,
    as a prompt is cut off from the question that is still to come: T pools over the queries behind
    the cut, A over those before it, and only tokens before it count. The indexer then has to tell
    from a prompt's own queries what later ones will attend to, which is what it is used for.
    """

    name: str = "indexmem-no-memory"  # of the exported module, a policy
    heads: int | None = None  # None: H / 4
    size: int | None = None  # None: D / 8
    activation: Activation = "relu"
    near: int = 8  # pairs closer than this are left out, on both sides
    sinks: int = 4  # first tokens of a document, left out as the policy protects them
    teacher: Literal["logprob", "logit"] = "logprob"
    head_reduce: Literal["max", "mean", "concat"] = "max"
    foresee: bool = False
    first_cut: float = 0.4  # share of the document, drawn from between both; with foresee
    last_cut: float = 0.9

    def __post_init__(self) -> None:
        self.check_name()
        for name, allowed in (
            ("teacher", ("logprob", "logit")),
            ("head_reduce", ("max", "mean", "concat")),
        ):
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"module.{name}={given!r}: allowed: {', '.join(allowed)}")
        if not 0 < self.first_cut <= self.last_cut < 1:
            raise ValueError(
                f"module.first_cut={self.first_cut}, module.last_cut={self.last_cut}: allowed: "
                "0 < first <= last < 1"
            )
        if self.sinks < 0:
            raise ValueError(f"module.sinks={self.sinks}: allowed: integers >= 0")
        if self.head_reduce == "concat" and self.teacher == "logprob":
            raise ValueError(
                "module.head_reduce='concat' with teacher 'logprob': allowed with 'logit', as no "
                "head's log-sum-exp is that of all heads side by side"
            )
        self.indexer  # noqa: B018 (checks its own fields)

    def check_name(self) -> None:
        if self.name != "indexmem-no-memory":
            raise ValueError(f"module.name={self.name!r}: allowed: indexmem-no-memory")

    @property
    def indexer(self) -> IndexerConfig:
        return IndexerConfig(
            heads=self.heads, size=self.size, activation=self.activation, near=self.near
        )


class IndexerRecipe:
    """An indexer beside every layer of a frozen decoder; see `train.recipe.Recipe`."""

    def __init__(self, config: IndexerTraining, length: int):
        del length
        self.config = config

    def init(self, model: Decoder, key: Array) -> Indexer:
        return init_indexer(
            self.config.indexer,
            key,
            num_layers=model.config.num_layers,
            num_heads=model.config.num_heads,
            head_dim=model.config.head_dim,
            hidden_size=model.config.hidden_size,
        )

    def axes(self, params: Indexer) -> dict[str, tuple[str | None, ...]]:
        """The model's width is split as its own parameters are; an indexer's heads stay whole."""
        names: dict[str, tuple[str | None, ...]] = {
            "wk": ("layers", "embed", None),
            "wg": ("layers", "embed", None),
        }
        return {name: names.get(name, (None,) * array.ndim) for name, array in params.items()}

    def fixed(self, model: Decoder) -> None:
        """Nothing."""

    def loss(
        self, params: Indexer, model: Decoder, batch: Batch, key: Array, fixed: None = None
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        segments = batch["segments"]
        before = later = segments  # whose queries ask
        if self.config.foresee:
            behind = behind_a_cut(self.config, batch, key)
            before, later = jnp.where(behind, -1, segments), jnp.where(behind, segments, -1)

        def visit(layer: Layer, own: Indexer) -> tuple[Array, Array, Array]:
            teacher = teacher_importance(self.config, layer, segments, later)
            # Sliding-window layers are never cut below their window: nothing to learn there.
            full = layer.window == NO_WINDOW
            wanted = (batch["positions"] >= self.config.sinks) & (before >= 0) & full

            def divergence(own: Indexer) -> tuple[Array, tuple[Array, Array]]:
                student = student_importance(self.config, own, layer, segments, before)
                counted = wanted & (teacher > -jnp.inf) & (student > -jnp.inf)
                divergence, overlap, documents = compare(teacher, student, segments, counted)
                return divergence, (overlap, documents)

            found, (overlap, documents) = differentiated_at_once(divergence, own)
            return found, overlap, documents

        _, (divergence, overlap, documents) = frozen_pass(model, batch, visit, params)
        count = jnp.maximum(jnp.sum(documents), 1.0)
        kl = jnp.sum(divergence) / count
        return kl, {"kl": kl, "overlap": jnp.sum(overlap) / count}

    def export(
        self, params: Indexer, model: Decoder, directory: Path, training: Mapping[str, Any]
    ) -> None:
        card = modules.Card(
            module="indexmem-no-memory",
            kind="indexer",
            options=dataclasses.asdict(self.config.indexer),
            backbone=str(training.get("model", "")),
            fingerprints=modules.fingerprints(model),
            training=training,
        )
        modules.save_module(directory, params, card)


def behind_a_cut(config: IndexerTraining, batch: Batch, key: Array) -> Bool[Array, "B T"]:
    """Which tokens lie behind a cut of their document, drawn for each."""
    segments = batch["segments"]
    rows, length = segments.shape
    of = jnp.where(segments >= 0, segments, length)
    share = jax.random.uniform(
        key, (rows, length + 1), minval=config.first_cut, maxval=config.last_cut
    )

    def one_row(of: Array, share: Array, positions: Array) -> Array:
        tokens = jax.ops.segment_sum(jnp.ones(length, jnp.float32), of, num_segments=length + 1)
        return positions.astype(jnp.float32) >= (share * tokens)[of]

    return jax.vmap(one_row)(of, share, batch["positions"])


def teacher_importance(
    config: IndexerTraining,
    layer: Layer,
    segments: Int[Array, "B T"],
    asking: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """The frozen model's logits, pooled over heads and then over the queries that see a key.

    `asking` are the queries' segments, -1 for those that are left out.
    """
    new = layer.new
    heads, size = new.queries.shape[1], new.queries.shape[3]
    places = _places(segments)
    mean = jnp.full(layer.lse.shape, 1 / heads, jnp.float32)
    found, _ = pooled_max(
        new.queries,
        new.keys,
        places,
        places,
        weights=mean if config.head_reduce == "mean" else None,
        offsets=layer.lse if config.teacher == "logprob" else None,
        query_segments=segments if asking is None else asking,
        key_segments=segments,
        scale=(heads * size if config.head_reduce == "concat" else size) ** -0.5,
        reduce="max" if config.head_reduce == "max" else "sum",
        near=config.near,
    )
    return found


def student_importance(
    config: IndexerTraining,
    indexer: Indexer,
    layer: Layer,
    segments: Int[Array, "B T"],
    asking: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """The indexer's scores, pooled over the queries that see a key; arguments as above."""
    hidden, places = layer.new.hidden, _places(segments)
    return importance(
        index_queries(indexer, layer.new.queries_pre_rope),
        head_gates(indexer, hidden),
        index_keys(indexer, hidden),
        places,
        places,
        activation=config.activation,
        near=config.near,
        query_segments=segments if asking is None else asking,
        key_segments=segments,
    )


def compare(
    teacher: Float[Array, "B T"],
    student: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Sums over documents: forward KL, overlap of the best quarters, and how many there are.

    The counted tokens of a document make one distribution. The overlap is the share of the
    teacher's best quarter of them, rounded up, that lies in the student's. Segments are below T.
    """
    rows = jax.vmap(_compare_row)(teacher, student, jnp.where(counted, segments, -1))
    divergence, overlap, documents = (jnp.sum(array) for array in rows)
    return divergence, overlap, documents


def _compare_row(
    teacher: Float[Array, " T"], student: Float[Array, " T"], segments: Int[Array, " T"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    length = segments.shape[0]
    there = segments >= 0
    of = jnp.where(there, segments, length)  # what is left out is a document of its own
    # Nothing but finite numbers from here on: a masked -inf would make NaN of its gradient.
    teacher, student = (jnp.where(there, array, 0.0) for array in (teacher, student))

    def total(array: Array) -> Array:
        return jax.ops.segment_sum(array, of, num_segments=length + 1)

    def log_softmax(logits: Array) -> Array:
        largest = jax.ops.segment_max(lax.stop_gradient(logits), of, num_segments=length + 1)
        shifted = logits - largest[of]
        return shifted - jnp.log(total(jnp.exp(shifted)))[of]

    log_p, log_q = log_softmax(teacher), log_softmax(student)
    divergence = jnp.where(there, jnp.exp(log_p) * (log_p - log_q), 0.0)
    count = total(jnp.ones(length, jnp.int32))
    quarter = (count + 3) // 4

    def best(scores: Array) -> Array:
        """Whether a token is in the best quarter of its document."""
        order = jnp.lexsort((-scores, of))
        place = jnp.zeros(length, jnp.int32).at[order].set(jnp.arange(length, dtype=jnp.int32))
        start = jnp.cumsum(count) - count
        return place - start[of] < quarter[of]

    both = total((best(teacher) & best(student)).astype(jnp.float32))
    share = both / jnp.maximum(quarter, 1).astype(jnp.float32)
    present = (count > 0)[:length]
    overlap = jnp.sum(jnp.where(present, share[:length], 0.0))
    return jnp.sum(divergence), overlap, jnp.sum(present.astype(jnp.float32))


def _places(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Indices in the row: distances within a document are those of its positions."""
    return jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
