"""Layers in one call, against the ops that they are made of, one by one and to the last bit."""

from dataclasses import replace

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import CacheWrite, HeadNorms, Layers, LayerWeights, Rotation, native
from tests.backends import require, use_backend
from tests.unit.test_kernels_attend import CONTEXT, KINDS, Step
from tests.unit.test_kernels_blocks import a_norm, normal, pack, pack_up

N_LAYERS = 3
HEADS, KV_HEADS, SIZE = 4, 2, 16
HIDDEN, INNER = 48, 80
CACHES = {"float": torch.float32, "int8": torch.float16}


@pytest.fixture(autouse=True)
def _compiled():
    require(native.build.library() is not None)
    if not native.int8_linear.serves():
        pytest.skip("this processor has no VNNI")


def a_layer(precision, *, feed_forward="plain", head_norms=False):
    return LayerWeights(
        attention_norm=a_norm(HIDDEN, layer_norm=True),
        qkv=pack((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, precision),
        query_norm=a_norm(SIZE, layer_norm=False) if head_norms else None,
        key_norm=a_norm(SIZE, layer_norm=False) if head_norms else None,
        attention_out=pack(HIDDEN, HEADS * SIZE, precision, seed=6),
        attention_post_norm=None,
        mlp_norm=a_norm(HIDDEN, layer_norm=False),
        up=pack_up(feed_forward, INNER, HIDDEN, precision),
        down=pack(HIDDEN, INNER, precision, seed=8),
        mlp_post_norm=None,
    )


class Run:
    """A step of SEQUENCES that is taken through the layers, each with a cache of its own."""

    def __init__(self, layers, precision, kinds, *, pairs=0):
        self.layers, self.precision = layers, precision
        step = Step(kinds, (HEADS, KV_HEADS, SIZE), pairs=pairs)
        written, self.rows, self.rotation = step.write(), step.rows(), step.rotation
        cached = [
            torch.stack([x * (1 + i) for i in range(N_LAYERS)]).to(CACHES[precision])
            for x in (written.keys, written.values)
        ]
        self.cache = CacheWrite(*cached, written.blocks, written.offsets)
        self.residual = normal(step.qkv.shape[0], HIDDEN, seed=11)

    def at_once(self, count=N_LAYERS):
        """Whether the first layers are run in one call."""
        return kernels.run_layers(
            self.layers, count, self.residual, self.rotation, self.cache, self.rows
        )

    def one_by_one(self, count):
        for index, layer in enumerate(self.layers.weights[:count]):
            norms = None
            if layer.query_norm is not None:
                norms = HeadNorms(
                    layer.query_norm.weight, layer.key_norm.weight, layer.query_norm.epsilon
                )
            own = replace(self.cache, keys=self.cache.keys[index], values=self.cache.values[index])
            qkv = kernels.normed_linear(
                self.residual, None, layer.attention_norm, layer.qkv, own.keys.dtype
            )
            heads = qkv.view(qkv.shape[0], -1, SIZE)
            scale = self.layers.scales[index]
            x = kernels.attend(heads, norms, self.rotation, own, self.rows, scale).flatten(1)
            kernels.linear_onto(self.residual, x, layer.attention_out)
            kernels.feed_forward_onto(
                self.residual,
                None,
                layer.mlp_norm,
                layer.up,
                layer.down,
                self.layers.activation,
                torch.float32,
            )


def layers_of(precision, activation="gelu_tanh", **kind):
    weights = tuple(a_layer(precision, **kind) for _ in range(N_LAYERS))
    return Layers(weights, (0.25, 0.2, 0.5), activation)


@pytest.mark.parametrize("precision", CACHES)
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


def test_rows_above_those_computed_at_once():
    """Products take many rows in turn, attention all of them."""
    layers, n = layers_of("int8"), 1100
    blocks = torch.arange(n) // 32
    tables = [tuple(range(n // 32 + 1))]
    rows = kernels.StepRows(
        kernels.ChunkLayout.build([kernels.Chunk(tables[0], 0, n)], 32), None, None
    )
    runs = [Run(layers, "int8", ("prompt",)) for _ in range(2)]
    for run in runs:
        cache = torch.zeros(N_LAYERS, len(tables[0]), KV_HEADS, 32, SIZE, dtype=torch.float16)
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


def test_what_the_kernels_do_not_take_is_left_alone(monkeypatch):
    plain = layers_of("float")
    norm = a_norm(HIDDEN, layer_norm=False)
    mixed = replace(plain.weights[1], down=pack(HIDDEN, INNER, "int8"))
    refused = [
        replace(plain, weights=(*plain.weights[:2], replace(plain.weights[2], **change)))
        for change in ({"mlp_post_norm": norm}, {"attention_post_norm": norm})
    ]
    refused.append(replace(plain, weights=(plain.weights[0], mixed, plain.weights[2])))
    other = Run(layers_of("int8"), "float", KINDS[-1]).layers.weights
    refused.append(replace(plain, weights=(plain.weights[0], *other[1:])))
    for layers in refused:
        run = Run(layers, "float", KINDS[-1])
        before = run.residual.clone()
        assert not run.at_once()
        assert torch.equal(run.residual, before)
    assert not Run(plain, "float", KINDS[-1]).at_once(0)
    use_backend("torch", monkeypatch)
    assert not Run(plain, "float", KINDS[-1]).at_once()
