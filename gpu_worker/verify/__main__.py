"""`nightjar verify` runs this in a process of its own; the command line loads no torch.

It writes the report as one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.verdicts import remember_verdict
from nightjar.gpu_worker.verify.report import Report
from nightjar.gpu_worker.verify.sample_texts import TEXTS
from nightjar.gpu_worker.verify.source_logits import read_source_logits
from nightjar.gpu_worker.verify.verifying import verify

EXIT_UNSOUND = 3
EXIT_UNUSABLE = 1
MAX_TEXTS = 200


def main() -> int:
    """Verify one model; the exit status is 0 for a sound one."""
    parser = argparse.ArgumentParser(prog="nightjar verify")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--precisions", default="bf16,int8")
    parser.add_argument("--logits", type=Path)
    parser.add_argument("--write-plan", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args()
    try:
        texts = TEXTS if given.text is None else _texts(given.text)
        directory = ModelDirectory.open(given.model)
        source = None
        if given.logits is not None:
            source = read_source_logits(given.logits, directory.config)
        report = verify(
            directory,
            texts,
            [word for word in given.precisions.split(",") if word],
            lambda what: print(f"nightjar: {what} ...", file=sys.stderr),  # noqa: T201
            source,
        )
        remember_verdict(directory.fingerprint, report.verdict)
        if given.write_plan:
            _write_plan(directory, report, overwrite=given.overwrite)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"nightjar: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_UNUSABLE
    print(json.dumps(report.as_json()))  # noqa: T201
    return 0 if report.is_sound else EXIT_UNSOUND


def _write_plan(directory: ModelDirectory, report: Report, *, overwrite: bool) -> None:
    """Write the plan beside the weights, and remember the outcome for the model with it."""
    if not (report.plan.concerns("fp16") or report.plan.concerns("int8")):
        print("nightjar: no plan is needed, and none was written", file=sys.stderr)  # noqa: T201
        return
    path = report.plan.write(directory.path, overwrite=overwrite)
    print(f"nightjar: plan: {path}", file=sys.stderr)  # noqa: T201
    remember_verdict(ModelDirectory.open(directory.path).fingerprint, report.verdict)


def _texts(path: Path) -> list[str]:
    """Return the paragraphs of a file."""
    paragraphs = [part.strip() for part in path.read_text(encoding="utf-8").split("\n\n")]
    found = [part for part in paragraphs if part][:MAX_TEXTS]
    if not found:
        raise ValueError(f"{path}: no text; write paragraphs with an empty line between them")
    return found


if __name__ == "__main__":
    sys.exit(main())
