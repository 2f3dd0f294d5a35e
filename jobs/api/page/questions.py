"""The question before an act, and the token that its answer must carry."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.page import cookies
from nightjar.jobs.api.page.actions import Action
from nightjar.jobs.api.page.rendering import page
from nightjar.jobs.api.page.views import JobView
from nightjar.jobs.api.page.wording import number


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked before an act.

    Attributes:
        title: The question in a line.
        name: Of the job or the schedule.
        text: What the act does.
        button: The words of the button that does it.
        thing: Path of the job or the schedule; the form is sent to a path below it.
        action: The last part of that path.
        hint: What else helps to decide.
        is_final: Whether the act cannot be undone.
    """

    title: str
    name: str
    text: str
    button: str
    thing: str
    action: str
    hint: str = ""
    is_final: bool = False


def about_job(view: JobView, action: str, asked: Action) -> Question:
    """The question before an act on a job."""
    job = view.job
    hint = f"{number(job.ended)} of {number(job.total)} rows have their outcome"
    failed = f", {number(job.failed)} of them failed" if job.failed else ""
    return Question(
        title=f"{asked.verb} this job?",
        name=job.id,
        text=asked.question,
        button=f"{asked.verb} job" if asked.is_final else asked.verb,
        thing=f"{cookies.PLACE}/jobs/{job.id}",
        action=action,
        hint=f"{hint}{failed}.",
        is_final=asked.is_final,
    )


def ask(request: Request, question: Question) -> Response:
    """The question as part of a page, or as a page of its own where no script has asked."""
    is_part = request.headers.get("hx-request")
    return page(request, "_confirm.html" if is_part else "confirm.html", question=question)


def check_form(request: Request, token: str) -> None:
    """Raise RefusedRequestError for a form that does not come from a page of this browser."""
    if not cookies.is_form_token(token, cookies.token_of(request)):
        raise RefusedRequestError(
            403,
            "foreign_form",
            "this form is too old, or of another page; nothing was changed. Load the page again",
        )
