"""How good the finished model is on the rows kept out, and what it says."""

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from examples.demo_training import dishes
from examples.demo_training.data import STOP, VERDICTS
from examples.demo_training.dish_words import (
    SEED_DOCUMENTS,
    SEED_QUERY,
    SEED_SHORT_DOCUMENTS,
    SEED_SHORT_QUERY,
)
from examples.demo_training.run import Run
from examples.demo_training.scoring import chat_recall, dish_accuracy, mean, review_accuracy, scores

SAMPLES = (
    *("안녕", "오늘 너무 피곤해", "뭐 먹지", "남자친구랑 헤어졌어", "너는 취미가 뭐야?"),
    *("심심해", "시험 망했어", "주말에 뭐 할까?", "너 이름이 뭐야?", "고마워"),
    *("한식 추천해줘", "영화 볼까?"),
)


@torch.no_grad()
def text_losses(run: Run, pairs: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Mean loss per token, in nats, of the second texts after the first, and of everything."""
    run.model.eval()
    sums = [0.0, 0.0]
    counts = [0, 0]
    firsts = run.codec.encode([first for first, _ in pairs])
    seconds = run.codec.encode([second for _, second in pairs])
    for first, second in zip(firsts, seconds, strict=True):
        tokens = torch.tensor([first + second], device=run.device)
        losses = run.model.losses(run.model(tokens)[0, :-1], tokens[0, 1:])
        sums[0] += float(losses[len(first) - 1 :].sum())
        sums[1] += float(losses.sum())
        counts[0] += len(second)
        counts[1] += len(losses)
    return sums[0] / counts[0], sums[1] / counts[1]


@torch.no_grad()
def answer(run: Run, prompt: str, limit: int = 40) -> str:
    """The model's most likely continuation of `prompt`, up to the stop."""
    run.model.eval()
    tokens = run.codec.encode([prompt])[0]
    start = len(tokens)
    text = ""
    for _ in range(limit):
        states = run.model(torch.tensor([tokens], device=run.device))
        best = int((states[0, -1] @ run.model.wte.weight.T).argmax())
        if best == run.codec.end:
            break
        tokens.append(best)
        text = run.codec.plain.decode(tokens[start:])
        if STOP in text:
            break
    return text.split(STOP)[0].strip()


def seed_scores(run: Run) -> dict[str, dict[str, float]]:
    """Scores of the documents of the Korean-food queries."""
    cases = [
        (SEED_QUERY, SEED_DOCUMENTS),
        (SEED_QUERY.replace("\n", " "), SEED_DOCUMENTS),
        (SEED_QUERY, tuple(" " + text for text in SEED_DOCUMENTS)),
        (SEED_SHORT_QUERY, SEED_SHORT_DOCUMENTS),
        (SEED_SHORT_QUERY, tuple(" " + text for text in SEED_SHORT_DOCUMENTS)),
    ]
    found: dict[str, dict[str, float]] = {}
    for query, documents in cases:
        row = scores(run, run.codec.encode([query]), run.codec.encode(documents))[0]
        key = query + (" + blank" if documents[0].startswith(" ") else "")
        values = [round(value, 3) for value in row.tolist()]
        found[key] = dict(zip(documents, values, strict=True))
    return found


def evaluate(run: Run) -> dict[str, Any]:
    """All figures of the finished model on the rows kept out."""
    data, progress = run.data, run.progress
    known = {turn.answer for turn in data.chat}
    recall = chat_recall(run, data.chat_heldout, draws=2)
    pairs = list(zip(data.chat_heldout, recall, strict=True))
    new_answers = [share for turn, share in pairs if turn.answer not in known]
    chat = [(turn.prompt, " " + turn.answer) for turn in data.chat_heldout]
    reviews = [(row.prompt, VERDICTS[row.verdict]) for row in data.reviews_heldout[:500]]
    rng = random.Random(11)
    tests = [dishes.make_test(rng, unseen=False) for _ in range(500)]
    chat_answer, chat_all = text_losses(run, chat)
    verdict, review_all = text_losses(run, reviews)
    dish, dish_all = text_losses(run, [(query, documents[0]) for query, documents in tests])
    return {
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "training": asdict(progress),
        "rows": {name: len(getattr(data, name)) for name in data.__dataclass_fields__},
        "heldout_loss_nats_per_token": {
            "chat_answers": round(chat_answer, 4),
            "chat_whole": round(chat_all, 4),
            "review_verdicts": round(verdict, 4),
            "review_whole": round(review_all, 4),
            "dish_documents": round(dish, 4),
            "dish_whole": round(dish_all, 4),
        },
        "review_accuracy": round(review_accuracy(run, data.reviews_heldout), 4),
        "chat_recall_at_1_of_16": round(mean(recall), 4),
        "chat_recall_of_answers_never_trained": round(mean(new_answers), 4),
        "chat_rows_of_answers_never_trained": len(new_answers),
        "dish_accuracy_heldout_pairs": dish_accuracy(run, unseen=False),
        "dish_accuracy_unseen_wording": dish_accuracy(run, unseen=True),
        "seed_scores": seed_scores(run),
    }
