"""LoRA adapters (arXiv 2106.09685) of a model: their factors, packed for its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from nightjar.checkpoints import ModelConfig
from nightjar.checkpoints.adapters import adapted_shapes
from nightjar.kernels import AdapterProducts, LowRank, Place

_PLACES = {"attention_out": Place.ATTENTION_OUT, "gate": Place.UP, "down": Place.DOWN}


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """One adapter on the model's device.

    products: by layer of the model.
    salt: 120 bits of a hash of the factors, never 0. Equal adapters share cached prefixes.
    """

    products: AdapterProducts
    salt: int

    @staticmethod
    def of(factors: Mapping[str, Tensor], config: ModelConfig, device: str) -> LoraAdapter:
        """Copy factors, named as `checkpoints.adapters` does; they must fit the model."""
        layers: list[dict[Place, tuple[LowRank, ...]]] = [{} for _ in range(config.n_layers)]
        digest = blake2b(digest_size=15)
        for name in sorted(factors):
            digest.update(f"{name}{list(factors[name].shape)}".encode())
            digest.update(factors[name].float().contiguous().numpy().tobytes())
            root, _, side = name.rpartition(".")
            if side != "down":
                continue
            layer, _, projection = root.partition(".")
            place, begin = _place(projection, config)
            down, up = (factors[f"{root}.{one}"].to(device) for one in ("down", "up"))
            gated = projection == "up" and "gate" in adapted_shapes(config)
            products = layers[int(layer)]
            found = LowRank.of(down, up, begin, gated=gated)
            products[place] = (*products.get(place, ()), found)
        every = tuple(tuple(one.get(place, ()) for place in Place) for one in layers)
        salt = int.from_bytes(digest.digest(), "little") or 1
        return LoraAdapter(AdapterProducts(every), salt)


def _place(projection: str, config: ModelConfig) -> tuple[Place, int]:
    """Return the decoder's projection that holds this one, and its first output there."""
    queries = config.n_heads * config.head_size
    keys = config.n_kv_heads * config.head_size
    begins = {"query_key_value": 0, "query": 0, "key": queries, "value": queries + keys}
    if projection in begins:
        return Place.QUERY_KEY_VALUE, begins[projection]
    return _PLACES.get(projection, Place.UP), 0
