"""The whole journey: `nightjar run` on a file, start-up, queue and database included."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nightjar
from nightjar.checkpoints import CheckpointError, ModelDirectory

from .protocol import Generated, Generation, Ranking, UnsupportedError, serve


class NightjarRun:
    """Every call is a run of its own, from an empty work directory to the output file."""

    def __init__(self) -> None:
        self.versions = {"nightjar": nightjar.__version__}
        self.settings = "`nightjar run` with its defaults; its start-up is part of the time"

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        try:
            ModelDirectory.open(model)
        except CheckpointError as error:
            raise UnsupportedError(str(error)) from error
        self._model, self._precision = model.resolve(), precision

    def reset(self) -> None:
        """Every call starts its own processes."""

    def generate(self, requests: list[Generation]) -> list[Generated]:
        bodies = [
            {
                "prompt": request.token_ids,
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "stop": request.stop,
            }
            for request in requests
        ]
        answers = self._run("/v1/completions", bodies)
        return [
            Generated(answer["choices"][0]["text"], answer["usage"]["completion_tokens"])
            for answer in answers
        ]

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        bodies = [
            {"query": ranking.query_text, "documents": ranking.document_texts}
            for ranking in rankings
        ]
        found = []
        for answer in self._run("/v1/rerank", bodies):
            scores = {result["index"]: result["mean_nll"] for result in answer["results"]}
            found.append([scores[place] for place in range(len(scores))])
        return found

    def _run(self, url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer bodies in the order of the request bodies."""
        with tempfile.TemporaryDirectory() as work:
            source, out = Path(work) / "in.jsonl", Path(work) / "out.jsonl"
            with source.open("w", encoding="utf-8") as file:
                for number, body in enumerate(bodies):
                    record = {"custom_id": str(number), "method": "POST", "url": url, "body": body}
                    file.write(json.dumps(record) + "\n")
            command = [sys.executable, "-m", "nightjar", "run", source, "--model", self._model]
            command += ["--out", out, "--dtype", self._precision]
            done = subprocess.run(
                [str(word) for word in command], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise RuntimeError(f"nightjar run ended with {done.returncode}: {done.stderr}")
            lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        answers = {record["custom_id"]: record["response"]["body"] for record in lines}
        return [answers[str(number)] for number in range(len(bodies))]


if __name__ == "__main__":
    serve(NightjarRun())
