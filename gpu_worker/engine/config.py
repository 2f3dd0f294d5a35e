"""The engine's settings."""

from dataclasses import dataclass

from nightjar.compute_config import CPU_CACHE_BYTES, ComputeConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine.

    max_running: sequences that decode together.
    urgent_running: sequences of urgent requests that decode beside those.
    max_step_tokens: packed rows of one step.  Only a low limit is exceeded: a document of up to
    512 tokens is computed in one piece.  One that does not fit beside the running sequences gets a
    step without prompts and other documents.
    block_size: tokens of one cache block.  Attention is summed block by block, so two engines agree
    to the last bit only with equal block sizes.
    window_steps: decode steps that a GPU takes without the host; 1: the host reads every step.
    cuda_graphs: launch those steps, and steps with prompts, as CUDA graphs.
    kv_cache_bytes: memory for keys and values; never exceeded.
    fp8_cache: keep keys and values in FP8, in about half of FP16's memory.
    host_cache_bytes: host memory for keys and values that the cache has no room for; pinned where
    there is a GPU; never exceeded, 0 for none.
    banned_token_ids: ids that are never sampled.
    eos_token_ids: ids that end a sequence; None takes the model's own.
    """

    max_running: int = 128
    urgent_running: int = 8
    max_step_tokens: int = 2048
    block_size: int = 32
    kv_cache_bytes: int = CPU_CACHE_BYTES
    fp8_cache: bool = False
    host_cache_bytes: int = ComputeConfig.host_cache_bytes
    banned_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    window_steps: int = ComputeConfig.window_steps
    cuda_graphs: bool = ComputeConfig.cuda_graphs

    @property
    def slots(self) -> int:
        """Sequences that may run at once: each of them has a row in every step."""
        return min(self.max_running, self.max_step_tokens)

    @property
    def urgent_slots(self) -> int:
        """Slots beside those, for urgent requests alone."""
        return min(self.urgent_running, self.max_step_tokens - self.slots)
