"""Metrics of a GPU worker's engines, read from what its compute processes have reported."""

from collections.abc import Sequence

from nightjar.gpu_worker.worker.served import ServedModel
from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.recording import Readings


def engine_readings(models: Sequence[ServedModel]) -> Readings:
    """Return the numbers of every model. The compute processes report them once a second."""
    told = [(model.name, model.launcher.totals) for model in models]
    yield declared.COMPUTE_ENDS, [((name,), totals.ended) for name, totals in told]
    yield declared.ENGINE_SECONDS, [((name,), totals.seconds.engine_s) for name, totals in told]
    yield declared.LOAD_SECONDS, [((name,), totals.seconds.load_s) for name, totals in told]
    engines = [(name, totals.statistics) for name, totals in told]
    yield (
        declared.PHASE_SECONDS,
        [((n, phase), s) for n, one in engines for phase, s in one.counters.phase_s.items()],
    )
    yield (
        declared.STEPS,
        [((n, content), s) for n, one in engines for content, s in one.counters.steps.items()],
    )
    for field, metric in declared.ENGINE_COUNTERS.items():
        yield metric, [((name,), getattr(one.counters, field)) for name, one in engines]
    for field, metric in declared.ENGINE_GAUGES.items():
        yield metric, [((name,), getattr(one.gauges, field)) for name, one in engines]
    blocks = []
    for name, one in engines:
        now = one.gauges
        free = now.blocks - now.held_blocks - now.resting_blocks
        states = {"held": now.held_blocks, "cached": now.resting_blocks, "free": free}
        blocks += [((name, state), float(count)) for state, count in states.items()]
    yield declared.KV_BLOCKS, blocks
