"""The client of a night: it uploads files, each of them a job."""

import time
from itertools import islice
from pathlib import Path

from benchmarks.control_plane.requests import batch_line, body, prompts
from nightjar.pipeline.client.blocking import Client, Job

AHEAD = 3
"""Jobs that are uploaded and not over."""

LOOK_EVERY_S = 2.0


def upload(url: str, folder: str, model: str, rows: int, each: int) -> None:
    """In a process: upload file after file, no more than AHEAD jobs before those that are over."""
    texts, path = prompts(Path(model), rows), Path(folder, "upload.jsonl")
    open_jobs: list[Job] = []
    with Client(url) as client:
        for start in range(0, rows, each):
            with path.open("w", encoding="utf-8") as stream:
                for number, text in enumerate(islice(texts, min(each, rows - start)), start):
                    stream.write(batch_line(f"row-{number}", "/v1/completions", body(text)))
            while len(open_jobs) >= AHEAD:
                time.sleep(LOOK_EVERY_S)
                open_jobs = [job for job in open_jobs if not job.status().is_over]
            open_jobs.append(client.submit(path))
    path.unlink()
