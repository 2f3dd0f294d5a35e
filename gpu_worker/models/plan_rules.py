"""What a precision plan means for the weights that are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nightjar.checkpoints import ModelConfig, ModelDirectory
from nightjar.checkpoints.adapters import not_computed
from nightjar.checkpoints.precision_plan import PrecisionPlan
from nightjar.kernels import Wide

WIDE_RESULTS = Wide(results=True)
NO_PLAN = PrecisionPlan("")


def stored_plan(directory: ModelDirectory, dtype: str) -> PrecisionPlan:
    """Return the model's plan if it concerns this precision, else an empty one.

    Raises:
        CheckpointError: The plan cannot be used.
    """
    if dtype not in ("fp16", "int8"):
        return NO_PLAN
    plan = directory.plan()
    return plan if plan is not None and plan.concerns(dtype) else NO_PLAN


def planned_precision(directory: ModelDirectory, dtype: str) -> str:
    """Return how results name the precision: with the plan, where one concerns it."""
    return stored_plan(directory, dtype).precision(dtype)


@dataclass(frozen=True, slots=True)
class PlanRules:
    """A plan in the loader's terms, for one precision.

    Heads that are divided by powers of two give the same attention: its scale takes those of
    queries and keys, and the output projection's weight takes that of the values.
    """

    plan: PrecisionPlan
    dtype: str

    def query_key_value(self, number: int) -> Wide:
        """What stays in FP32 of the first product."""
        return Wide(rows=self.plan.layer(number, self.dtype).attention_input)

    def up(self, number: int) -> Wide:
        """What stays in FP32 of the feed-forward block's first product."""
        layer = self.plan.layer(number, self.dtype)
        return Wide(rows=layer.mlp_input, results=layer.up)

    def is_exact(self, number: int) -> bool:
        """Whether the feed-forward block is computed in FP32."""
        return self.plan.is_exact(number, self.dtype)

    def head_factors(self, number: int) -> tuple[float, float, float]:
        """The factors of queries, keys and values."""
        layer = self.plan.layer(number, self.dtype)
        return 2.0**-layer.query, 2.0**-layer.key, 2.0**-layer.value

    def attention_out_factor(self, number: int) -> float:
        """The factor of the output projection's weight."""
        return 2.0 ** self.plan.layer(number, self.dtype).value

    @property
    def no_adapters(self) -> str | None:
        """Why LoRA adapters are refused; None where they are not."""
        return not_computed(self.plan, self.dtype, 1)

    def scaled(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the scales of attention that the heads' factors ask for."""
        if config.qk_norm:  # the norms of queries and keys take their factors away
            return config
        scales = tuple(
            scale * 2.0 ** (layer.query + layer.key)
            for number, scale in enumerate(config.attention_scales)
            for layer in [self.plan.layer(number, self.dtype)]
        )
        return replace(config, attention_scales=scales)
