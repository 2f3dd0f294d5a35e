"""Layers in one call, against the ops that they are made of, one by one and to the last bit."""

from dataclasses import replace

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import CacheWrite, HeadNorms, Layers, LayerWeights, Place, Rotation, native
from tests.backends import require, use_backend
from tests.cpu_blocks import a_norm, normal, pack, pack_up
from tests.cpu_steps import CONTEXT, KINDS, Step
from tests.low_rank_products import Factors, adapter, mixed, rows_of

N_LAYERS = 3
HEADS, KV_HEADS, SIZE = 4, 2, 16
HIDDEN, INNERS = 48, (80, 208, 32)
CACHES = {"float": torch.float32, "bfloat16": torch.float16, "int8": torch.float16}


@pytest.fixture(autouse=True)
def _compiled():
    require(native.build.library() is not None)


@pytest.fixture(params=CACHES)
def precision(request):
    if request.param == "int8" and not native.int8_linear.serves():
        pytest.skip("this processor has no VNNI")
    if request.param == "bfloat16" and not native.float_linear.serves_bfloat16():
        pytest.skip("no instructions for bfloat16 that the kernels use")
    return request.param


def a_layer(precision, inner=INNERS[0], *, feed_forward="plain", head_norms=False):
    return LayerWeights(
        attention_norm=a_norm(HIDDEN, layer_norm=True),
        qkv=pack((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, precision),
        query_norm=a_norm(SIZE, layer_norm=False) if head_norms else None,
        key_norm=a_norm(SIZE, layer_norm=False) if head_norms else None,
        attention_out=pack(HIDDEN, HEADS * SIZE, precision, seed=6),
        attention_post_norm=None,
        mlp_norm=a_norm(HIDDEN, layer_norm=False),
        up=pack_up(feed_forward, inner, HIDDEN, precision),
        down=pack(HIDDEN, inner, precision, seed=8),
        mlp_post_norm=None,
    )


class Run:
    """A step of SEQUENCES that is taken through the layers, each with a cache of its own."""

    def __init__(self, layers, precision, kinds, *, pairs=0, adapters=()):
        """adapters: each of some rows, which take turns; other rows have none."""
        self.layers, self.precision = layers, precision
        step = Step(kinds, (HEADS, KV_HEADS, SIZE), pairs=pairs)
        written, self.rows, self.rotation = step.write(), step.rows(), step.rotation
        cached = [
            torch.stack([x * (1 + i) for i in range(N_LAYERS)]).to(CACHES[precision])
            for x in (written.keys, written.values)
        ]
        self.cache = CacheWrite(*cached, written.blocks, written.offsets)
        self.residual = normal(step.qkv.shape[0], HIDDEN, seed=11)
        owners = mixed(self.residual.shape[0], len(adapters))
        self.adapted = rows_of(adapters, owners) if adapters else None

    def at_once(self, count=N_LAYERS):
        """Whether the first layers are run in one call."""
        return kernels.run_layers(
            self.layers,
            count,
            self.residual,
            self.rotation,
            self.cache,
            self.rows,
            self.adapted,
        )

    def one_by_one(self, count):
        for index, layer in enumerate(self.layers.weights[:count]):
            norms = None
            if layer.query_norm is not None:
                norms = HeadNorms(
                    layer.query_norm.weight, layer.key_norm.weight, layer.query_norm.epsilon
                )
            own = replace(self.cache, keys=self.cache.keys[index], values=self.cache.values[index])
            added = None if self.adapted is None else self.adapted.added(index)
            qkv = kernels.normed_linear(
                self.residual, None, layer.attention_norm, layer.qkv, own.keys.dtype, added
            )
            heads = qkv.view(qkv.shape[0], -1, SIZE)
            scale = self.layers.scales[index]
            x = kernels.attend(heads, norms, self.rotation, own, self.rows, scale).flatten(1)
            kernels.linear_onto(self.residual, x, layer.attention_out, added)
            block = layer.mlp_norm, layer.up, layer.down, self.layers.activation, torch.float32
            if added is None:
                kernels.feed_forward_onto(self.residual, None, *block)
            else:
                kernels.adapted_feed_forward_onto(self.residual, *block, added)


def adapters_of(*, gated):
    """Three adapters: of every projection, of one layer's queries, and of nothing."""
    projection = (HEADS + 2 * KV_HEADS) * SIZE
    every = [
        [
            Factors.made(Place.QUERY_KEY_VALUE, 4, HIDDEN, projection, seed=i),
            Factors.made(Place.ATTENTION_OUT, 17, HEADS * SIZE, HIDDEN, seed=i),
            *(Factors.made(Place.UP, 3, HIDDEN, inner, gated=g, seed=i) for g in gated),
            Factors.made(Place.DOWN, 5, inner, HIDDEN, seed=i),
        ]
        for i, inner in enumerate(INNERS)
    ]
    queries = Factors.made(Place.QUERY_KEY_VALUE, 2, HIDDEN, HEADS * SIZE, seed=9)
    return adapter(*every), adapter([], [queries], []), adapter([], [], [])


def layers_of(precision, activation="gelu_tanh", **kind):
    weights = tuple(a_layer(precision, inner, **kind) for inner in INNERS)
    return Layers(weights, (0.25, 0.2, 0.5), activation)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("count", [1, N_LAYERS])
@pytest.mark.parametrize(
    ("kind", "activation", "pairs"),
    [
        ({}, "gelu_tanh", 0),
        ({"feed_forward": "gated", "head_norms": True}, "silu", SIZE // 2),
    ],
)
def test_they_are_their_ops_one_after_another(precision, kinds, count, kind, activation, pairs):
    layers = layers_of(precision, activation, **kind)
    whole, parts = (Run(layers, precision, kinds, pairs=pairs) for _ in range(2))
    before = whole.residual.clone()
    assert whole.at_once(count)
    parts.one_by_one(count)
    assert torch.equal(whole.residual, parts.residual)
    assert torch.equal(whole.cache.keys, parts.cache.keys)
    assert torch.equal(whole.cache.values, parts.cache.values)
    assert not torch.equal(whole.residual, before)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_with_adapters_they_are_their_ops_one_after_another(precision, kinds, kind):
    adapters = adapters_of(gated=(False, True) if kind == "gated" else (False,))
    layers = layers_of(precision, "silu", feed_forward=kind)
    whole, parts = (Run(layers, precision, kinds, adapters=adapters) for _ in range(2))
    bare = Run(layers, precision, kinds)
    assert whole.at_once()
    parts.one_by_one(N_LAYERS)
    assert torch.equal(whole.residual, parts.residual)
    assert torch.equal(whole.cache.keys, parts.cache.keys)
    assert bare.at_once()
    owners = torch.from_numpy(whole.adapted.owners)
    changed = (whole.residual != bare.residual).any(1)
    assert changed[owners == 0].all()
    # No query matters in a prompt's first token, which attends to itself alone.
    assert changed[owners == 1].any() or not (owners == 1).any()


def test_adapters_of_other_layers_are_refused():
    run = Run(layers_of("float"), "float", KINDS[-1], adapters=[adapter([], [])])
    with pytest.raises(ValueError, match="adapters of 2 layers for 3"):
        run.at_once()


def test_rows_above_those_computed_at_once(precision):
    """Products take many rows in turn, attention all of them."""
    layers, n = layers_of(precision), 1100
    blocks = torch.arange(n) // 32
    tables = [tuple(range(n // 32 + 1))]
    rows = kernels.StepRows(
        kernels.ChunkLayout.build([kernels.Chunk(tables[0], 0, n)], 32), None, None
    )
    runs = [Run(layers, precision, ("prompt",)) for _ in range(2)]
    for run in runs:
        shape = N_LAYERS, len(tables[0]), KV_HEADS, 32, SIZE
        cache = torch.zeros(shape, dtype=CACHES[precision])
        run.cache = CacheWrite(cache, cache.clone(), blocks, torch.arange(n) % 32)
        run.rows, run.residual = rows, normal(n, HIDDEN, seed=11)
    assert runs[0].at_once()
    runs[1].one_by_one(N_LAYERS)
    assert torch.equal(runs[0].residual, runs[1].residual)


def test_rotations_and_norms_are_told_apart():
    """Each matters: a run without it is another one."""
    with_both = Run(layers_of("float", head_norms=True), "float", KINDS[-1], pairs=8)
    no_norms = Run(layers_of("float"), "float", KINDS[-1], pairs=8)
    no_turns = Run(layers_of("float", head_norms=True), "float", KINDS[-1])
    assert isinstance(with_both.rotation, Rotation)
    assert with_both.rotation.cosines.shape[0] == CONTEXT
    assert all(run.at_once() for run in (with_both, no_norms, no_turns))
    assert not torch.equal(with_both.residual, no_norms.residual)
    assert not torch.equal(with_both.residual, no_turns.residual)


def test_what_the_kernels_do_not_take_is_left_alone(precision, monkeypatch):
    plain = layers_of(precision)
    other = a_layer("int8" if precision == "float" else "float")
    norm, head_norm = (a_norm(size, layer_norm=False) for size in (HIDDEN, SIZE))
    changes = [
        {"mlp_post_norm": norm},
        {"attention_post_norm": norm},
        {"query_norm": head_norm},
        {"down": other.down},
    ]
    lasts = [replace(plain.weights[2], **change) for change in changes]
    for last in (*lasts, other):
        run = Run(replace(plain, weights=(*plain.weights[:2], last)), precision, KINDS[-1])
        before = run.residual.clone()
        assert not run.at_once()
        assert torch.equal(run.residual, before)
    assert not Run(plain, precision, KINDS[-1]).at_once(0)
    run = Run(plain, precision, KINDS[-1])
    wide = replace(run.cache, keys=run.cache.keys.double(), values=run.cache.values.double())
    run.cache = wide
    assert not run.at_once()
    use_backend("torch", monkeypatch)
    assert not Run(plain, precision, KINDS[-1]).at_once()


@pytest.mark.parametrize(
    ("part", "size"), [("attention_norm", 32), ("mlp_norm", 64), ("query_norm", 8)]
)
def test_norms_of_another_size_are_refused(part, size):
    first, *others = layers_of("float", head_norms=True).weights
    layers = replace(
        layers_of("float"),
        weights=(*others, replace(first, **{part: a_norm(size, layer_norm=False)})),
    )
    run = Run(layers, "float", KINDS[-1])
    with pytest.raises(ValueError, match=f"\\b{size}\\b"):
        run.at_once()


@pytest.mark.parametrize("part", ["qkv", "attention_out", "up", "down"])
@pytest.mark.parametrize(("outs", "ins"), [(16, 0), (0, 16)])
def test_weights_of_another_shape_are_refused(part, outs, ins):
    plain = layers_of("float")

    def other(weight):
        return pack(weight.out_features + outs, weight.in_features + ins, "float")

    first, *others = plain.weights
    changed = replace(first, **{part: other(getattr(first, part))})
    run = Run(replace(plain, weights=(changed, *others)), "float", KINDS[-1])
    before = run.residual.clone()
    with pytest.raises(ValueError, match=r"channels|layers of"):
        run.at_once()
    assert torch.equal(run.residual, before)


def test_a_step_that_does_not_fit_the_layers_is_refused():
    run = Run(layers_of("float"), "float", KINDS[-1])
    with pytest.raises(ValueError, match=r"4 of 3 layers over a cache of 3"):
        run.at_once(N_LAYERS + 1)
    cache = run.cache
    run.cache = replace(cache, keys=cache.keys[:2], values=cache.values[:2])
    with pytest.raises(ValueError, match=r"3 of 3 layers over a cache of 2"):
        run.at_once()
    run.cache = cache
    run.rows = replace(run.rows, wanted=torch.tensor([0]))
    with pytest.raises(ValueError, match="1 rows wanted: all"):
        run.at_once()
    run.rows, run.residual = replace(run.rows, wanted=None), run.residual[:, :32].contiguous()
    with pytest.raises(ValueError, match=r"a stream \[\d+, 32\]"):
        run.at_once()
    fewer = cache.keys[:, :, :1].contiguous(), cache.values[:, :, :1].contiguous()
    run = Run(layers_of("float"), "float", KINDS[-1])
    run.cache = replace(cache, keys=fewer[0], values=fewer[1])
    with pytest.raises(ValueError, match="a cache"):
        run.at_once()
