"""Trains the demo model: a small Korean GPT that chats, ranks dishes and judges film reviews.

    python examples/train_demo_model.py --data DIR --out DIR [--minutes 80] [--device auto]

DIR of the data holds `chatbot/train.csv` (columns question, answer) and `nsmc/train.tsv`
(columns rating, review).  The result is a directory in the Hugging Face layout (GPT-2), with
its tokenizer and `metrics.json`.  A run that died goes on from `--checkpoint-dir` when started
again.  Three kinds of loss are mixed (`demo_training/losses.py`):

- the language model loss, which makes the model write Korean;
- a ranking loss, which computes what a rerank endpoint computes (the mean negative
  log-likelihood of each document's tokens after the query) and asks that the right document
  has the lowest.  The query runs once and the documents are branches after it;
- for reviews, the distance to the judgement of a small regression (`demo_training/teacher.py`).
"""

import argparse
import json
import sys
from pathlib import Path

import torch

# Run as a script, Python looks for modules beside this file, not where `examples` lies.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.demo_training.config import Config
from examples.demo_training.data import Turn, load_data
from examples.demo_training.evaluation import SAMPLES, answer, evaluate
from examples.demo_training.export import export, write_json
from examples.demo_training.run import make_run
from examples.demo_training.training import train


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--data", required=True, help="directory of chatbot/ and nsmc/")
    parser.add_argument("--out", required=True, help="directory of the finished model")
    parser.add_argument("--minutes", type=float, default=80.0, help="training time (80)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: as torch does)")
    parser.add_argument("--checkpoint-dir", help="where to save every 10 minutes and resume")
    parser.add_argument("--report-minutes", type=float, default=5.0, help="between reports (5)")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error("--minutes must be above 0")
    return args


def main() -> None:
    """Trains, evaluates and writes the model."""
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    data = load_data(Path(args.data))
    print(
        f"rows to train on: {len(data.chat)} of chat, {len(data.reviews)} reviews;"
        f" kept out: {len(data.chat_heldout)} and {len(data.reviews_heldout)}",
        flush=True,
    )
    run = make_run(args, Config(), data)
    train(run, args.report_minutes * 60)
    out = Path(args.out)
    run.model.finish()
    export(run, out)
    # What is measured is what was written: the weights rounded to float16.
    for weight in run.model.parameters():
        weight.data = weight.data.half().float()
    figures = evaluate(run)
    figures["samples"] = {question: answer(run, Turn(question, "").prompt) for question in SAMPLES}
    write_json(out / "metrics.json", figures)
    print(json.dumps(figures, ensure_ascii=False, indent=2))


if __name__ == "__main__":
    main()
