"""What a user may say beside the requests: how they are made, and what the job is to be."""

import secrets
from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class SubmitOptions(TypedDict, total=False):
    """The options of `submit`; None is the same as leaving one out.

    template: A prompt with columns in braces, such as `"Review: {review}\\nStars:"`. Each row of a
        frame, or each dictionary, becomes a prompt to continue.
    id_column: The column whose value is the row's custom_id.
    fields: Request fields of every row that does not name them itself, such as `max_tokens`.
    model: The job's model; by default the one that the rows name, or the only one.
    wait_for_model: An unknown model is no error: the job waits until it is served.
    priority: 0 to 9; each step is worth an hour of waiting.
    completion_window: Such as "24h"; requests not computed by then expire.
    keep_results: Such as "7d"; its requests and results are purged so long after its end.
    metadata: Texts that are kept with the job.
    idempotency_key: The same key with the same rows gives the same job, also in another process.
        By default each `submit` has a key of its own.
    """

    template: str | None
    id_column: str | None
    fields: Mapping[str, Any] | None
    model: str | None
    wait_for_model: bool
    priority: int
    completion_window: str | None
    keep_results: str | None
    metadata: Mapping[str, str] | None
    idempotency_key: str | None


class ScheduleOptions(TypedDict, total=False):
    """What a schedule says.

    cron: Five fields, as in a crontab, such as "0 2 * * *".
    time_zone: Whose clock these times are on, such as "Asia/Seoul"; UTC by default.
    task: A task file in the tenant's folder of the deployment, such as "nightly/rank.toml".
    file, endpoint, model: In place of a task: the id of an uploaded file, which becomes a batch.
    when_still_running: "skip", "queue" or "cancel".
    catch_up: Whether it runs once when planned times were missed.
    jitter: Begin up to so much later, such as "15m".
    deadline: A run without an end so long after its time fails, such as "6h".
    priority: 0 to 9, of its jobs.
    keep_results: Such as "7d"; requests and results of its jobs are purged so long after their end.
    """

    cron: str
    time_zone: str
    task: str | None
    file: str | None
    endpoint: str | None
    model: str | None
    when_still_running: Literal["skip", "queue", "cancel"]
    catch_up: bool
    jitter: str
    deadline: str
    priority: int
    keep_results: str | None


def check_options(options: SubmitOptions) -> None:
    """Raise TypeError for an option that does not exist."""
    for name in options:
        if name not in SubmitOptions.__annotations__:
            known = ", ".join(SubmitOptions.__annotations__)
            raise TypeError(f"submit has no option {name!r}; it has {known}")


def idempotency_key() -> str:
    """Return a key that nobody has used."""
    return f"client-{secrets.token_hex(16)}"
