"""Rotary embeddings as config.json describes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nightjar.checkpoints.config_fields import MAX_POSITIONS, ConfigFields

KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn")}
DEFAULT_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides every frequency by factor (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: stretches wavelengths above original_context / low_frequency by factor.

    Wavelengths below original_context / high_frequency are kept, those between are blended.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071).

    Channels that rotate more than beta_fast times in original_context are kept.  Channels below
    beta_slow rotations are stretched by factor, and those between are blended.  Cosines and sines
    are multiplied by attention_factor.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotation of the first `dims` channels of each head.

    Channel i rotates with channel i + dims / 2 by position * base ** (-2 i / dims), before scaling.
    """

    base: float
    dims: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


def read_rope(
    config: ConfigFields, head_size: int, positions: int, base_key: str, fraction: float = 1.0
) -> RopeConfig:
    """Read the keys under `rope_parameters` (transformers 5) or `rope_scaling` and `base_key`.

    fraction: share of a head's channels that rotate, unless `rope_parameters` gives it.
    """
    rope = config.inner("rope_parameters") or config.inner("rope_scaling")
    base = config.number(base_key, DEFAULT_BASE, 1)
    if rope is None:
        return RopeConfig(base, _dims(config, head_size, fraction))
    base = rope.number("rope_theta", base, 1)
    fraction = rope.number("partial_rotary_factor", fraction, 0, 1)
    key = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.word(key, "default", KINDS)
    # Dynamic NTK changes only frequencies of sequences longer than max_position_embeddings,
    # where the context ends here: within the context it is the plain rotation.
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(rope.number("factor", None, 0))
    elif kind == "llama3":
        scaling = _llama3(config, rope, positions)
    elif kind == "yarn":
        scaling = _yarn(config, rope, positions)
    return RopeConfig(base, _dims(config, head_size, fraction), scaling)


def scaled_context(rope: RopeConfig, positions: int) -> int:
    """Return the positions that the model reaches.

    A file may switch YaRN on and still hold the max_position_embeddings of the training.
    """
    if isinstance(rope.scaling, YarnScaling):
        return max(positions, int(rope.scaling.factor * rope.scaling.original_context))
    return positions


def _dims(config: ConfigFields, head_size: int, fraction: float) -> int:
    """Return how many channels of a head rotate: an even number, because they rotate in pairs."""
    dims = int(head_size * fraction)
    if dims < 2 or dims % 2:
        raise config.error(
            f"{dims} of the {head_size} channels of a head would be rotated: expected an even "
            "number, 2 or more"
        )
    return dims


def _original_context(config: ConfigFields, rope: ConfigFields, positions: int) -> int:
    """Return the context before scaling; as in transformers, the key outside the object wins."""
    key = "original_max_position_embeddings"
    outside = config.optional_size(key, MAX_POSITIONS)
    return outside or rope.optional_size(key, MAX_POSITIONS) or positions


def _llama3(config: ConfigFields, rope: ConfigFields, positions: int) -> Llama3Scaling:
    low = rope.number("low_freq_factor", None, 0)
    high = rope.number("high_freq_factor", None, 0)
    if high <= low:
        raise rope.error(
            f"{rope.prefix}high_freq_factor is {high}: expected more than low_freq_factor, {low}"
        )
    factor = rope.number("factor", None, 0)
    return Llama3Scaling(factor, low, high, _original_context(config, rope, positions))


def _yarn(config: ConfigFields, rope: ConfigFields, positions: int) -> YarnScaling:
    original = _original_context(config, rope, positions)
    factor = rope.number("factor", positions / original, 0)
    if factor * original > MAX_POSITIONS:
        raise rope.error(
            f"{rope.prefix}factor is {factor:g}, over {original} positions: expected a context of "
            f"at most {MAX_POSITIONS}"
        )
    if rope.values.get("attention_factor") is not None:
        attention = rope.number("attention_factor", None, 0)
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        mscale = rope.number("mscale", None, 0), rope.number("mscale_all_dim", None, 0)
        attention = _mscale(factor, mscale[0]) / _mscale(factor, mscale[1])
    else:
        attention = _mscale(factor, 1.0)
    return YarnScaling(
        factor,
        rope.number("beta_fast", 32.0, 0),
        rope.number("beta_slow", 1.0, 0),
        original,
        attention,
        rope.flag("truncate", True),
    )


def _mscale(factor: float, mscale: float) -> float:
    """Return YaRN's temperature of the attention scores, as a factor on cosines and sines."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
