"""`make demo`: the main job on real input, through the real parts.

Writes a file of OpenAI batch lines (small talk to answer, dishes and film reviews to rank),
runs `nightjar run` on it with the demo model, and prints what came out.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "demo_model"
OUTPUT = ROOT / "demo-output"

QUESTIONS = [
    "안녕",
    "오늘 너무 피곤해",
    "점심 뭐 먹지?",
    "심심해",
    "시험을 망쳤어",
    "짝사랑하는 사람이 있어",
]
DISH_QUERY = "나는 어렸을 때부터 한식을 좋아했어.\n지금도 내가 가장 좋아하는 음식은"
DISHES = ["된장찌개야", "스파게티야", "스테이크야", "짜장면이야"]
REVIEWS = [
    "배우들 연기가 정말 좋고 끝까지 눈을 뗄 수 없었다",
    "시간이 아깝다 이야기도 없고 지루하기만 하다",
]
VERDICTS = [" 재미있다", " 재미없다"]


def request_line(custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One OpenAI batch line."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def request_lines() -> list[dict[str, Any]]:
    """The demo's requests: generation and ranking mixed in one file."""
    lines = [
        request_line(
            f"talk-{number}",
            "/v1/completions",
            {
                "prompt": f"사용자: {question}\n클로바:",
                "max_tokens": 48,
                "temperature": 0,
                "stop": "\n사용자:",
            },
        )
        for number, question in enumerate(QUESTIONS)
    ]
    dishes = {"query": DISH_QUERY, "documents": [f" {dish}" for dish in DISHES]}
    lines.append(request_line("dish", "/v1/rerank", dishes))
    for number, review in enumerate(REVIEWS):
        body = {"query": f"리뷰: {review}\n평가:", "documents": VERDICTS}
        lines.append(request_line(f"review-{number}", "/v1/rerank", body))
    return lines


def run_nightjar(source: Path, out: Path) -> None:
    """Run the command as a user would."""
    command = Path(sys.executable).with_name("nightjar")
    subprocess.run(
        [command, "run", source, "--model", MODEL, "--out", out, "--workdir", out.parent / "work"],
        check=True,
    )


def show(answers: dict[str, dict[str, Any]]) -> None:
    """Print the answers beside their questions."""
    print("\nSmall talk (stop: the next line of the user)")
    for number, question in enumerate(QUESTIONS):
        body = answers[f"talk-{number}"]
        choice, usage = body["choices"][0], body["usage"]
        asked, made = usage["requested_tokens"], usage["completion_tokens"]
        print(f"  사용자: {question}")
        print(f"  클로바:{choice['text']}   [{choice['finish_reason']}, {made} of {asked} tokens]")
    print(f"\nWhich dish fits? (mean negative log-likelihood, lower is better)\n  {DISH_QUERY!r}")
    for result in answers["dish"]["results"]:
        print(f"  {result['mean_nll']:6.3f}  {DISHES[result['index']]}")
    print("\nIs the film good?")
    for number, review in enumerate(REVIEWS):
        verdict = VERDICTS[answers[f"review-{number}"]["results"][0]["index"]]
        print(f"  {verdict.strip()}: {review}")


def main() -> None:
    """Write the input, run it, show the results."""
    OUTPUT.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directory = OUTPUT / stamp
    directory.mkdir()
    source, out = directory / "requests.jsonl", directory / "results.jsonl"
    lines = [json.dumps(line, ensure_ascii=False) for line in request_lines()]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run_nightjar(source, out)
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    show({result["custom_id"]: result["response"]["body"] for result in results})
    print(f"\nRequests, results, logs and database: {directory}")


if __name__ == "__main__":
    main()
