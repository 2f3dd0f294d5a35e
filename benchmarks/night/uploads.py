"""The client of a night: it uploads files, each of them a job."""

import time
from pathlib import Path

from benchmarks.control_plane.requests import batch_line, body
from benchmarks.drawn_texts import drawn_texts
from nightjar.pipeline.client.blocking import Client, Job

AHEAD = 3
"""Jobs that are uploaded and not over."""

LOOK_EVERY_S = 2.0
CHARACTERS = 75
"""Of a prompt: about 100 tokens."""

DISTINCT = 50_000
"""Texts, which are told apart by their numbers: no two rows of a pack have the same."""


def upload(url: str, folder: str, rows: int, each: int) -> None:
    """In a process: upload file after file, no more than AHEAD jobs before those that are over."""
    drawn = list(drawn_texts(DISTINCT, CHARACTERS))
    path = Path(folder, "upload.jsonl")
    open_jobs: list[Job] = []
    with Client(url) as client:
        for start in range(0, rows, each):
            with path.open("w", encoding="utf-8") as stream:
                for number in range(start, min(start + each, rows)):
                    text = f"{number:08d} {drawn[number % DISTINCT]}"
                    stream.write(batch_line(f"row-{number}", "/v1/completions", body(text)))
            while len(open_jobs) >= AHEAD:
                time.sleep(LOOK_EVERY_S)
                open_jobs = [job for job in open_jobs if not job.status().is_over]
            open_jobs.append(client.submit(path))
    path.unlink()
