"""Tenants reach only what is theirs: checked for every route at once, by the names in its path.

A route whose path holds `{job_id}` is reached only with a job of the caller's tenant. For any other
job the answer is that of a job that does not exist. So a route that forgets to ask gives nothing
away.
"""

from collections import OrderedDict

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from nightjar.jobs.api.caller import caller_of
from nightjar.jobs.api.results import checked_id
from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.store.jobs import Jobs

MOST_KEPT = 10_000


class Ownership:
    """A FastAPI dependency of the whole application.

    Whose a job is never changes, so that the owner is kept, and polls of a job cost no look-up.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._owners: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, request: Request) -> None:
        """Raise UnknownJobError for a job of another tenant, and for none."""
        given = request.path_params.get("job_id")
        if given is None:
            return
        job_id = checked_id(str(given))
        owner = self._owners.get(job_id)
        if owner is None:
            owner = await run_in_threadpool(self._jobs.tenant_of, job_id)
            if owner is not None:
                self._keep(job_id, owner)
        if owner != caller_of(request).tenant:
            raise UnknownJobError(job_id)

    def _keep(self, job_id: str, owner: str) -> None:
        self._owners[job_id] = owner
        while len(self._owners) > MOST_KEPT:
            self._owners.popitem(last=False)
