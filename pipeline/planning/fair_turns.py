"""Whose job is planned next, where several tenants have jobs to plan.

Start-time fair queueing over planned tokens. Each tenant has a virtual time: the tokens planned for
it, divided by its weight. The smallest goes first, and no tenant saves turns up while it has
nothing to plan. The planner remembers this in memory alone: after a restart all tenants begin
equal, which is unfair by one chunk at most.
"""

from collections.abc import Sequence

from nightjar.jobs.records import JobToPlan


class FairTurns:
    """The tenants' virtual times in planning."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._times: dict[str, float] = {}  # of those beyond the clock

    def in_turn(self, waiting: Sequence[JobToPlan]) -> list[JobToPlan]:
        """The jobs, one of each tenant, in the order of their turns; of equal ones as given."""
        return sorted(waiting, key=self._begins)

    def charge(self, planned: JobToPlan, tokens: int) -> None:
        """Move the job's tenant forward by the tokens that were planned."""
        begins = self._begins(planned)
        self._clock = max(self._clock, begins)
        self._times[planned.tenant] = begins + tokens / planned.weight
        self._times = {name: at for name, at in self._times.items() if at > self._clock}

    def _begins(self, item: JobToPlan) -> float:
        return max(self._clock, self._times.get(item.tenant, 0.0))
