"""The store: every SQL statement of Nightjar, in parts by subject.

Each part is a class in a file of its own. `Store` opens the database once and holds the parts; a
process or a function takes the parts that it uses. A store is safe to share between threads; each
process opens its own.
"""

import sqlalchemy as sa

from nightjar.jobs.store.accounts import Accounts
from nightjar.jobs.store.appending import Appending
from nightjar.jobs.store.awaiting import PlannedTo
from nightjar.jobs.store.backlog import Backlog
from nightjar.jobs.store.batch_work import BatchWork
from nightjar.jobs.store.batches import Batches
from nightjar.jobs.store.database import Database, Synchronous
from nightjar.jobs.store.deliveries import Deliveries
from nightjar.jobs.store.deployment_view import DeploymentView
from nightjar.jobs.store.depths import Waiting
from nightjar.jobs.store.failures import Failures
from nightjar.jobs.store.file_sweeping import FileSweeping
from nightjar.jobs.store.files import Files
from nightjar.jobs.store.heartbeats import Heartbeats
from nightjar.jobs.store.job_figures import JobFigures
from nightjar.jobs.store.job_listing import JobListing
from nightjar.jobs.store.jobs import Jobs
from nightjar.jobs.store.leading import Leaders
from nightjar.jobs.store.leases import Leases
from nightjar.jobs.store.live import LiveCalls
from nightjar.jobs.store.models import Models
from nightjar.jobs.store.orphans import Orphans
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.partitions import Partitions
from nightjar.jobs.store.planners import Planners
from nightjar.jobs.store.planning import Planning
from nightjar.jobs.store.previews import Previews
from nightjar.jobs.store.purging import Purging
from nightjar.jobs.store.quotas import Quotas
from nightjar.jobs.store.replanning import Replanning
from nightjar.jobs.store.reports import Reports
from nightjar.jobs.store.result_cache import AnswerCache
from nightjar.jobs.store.results import Results
from nightjar.jobs.store.retention import Retention
from nightjar.jobs.store.retrying import Retries
from nightjar.jobs.store.schedule_runs import ScheduleRuns
from nightjar.jobs.store.schedule_work import ScheduleWork
from nightjar.jobs.store.schedules import Schedules
from nightjar.jobs.store.segmented import UnfinishedUploads
from nightjar.jobs.store.sessions import Sessions
from nightjar.jobs.store.shares import Shares
from nightjar.jobs.store.stopping import Stopping
from nightjar.jobs.store.suspects import Suspects
from nightjar.jobs.store.tables import job
from nightjar.jobs.store.task_runners import TaskRunners
from nightjar.jobs.store.traces import Traces
from nightjar.jobs.store.vectors import Vectors
from nightjar.jobs.store.webhooks import Webhooks


