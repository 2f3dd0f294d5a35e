"""What the compute processes of one launcher have spent and counted, one after the other."""

from dataclasses import replace

from nightjar.gpu_worker.compute.messages import Ready, Statistics, Stepped
from nightjar.gpu_worker.engine.statistics import EngineCounters, EngineGauges, EngineStatistics
from nightjar.jobs.workers import ComputeSeconds


class Totals:
    """Sums over all processes of a launcher, as far as they have reported.

    Written by the launcher's reading thread. Other threads read whole records.

    seconds: What the processes have spent.
    statistics: What their engines have counted. The gauges are those of the process that runs.
    ended: How many processes have ended.
    """

    def __init__(self) -> None:
        self.seconds = ComputeSeconds()
        self.statistics = EngineStatistics()
        self.ended = 0
        self._earlier_engine_s = 0.0
        self._earlier = EngineCounters()

    def note(self, message: Ready | Stepped | Statistics) -> None:
        """Take in what a process reports of itself."""
        match message:
            case Ready():
                load_s = self.seconds.load_s + message.load_s
                self.seconds = replace(self.seconds, load_s=load_s)
            case Stepped():
                engine_s = self._earlier_engine_s + message.busy_s
                self.seconds = replace(self.seconds, engine_s=engine_s)
            case Statistics(statistics=told):
                counters = self._earlier.plus(told.counters)
                self.statistics = EngineStatistics(counters, told.gauges)

    def process_ended(self) -> None:
        """Begin with the numbers of the next process."""
        self.ended += 1
        self._earlier_engine_s = self.seconds.engine_s
        self._earlier = self.statistics.counters
        self.statistics = EngineStatistics(self._earlier, EngineGauges())
