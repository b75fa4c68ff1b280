"""A catalogue of programs whose kernels differ: what `scripts/resources_report.py` compiles, and `tests/aot` a sample of.

Every family runs over types, head dimensions, lengths and overridden tiles. Nothing here is run: arguments are shapes.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pallasfuse as pf
from benchmarks import h100, workloads
from benchmarks.cases import ATTENTION, DECODING, MORE_ATTENTION, OTHERS, AttentionCase, Case
from pallasfuse import execution
from pallasfuse.decisions import Phase
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.targets import TRITON, Target
from tests.loops_of_programs import LOOPS
from tests.losses import LOSSES
from tests.pallas_backend.rows import ROWS
from tests.pallas_backend.variants import VARIANTS

f32 = jnp.float32
HALF = ("bfloat16", "float16")
TYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles asked for: of the longest grid axis, and of the rolled one; with warps and stages."""

    rows: int
    rolled: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A function of arrays, given by their shapes, whose kernels are compiled for a target."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of shapes."""
    target: str
    tiling: Tiling | None = None
    parts: int | None = None
    price: bool = False
    """Are those kernels alone compiled that a plan keeps?"""


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def attention(q: Any, k: Any, v: Any, score: Callable[[Any], Any] = lambda s: s) -> Any:
    """Attention with heads that may share keys; `score` changes the scores [groups, heads of a group, queries, keys]."""
    n, h, d = q.shape
    g = k.shape[1]
    s = jnp.einsum("qghd,kgd->ghqk", q.reshape(n, g, h // g, d), k, preferred_element_type=f32) * d**-0.5
    p = jax.nn.softmax(score(s), axis=-1).astype(v.dtype)
    return jnp.einsum("ghqk,kgd->qghd", p, v, preferred_element_type=f32).reshape(n, h, -1).astype(v.dtype)


def causal(q: Any, k: Any, v: Any) -> Any:
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
    return attention(q, k, v, lambda s: jnp.where(j <= i, s, -jnp.inf))


def relative_bias(q: Any, k: Any, v: Any, table: Any) -> Any:
    """A learned bias for each head and clipped distance, gathered from a table."""
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
    far = table.shape[0] // 2
    found = table[jnp.clip(j - i, -far, far) + far].transpose(2, 0, 1).astype(f32)
    return attention(q, k, v, lambda s: s + found.reshape(s.shape))


def pair_bias_and_mask(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """Pair attention: a bias for each head, query and key, and a mask of pairs."""
    return attention(q, k, v, lambda s: jnp.where(mask, s + bias.reshape(s.shape).astype(f32), -1e9))


def pair_bias_of_rows(q: Any, k: Any, v: Any, bias: Any, mask: Any, gate: Any) -> Any:
    """Triangle attention: every row of a matrix attends along itself; q, k, v [rows, length, heads, size]."""
    s = jnp.einsum("rqhd,rkhd->rhqk", q, k, preferred_element_type=f32) * q.shape[-1] ** -0.5
    s = jnp.where(mask[:, None, None, :], s + bias[None].astype(f32), -1e9)
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    out = jnp.einsum("rhqk,rkhd->rqhd", p, v, preferred_element_type=f32)
    return (out * jax.nn.sigmoid(gate.astype(f32))).astype(v.dtype)


def paged(q: Any, keys: Any, values: Any, table: Any, length: Any) -> Any:
    """One query for each sequence, whose keys lie in pages that a table lists."""
    b, h, d = q.shape
    k = keys[table].reshape(b, -1, *keys.shape[2:])
    v = values[table].reshape(b, -1, *values.shape[2:])
    g = k.shape[2]
    s = jnp.einsum("bghd,bngd->bghn", q.reshape(b, g, h // g, d), k, preferred_element_type=f32) * d**-0.5
    s = jnp.where(jnp.arange(k.shape[1]) < length[:, None, None, None], s, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bghn,bngd->bghd", p, v, preferred_element_type=f32).reshape(b, h, d).astype(v.dtype)


def documents(q: Any, k: Any, v: Any, document: Any) -> Any:
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
    return attention(q, k, v, lambda s: jnp.where((j <= i) & (document[:, None] == document), s, -jnp.inf))


def window_and_sink(q: Any, k: Any, v: Any, sink: Any) -> Any:
    """A sliding window, and a learned logit for each head that no value belongs to."""
    n, h, d = q.shape
    g = k.shape[1]
    i, j = jnp.arange(n)[:, None], jnp.arange(n)
    s = jnp.einsum("qghd,kgd->ghqk", q.reshape(n, g, h // g, d), k, preferred_element_type=f32) * d**-0.5
    s = jnp.where((j <= i) & (i - j < 128), s, -jnp.inf)
    own = sink.reshape(g, h // g, 1, 1).astype(f32)
    m = jnp.maximum(s.max(-1, keepdims=True), own)
    p = jnp.exp(s - m)
    p = (p / (p.sum(-1, keepdims=True) + jnp.exp(own - m))).astype(v.dtype)
    return jnp.einsum("ghqk,kgd->qghd", p, v).reshape(n, h, d)


def capped(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, lambda s: 30 * jnp.tanh(s / 30))


def masked_by_array(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return attention(q, k, v, lambda s: jnp.where(mask, s, jnp.finfo(f32).min))


def entropy_of_scores(q: Any, k: Any) -> Any:
    s = jnp.einsum("nd,md->nm", q, k, preferred_element_type=f32)
    p = jax.nn.softmax(s, axis=-1)
    return -(p * jax.nn.log_softmax(s, axis=-1)).sum(-1)


def variance_of_scores(q: Any, k: Any) -> Any:
    s = jnp.einsum("nd,md->nm", q, k, preferred_element_type=f32)
    return s.var(-1), s.mean(-1)


def contrastive(x: Any, y: Any) -> Any:
    """Log-sum-exp of all similarities, less that of the pair."""
    s = jnp.einsum("nd,md->nm", x, y, preferred_element_type=f32) / 0.07
    return jax.nn.logsumexp(s, axis=-1) - jnp.diagonal(s)


def soft_assignment(x: Any, centres: Any) -> Any:
    """Rows as means of centres, weighted by distance."""
    x2, c2 = (jnp.sum(a.astype(f32) ** 2, -1) for a in (x, centres))
    s = 2 * jnp.einsum("nd,md->nm", x, centres, preferred_element_type=f32) - x2[:, None] - c2
    return jax.nn.softmax(s, axis=-1).astype(x.dtype) @ centres


def nearest(x: Any, centres: Any) -> Any:
    s = jnp.einsum("nd,md->nm", x, centres, preferred_element_type=f32)
    return jnp.min(jnp.sum(centres.astype(f32) ** 2, -1) - 2 * s, axis=-1)


def closest(x: Any, centres: Any) -> Any:
    """The centre that is nearest, and how far it is."""
    s = jnp.einsum("nd,md->nm", x, centres, preferred_element_type=f32)
    distances = jnp.sum(centres.astype(f32) ** 2, -1) - 2 * s
    return jnp.argmin(distances, axis=-1), jnp.min(distances, axis=-1)


def linear_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention without a softmax: rectified scores, normalised by their sum."""
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
    s = jnp.where(j <= i, jax.nn.relu(jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=f32)), 0)
    out = jnp.einsum("hqk,khd->hqd", s.astype(v.dtype), v, preferred_element_type=f32)
    return out / (1 + s.sum(-1, keepdims=True))


def latent(q: Any, rope: Any, c: Any, rope_keys: Any) -> Any:
    """Keys and values are one array; positions have keys of their own."""
    s = jnp.einsum("qhd,kd->hqk", q, c, preferred_element_type=f32)
    s = (s + jnp.einsum("qhr,kr->hqk", rope, rope_keys, preferred_element_type=f32)) * 0.05
    p = jax.nn.softmax(s, axis=-1).astype(c.dtype)
    return jnp.einsum("hqk,kd->qhd", p, c, preferred_element_type=f32).astype(c.dtype)


def group_norm(x: Any, w: Any, b: Any) -> Any:
    """Group norm of x [batch, positions, groups, channels]."""
    y = x.astype(f32)
    mean, variance = y.mean((1, 3), keepdims=True), y.var((1, 3), keepdims=True)
    return ((y - mean) * lax.rsqrt(variance + 1e-5) * w + b).astype(x.dtype)


def batch_statistics(x: Any) -> Any:
    return x.astype(f32).mean(0), x.astype(f32).var(0)


def norm_then_product(x: Any, w: Any) -> Any:
    y = x.astype(f32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) @ w


def chain(a: Any, b: Any, c: Any) -> Any:
    return (a @ b) @ c


def normalised_residual(x: Any, h: Any, alpha: Any) -> Any:
    def normalised(t: Any) -> Any:
        return t * lax.rsqrt((t.astype(f32) ** 2).sum(-1, keepdims=True) + 1e-6).astype(t.dtype)

    return normalised(x + alpha * (normalised(h) - x))


def router(x: Any, w: Any) -> Any:
    s = jnp.einsum("nd,de->ne", x, w, preferred_element_type=f32)
    p = jax.nn.softmax(s, axis=-1)
    return p.max(-1), jax.nn.logsumexp(s, axis=-1) ** 2


def softmax_of_columns(x: Any) -> Any:
    return jax.nn.softmax(x, axis=0)


def focal(x: Any, labels: Any) -> Any:
    logp = jax.nn.log_softmax(x.astype(f32), axis=-1)
    found = jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0]
    return -((1 - jnp.exp(found)) ** 2) * found


def divergence(x: Any, y: Any) -> Any:
    p, q = (jax.nn.log_softmax(a.astype(f32), axis=-1) for a in (x, y))
    return (jnp.exp(p) * (p - q)).sum(-1)


def cosine(x: Any, y: Any) -> Any:
    a, b = x.astype(f32), y.astype(f32)
    return (a * b).sum(-1) * lax.rsqrt((a * a).sum(-1) * (b * b).sum(-1) + 1e-12)


def _heads(n: int, h: int, g: int, d: int, dtype: str, m: int | None = None, e: int | None = None) -> Any:
    m = m or n
    return array(n, h, d, dtype=dtype), array(m, g, d, dtype=dtype), array(m, g, e or d, dtype=dtype)


def _of_case(case: Case, length: int, dtype: str, target: str) -> Subject:
    if isinstance(case, AttentionCase):
        queries, keys = case.lengths(length)
        shapes = jax.eval_shape(lambda: case.arrays(queries, jnp.dtype(dtype), batch=case.batch, key_length=keys))
    else:
        shapes = jax.eval_shape(lambda: case.arrays(length, jnp.dtype(dtype)))
    name = f"{case.name} {length} {dtype}"
    return Subject(name, lambda *a: case.plain(*a, *case.static), tuple(shapes), target)


def variants() -> Iterator[Subject]:
    """Attention beside masks, biases and gates: small sizes, all types, both kinds of kernels."""
    for name, variant in VARIANTS.items():
        for dtype in (*HALF, "float32"):
            shapes = jax.eval_shape(lambda v=variant, t=dtype: tuple(v.arrays(t)))
            yield Subject(f"{name} {dtype}", variant.function, shapes, "triton")
            if dtype == "bfloat16":
                yield Subject(f"{name} {dtype}", variant.function, shapes, "mosaic_gpu")


def cases() -> Iterator[Subject]:
    """Yields the programs that the benchmarks measure."""
    for case in (*ATTENTION, *MORE_ATTENTION, *OTHERS):
        for dtype in (*TYPES, "float16"):
            yield _of_case(case, 1000 if dtype == "float16" else 4096, dtype, "triton")
    for case in (*ATTENTION, *MORE_ATTENTION):
        yield _of_case(case, 4096, "bfloat16", "mosaic_gpu")
    for case in DECODING:
        for dtype in TYPES:
            yield _of_case(case, 8192, dtype, "triton")


def head_dimensions() -> Iterator[Subject]:
    for d in (8, 16, 24, 32, 40, 64, 80, 96, 128, 160, 192, 256):
        for dtype in (*TYPES, "float16"):
            yield Subject(f"causal, heads of {d} {dtype}", causal, _heads(1000, 8, 2, d, dtype), "triton")
        yield Subject(f"causal, heads of {d}", causal, _heads(2048, 16, 4, d, "bfloat16"), "mosaic_gpu")


def harder() -> Iterator[Subject]:
    """Attention with arrays that are read for every pair, and other forms beside the benchmarks."""
    for target in ("triton", "mosaic_gpu"):
        for dtype in TYPES:
            wide = _heads(4096, 32, 8, 128, dtype)
            yield Subject(f"relative bias {dtype}", relative_bias, (*wide, array(255, 32, dtype=dtype)), target)
            yield Subject(f"documents {dtype}", documents, (*wide, array(4096, dtype="int32")), target)
            yield Subject(f"mask array {dtype}", masked_by_array, (*wide, array(4096, 4096, dtype="bool")), target)
            yield Subject(f"soft cap {dtype}", capped, wide, target)
            few = _heads(4096, 64, 8, 64, dtype)
            yield Subject(f"window and sink {dtype}", window_and_sink, (*few, array(64, dtype=dtype)), target)
            yield Subject(f"no softmax {dtype}", linear_attention, _heads(2048, 8, 8, 64, dtype), target)
            for d in (32, 64, 128):
                own = _heads(1024, 8, 8, d, dtype)
                bias, mask = array(8, 1024, 1024, dtype=dtype), array(1024, 1024, dtype="bool")
                yield Subject(f"pairs {d} {dtype}", pair_bias_and_mask, (*own, bias, mask), target)
                rows = [array(64, 384, 4, d, dtype=dtype)] * 3
                more = [array(4, 384, 384, dtype=dtype), array(64, 384, dtype="bool"), rows[0]]
                yield Subject(f"rows of pairs {d} {dtype}", pair_bias_of_rows, (*rows, *more), target)
            pages = [array(16, 32, 128, dtype=dtype), *[array(2048, 64, 8, 128, dtype=dtype)] * 2]
            table = [array(16, 128, dtype="int32"), array(16, dtype="int32")]
            yield Subject(f"paged {dtype}", paged, (*pages, *table), target)
            c = [array(512, 16, 512, dtype=dtype), array(512, 16, 64, dtype=dtype)]
            keys = [array(2048, 512, dtype=dtype), array(2048, 64, dtype=dtype)]
            yield Subject(f"latent {dtype}", latent, (*c, *keys), target)
            vit = [array(577, 16, 80, dtype=dtype)] * 3
            yield Subject(f"577 patches {dtype}", attention, tuple(vit), target)


def products() -> Iterator[Subject]:
    """Reductions of products that are no attention."""
    for target in ("triton", "mosaic_gpu"):
        for dtype in TYPES:
            for d in (64, 128, 256):
                x, y = array(2048, d, dtype=dtype), array(4096, d, dtype=dtype)
                for f in (contrastive, entropy_of_scores, variance_of_scores, soft_assignment, nearest, closest):
                    if target == "triton" or d == 128:
                        own = (x, x) if f is contrastive else (x, y)
                        yield Subject(f"{f.__name__} {d} {dtype}", f, own, target)
            router_shapes = (array(4096, 128, dtype=dtype), array(128, 64, dtype=dtype))
            yield Subject(f"router {dtype}", router, router_shapes, target)
            for m, n, k, h in ((512, 256, 64, 64), (1024, 512, 128, 128), (512, 512, 256, 256)):
                shapes = (array(m, k, dtype=dtype), array(k, n, dtype=dtype), array(n, h, dtype=dtype))
                yield Subject(f"chain {m}x{n}x{k}x{h} {dtype}", chain, shapes, target)
            norm = (array(2048, 1024, dtype=dtype), array(1024, 256, dtype=dtype))
            yield Subject(f"norm then product {dtype}", norm_then_product, norm, target)
    for loss in LOSSES:
        for dtype in HALF:
            shapes = (array(1000, 1032, dtype=dtype), array(1032, 32000, dtype=dtype), array(1000, dtype="int32"))
            yield Subject(f"{loss.__name__} {dtype}", loss, shapes, "mosaic_gpu")
        for dtype in TYPES:
            shapes = (array(1000, 128, dtype=dtype), array(128, 32000, dtype=dtype), array(1000, dtype="int32"))
            yield Subject(f"{loss.__name__} of 128 {dtype}", loss, shapes, "triton")


def rows() -> Iterator[Subject]:
    """Norms, softmaxes and losses of rows: short, long, odd; one block for a row, and a cluster."""
    for name, case in ROWS.items():
        for n, m in ((61, 1000), (4096, 4096), (8, 50257)):
            for dtype in TYPES:
                shapes = jax.eval_shape(lambda c=case, n=n, m=m, t=dtype: tuple(c.arrays(n, m, t)))
                yield Subject(f"{name} {n}x{m} {dtype}", case.function, shapes, "triton")
        for dtype in TYPES:
            shapes = jax.eval_shape(lambda c=case, t=dtype: tuple(c.arrays(8, 33000, t)))
            yield Subject(f"{name} in clusters {dtype}", case.function, shapes, "mosaic_cluster", parts=4)
        shapes = jax.eval_shape(lambda c=case: tuple(c.arrays(512, 128256, "bfloat16")))
        yield Subject(f"{name} 512x128256", case.function, shapes, "mosaic_cluster")
    for dtype in TYPES:
        images = array(8, 1024, 32, 16, dtype=dtype)
        scale = array(32, 16)
        yield Subject(f"group norm {dtype}", group_norm, (images, scale, scale), "triton")
        x, labels = array(2048, 512, dtype=dtype), array(2048, dtype="int32")
        yield Subject(f"batch statistics {dtype}", batch_statistics, (x,), "triton")
        yield Subject(f"softmax of columns {dtype}", softmax_of_columns, (x,), "triton")
        yield Subject(f"focal {dtype}", focal, (x, labels), "triton")
        yield Subject(f"divergence {dtype}", divergence, (x, x), "triton")
        yield Subject(f"cosine {dtype}", cosine, (x, x), "triton")
        alpha = array(512, dtype=dtype)
        yield Subject(f"normalised residual {dtype}", normalised_residual, (x, x, alpha), "triton")


def tilings() -> Iterator[Subject]:
    """One kernel with many tiles, and those with arrays for every pair with a few."""
    sizes = ((16, 16), (16, 128), (32, 32), (64, 32), (64, 64), (64, 128), (64, 256), (128, 32), (128, 64), (128, 128))
    own = {t: _heads(1024, 4, 4, d, t) for t, d in (("bfloat16", 128), ("float32", 64))}
    for dtype, shapes in own.items():
        for r, c in sizes:
            for warps, stages in ((4, 1), (4, 2), (8, 3)):
                name = f"causal {r}x{c} {warps} warps {stages} stages {dtype}"
                yield Subject(name, causal, shapes, "triton", Tiling(r, c, warps, stages))
        bias, mask = array(4, 1024, 1024, dtype=dtype), array(1024, 1024, dtype="bool")
        for r, c in ((16, 64), (32, 32), (64, 32), (64, 64), (64, 128), (128, 64)):
            for warps, stages in ((4, 2), (8, 3)):
                name = f"pairs {r}x{c} {warps} warps {stages} stages {dtype}"
                yield Subject(name, pair_bias_and_mask, (*shapes, bias, mask), "triton", Tiling(r, c, warps, stages))


def whole_programs() -> Iterator[Subject]:
    """Yields the programs of `benchmarks/workloads` whose packages are installed, with the kernels of their plans."""
    for entry in workloads.programs():
        try:
            built = workloads.build(entry, "gpu")
        except workloads.NotInstalledError:
            continue
        function, arguments = (
            (built.function, built.structs) if built.step is None else (built.step[0], built.step_structs)
        )
        yield Subject(entry.name, function, arguments, "mosaic_gpu", price=True)


def loops() -> Iterator[Subject]:
    """Loops that are one kernel each."""
    for name, (function, arguments) in LOOPS.items():
        shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments)
        yield Subject(name, function, shapes, "triton", price=True)


FAMILIES = (variants, cases, head_dimensions, harder, products, rows, tilings, whole_programs, loops)


def subjects() -> Iterator[Subject]:
    """Every family's, in order."""
    for family in FAMILIES:
        yield from family()


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit is compiled as one kernel: a program, or the phases that a cluster runs."""

    name: str
    target: Target
    programs: tuple[TileProgram, ...]

    @property
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The tensors that the programs load, or look up in a table, and none of them has stored, by name."""
        stored = {t.name for p in self.programs for t in p.outputs}
        looked_up = [x for p in self.programs for x in p.lookups]
        stored |= {x.result.name for x in looked_up}
        loaded = {t.name: t for p in self.programs for t in p.inputs if t.name not in stored}
        loaded |= {t.name: t for x in looked_up for t in (x.source, x.table)}
        return {n: array(*(a.extent for a in t.axes), dtype=t.dtype) for n, t in loaded.items()}

    def compile(self) -> h100.Compiled:
        """Compiles the unit for an H100, by its emitter.

        Raises:
          jax.errors.JaxRuntimeError: it does not compile, or needs more shared memory than there is.
        """
        phases = tuple(Phase(p, self.target) for p in self.programs)
        names = list(self.arguments)

        def run(*arrays: Any) -> list[Any]:
            return list(execution.run_phases(phases, dict(zip(names, arrays, strict=True))).values())

        return h100.compile_for_h100(run, list(self.arguments.values()))

    def reported(self, compiled: h100.Compiled) -> h100.Launch | h100.MosaicKernel:
        """The one kernel of what was compiled; XLA's own, for arrays that are padded, are called otherwise."""
        name = self.programs[0].name[:60]
        own = [k for k in compiled.launches if k.name.startswith(name)]
        (found,) = (*compiled.mosaic_kernels, *own)
        return found


def units(subject: Subject) -> Iterator[Unit]:
    """The kernels that a subject is planned to be, but for those of XLA. Tiles are asked for by the names of a first plan."""
    options = pf.FuseOptions(target=subject.target, parts=subject.parts, price=subject.price, check=False)
    plan = pf.fuse(subject.function, options=options).explain(*subject.arguments)
    tiling = subject.tiling
    if tiling is not None and plan.kernels:
        schedule = plan.kernels[0].schedule
        row = max((axis for axis, _ in schedule.grid), key=lambda axis: axis.extent)
        tiles = ((row.name, tiling.rows), (schedule.rolled.name, tiling.rolled))
        options = replace(options, tiles=tiles, warps=tiling.warps, stages=tiling.stages)
        plan = pf.fuse(subject.function, options=options).explain(*subject.arguments)
    for kernel in plan.kernels:
        clustered = tuple(p.program for p in kernel.phases if p.target.cluster)
        if clustered:
            yield Unit(subject.name, kernel.phases[0].target, clustered)
        yield from (Unit(subject.name, p.target, (p.program,)) for p in kernel.phases
                    if not p.target.cluster and p.target.writes_kernels)  # fmt: skip
    yield from (Unit(subject.name, TRITON.on(plan.target.device), (loop.kernel,)) for loop in plan.loops)