class Store:
    """Jobs, requests, micro-batches and results in SQLite or PostgreSQL.

    Attributes:
        database: The connections that the parts share.
        accounts: Tenants and the keys of the API.
        quotas: What tenants may still use.
        jobs: Submits jobs and reads them.
        appending: Open jobs: makes them, appends rows, seals them.
        live: Single calls: submits them, finds those that have ended, purges old ones.
        backlog: Requests that wait to be planned.
        planned_to: Finds rows that wait and were passed over.
        planning: Stores plans; micro-batches to dispatch.
        planners: Which planners live, and the rows that each plans now.
        replanning: Takes plans for another model apart.
        leases: Claims, finishes and gives back micro-batches.
        suspects: Requests that were in flight at a crash.
        heartbeats: Signs of life of workers.
        leaders: Which of several planners leads.
        shares: Charges tenants for what was computed.
        models: Which models there are, and who serves them.
        depths: How much waits in the whole deployment.
        traces: Which traces jobs belong to.
        stopping: Cancels, expires, pauses and resumes jobs.
        retries: Queues failed requests again.
        orphans: Followers whose leader has ended without them.
        uploads: Uploads that land in segments.
        results: Reads landed results.
        reports: Makes reports of jobs.
        vectors: Prompt vectors.
        cache: Answers and scores that later jobs may reuse.
        batches: Makes batches, reads and cancels them.
        batch_work: Takes batches from stage to stage.
        partitions: Makes the partitions of PostgreSQL ahead, and drops old ones.
        purging: Deletes the rows of jobs that are marked as purged.
        retention: Which jobs are purged, and when.
        files: Uploaded files, and files that show results.
        file_sweeping: Frees files that were deleted, have expired or were abandoned.
        webhooks: Where tenants want events to be sent.
        deliveries: Events on their way to webhooks.
        listing: Pages of jobs for people.
        figures: Stages, speed and lengths of a job for people.
        previews: What a few rows were asked for, for people.
        failures: Why rows of a job failed, for people.
        deployment: Workers and queues for people.
        sessions: Browsers that have signed in.
        schedules: What runs when, and who changed it.
        schedule_runs: Planned times that have come, and their history.
        schedule_work: Steps of runs that processes take.
        task_runners: Signs of life of these processes.
    """

    def __init__(
        self,
        url: str,
        *,
        synchronous: Synchronous = "full",
        connections: int | None = None,
        direct_url: str | None = None,
        packs_answers: bool = True,
    ) -> None:
        """Open `sqlite:///FILE` or `postgresql://USER@HOST/NAME`; connects at the first use.

        `synchronous` is SQLite's: "normal" is faster, and a power cut may undo the last commits.
        `connections` is the most that are open to PostgreSQL at a time, and `direct_url` leads past
        a pooler, as `Database` has them. `packs_answers` as `AnswerPacks` has it.
        Raises UnusableDatabaseError.
        """
        self.database = database = Database(
            url, synchronous=synchronous, connections=connections, direct_url=direct_url
        )
        outcomes = Outcomes(database, packs_answers=packs_answers)
        self.accounts = Accounts(database)
        self.quotas = Quotas(database)
        self.jobs = Jobs(database, self.quotas)
        self.appending = Appending(database, outcomes, self.quotas)
        self.live = LiveCalls(database, self.quotas)
        self.backlog = Backlog(database, outcomes)
        self.planned_to = PlannedTo(database)
        self.planning = Planning(database, outcomes)
        self.planners = Planners(database)
        self.replanning = Replanning(database)
        self.leases = Leases(database, outcomes)
        self.suspects = Suspects(database, outcomes)
        self.heartbeats = Heartbeats(database)
        self.leaders = Leaders(database)
        self.shares = Shares(database)
        self.models = Models(database)
        self.depths = Waiting(database)
        self.traces = Traces(database)
        self.stopping = Stopping(database, outcomes)
        self.retries = Retries(database, outcomes, self.quotas)
        self.orphans = Orphans(database, outcomes)
        self.uploads = UnfinishedUploads(database)
        self.results = Results(database)
        self.reports = Reports(database)
        self.vectors = Vectors(database)
        self.cache = AnswerCache(database)
        self.files = Files(database)
        self.file_sweeping = FileSweeping(database, self.files)
        self.batches = Batches(database, self.files)
        self.batch_work = BatchWork(database, self.files)
        self.partitions = Partitions(database)
        self.purging = Purging(database, self.partitions)
        self.retention = Retention(database, self.purging)
        self.webhooks = Webhooks(database)
        self.deliveries = Deliveries(database)
        self.listing = JobListing(database)
        self.figures = JobFigures(database)
        self.previews = Previews(database)
        self.failures = Failures(database)
        self.deployment = DeploymentView(database)
        self.sessions = Sessions(database)
        self.schedules = Schedules(database, self.stopping)
        self.schedule_runs = ScheduleRuns(database)
        self.schedule_work = ScheduleWork(database)
        self.task_runners = TaskRunners(database)

    def migrate(self) -> None:
        """Bring the tables to the newest revision; several processes may do so at once."""
        from nightjar.jobs.store.schema import migrate  # Alembic: few processes need it

        migrate(self.database.session_url)

    def ping(self) -> None:
        """Raise StoreError unless the database answers and has Nightjar's tables."""
        with self.database.reading(probe=True) as connection:
            connection.execute(sa.select(job.c.id).limit(1)).all()

    def close(self) -> None:
        """Close every connection; the store and its parts must not be used afterwards."""
        self.database.close()
