"""Settings of the HTTP API; a part of `Settings`."""

import re
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings

from nightjar.pipeline.settings.read_by import (
    API,
    COMMANDS,
    PLANNER,
    RUN,
    TASK_RUNNER,
    UPLOADS,
    read_by,
)

OF_UPLOADS = read_by(UPLOADS)
OF_CALLS = read_by(API, page="guides/single-calls.md")


class AccessSettings(BaseSettings):
    """Who reaches the API."""

    api_key: Annotated[
        SecretStr | None, read_by(API, UPLOADS, COMMANDS, page="guides/keys-and-tenants.md")
    ] = Field(
        None,
        description="secret of at least 32 characters that opens the API as the tenant `default`, "
        "with all rights; for the client commands, the key that they send",
    )
    trusted_hosts: Annotated[str, read_by(API)] = Field(
        "",
        description="names under which the API is reached, such as `nightjar.example.org`, with "
        "commas between them; `*` for any. Addresses, `localhost` and names without a dot are "
        "trusted",
    )

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr | None) -> SecretStr | None:
        text = None if key is None else key.get_secret_value()
        if text is not None and re.fullmatch(r"[!-~]{32,}", text) is None:
            raise ValueError(
                "must have at least 32 characters, of ASCII and without spaces, as a header "
                "carries it; `openssl rand -hex 24` makes one"
            )
        return key

    @property
    def trusted_host_list(self) -> tuple[str, ...]:
        """The names under which the API is reached."""
        return tuple(filter(None, (name.strip() for name in self.trusted_hosts.split(","))))


class UploadSettings(BaseSettings):
    """Uploads and files."""

    max_upload_bytes: Annotated[int, OF_UPLOADS] = Field(
        1 << 30, ge=1, description="most bytes of an upload"
    )
    upload_stalled_after_s: Annotated[float, OF_UPLOADS] = Field(
        60.0, gt=0, description="an upload that sends nothing for so long is refused"
    )
    upload_least_bytes_per_s: Annotated[float, OF_UPLOADS] = Field(
        4_096.0,
        ge=0,
        description="an upload that comes more slowly is refused; 16 times as much is needed while "
        "other uploads wait",
    )
    upload_deadline_s: Annotated[float, OF_UPLOADS] = Field(
        3_600.0, gt=0, description="an upload that takes longer is refused"
    )
    max_job_rows: Annotated[int, read_by(API, UPLOADS, PLANNER, TASK_RUNNER)] = Field(
        5_000_000, ge=1, description="most rows of a job"
    )
    max_rejected_lines: Annotated[int, read_by(UPLOADS, PLANNER)] = Field(
        10_000, ge=0, description="an upload with more bad lines is refused, and nothing is stored"
    )
    bad_lines_in_a_row: Annotated[int, read_by(RUN, COMMANDS, TASK_RUNNER)] = Field(
        1000, ge=1, description="nothing more is read after so many unusable lines in a row"
    )
    file_lifetime_s: Annotated[float, OF_UPLOADS] = Field(
        30 * 86_400.0,
        gt=0,
        le=100 * 365 * 86_400.0,
        description="an uploaded file is deleted after so long, unless its upload says when",
    )


class LiveSettings(BaseSettings):
    """Single calls."""

    live_calls: Annotated[int, OF_CALLS] = Field(
        256, ge=1, description="most single calls that wait for their answers in one API process"
    )
    live_timeout_s: Annotated[float, OF_CALLS] = Field(
        600.0, gt=0, description="a single call without an answer for so long is cancelled"
    )
    live_keep_s: Annotated[float, read_by(PLANNER, page="guides/single-calls.md")] = Field(
        3_600.0, ge=0, description="single calls are deleted so long after they were made"
    )


class WebhookSettings(BaseSettings):
    """Webhooks."""

    webhook_allow_private: Annotated[
        bool, read_by(API, PLANNER, COMMANDS, page="guides/webhooks.md")
    ] = Field(
        False,
        description="send events also to private and loopback addresses, and by http; only where "
        "every tenant is trusted",
    )
    webhook_timeout_s: Annotated[float, read_by(PLANNER)] = Field(
        10.0,
        gt=0,
        le=60,
        description="a receiver that has not answered after so long is tried again",
    )
    webhook_keep_days: Annotated[float, read_by(PLANNER)] = Field(
        30.0, ge=2, description="deliveries of events that are older are deleted"
    )
