"""Trains the demo model: a small Korean GPT that chats, ranks dishes and judges film reviews.

    python examples/train_demo_model.py --data DIR --out DIR [--minutes 80] [--device auto]

DIR of the data holds `chatbot/train.csv` (columns question, answer) and `nsmc/train.tsv`
(columns rating, review).  The result is a directory in the Hugging Face layout (GPT-2), with
its tokenizer and `metrics.json`.  A run that died goes on from `--checkpoint-dir` when started
again.  Two kinds of loss are mixed:

- the language model loss, which makes the model write Korean;
- a ranking loss, which computes what a rerank endpoint computes (the mean negative
  log-likelihood of each document's tokens after the query) and asks that the right document
  has the lowest.  The query runs once and the documents are branches after it.
"""

import argparse
import csv
import hashlib
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import dishes
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END = "<|endoftext|>"
STOP = "\n사용자:"
VERDICTS = (" 재미있다", " 재미없다")
CHAT_HELDOUT = 600
REVIEW_HELDOUT = 3000


@dataclass(frozen=True)
class Config:
    """Sizes of the model and settings of its training."""

    vocab_size: int = 6144
    positions: int = 512
    width: int = 192
    layers: int = 4
    heads: int = 3
    dropout: float = 0.1
    bpe_dropout: float = 0.1
    peak_lr: float = 1e-3
    weight_decay: float = 0.1
    review_tokens: int = 1400
    chat_group: int = 12
    pack_rows: int = 20
    bag_steps: int = 280
    seed: int = 20


# ---------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Turn:
    """One question with its answer."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text up to where the answer starts."""
        return f"사용자: {self.question}\n클로바:"


@dataclass(frozen=True)
class Review:
    """A film review; verdict 0 is good, 1 is bad (an index into VERDICTS)."""

    text: str
    verdict: int

    @property
    def prompt(self) -> str:
        """The text up to where the verdict starts."""
        return f"리뷰: {self.text}\n평가:"


@dataclass(frozen=True)
class Data:
    """Rows for training and rows kept out of it."""

    chat: list[Turn]
    chat_heldout: list[Turn]
    reviews: list[Review]
    reviews_heldout: list[Review]


def read_table(path: Path, delimiter: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table with a header, with the given columns stripped of blanks."""
    if not path.is_file():
        raise SystemExit(f"error: no such file: {path} (see --data)")
    plain = delimiter == "\t"
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(
            file,
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
        )
        missing = [name for name in columns if name not in (reader.fieldnames or [])]
        if missing:
            raise SystemExit(f"error: {path} lacks the columns {', '.join(missing)}")
        return [{name: (row[name] or "").strip() for name in columns} for row in reader]


def split_key(text: str) -> str:
    """What decides the side of a row: equal for texts that differ in blanks or marks only."""
    letters = "".join(char for char in text.lower() if char.isalnum())
    return hashlib.sha256((letters or text).encode()).hexdigest()


def hold_out(keys: Sequence[str], count: int) -> set[str]:
    """The smallest hashes: they cover `count` rows or a few more, and no row of training."""
    chosen: set[str] = set()
    for taken, key in enumerate(sorted(keys)):
        if taken >= count and key not in chosen:
            break
        chosen.add(key)
    return chosen


def load_data(folder: Path) -> Data:
    """Reads both tables and keeps rows out by the hash of the question or the review."""
    rows = read_table(folder / "chatbot" / "train.csv", ",", ("question", "answer"))
    turns = list(dict.fromkeys(Turn(row["question"], row["answer"]) for row in rows))
    turns = [turn for turn in turns if turn.question and turn.answer]
    rows = read_table(folder / "nsmc" / "train.tsv", "\t", ("rating", "review"))
    good = {row["review"]: int(row["rating"]) >= 9 for row in rows if row["review"]}
    reviews = [Review(text, 0 if liked else 1) for text, liked in good.items()]
    turn_keys = [split_key(turn.question) for turn in turns]
    review_keys = [split_key(review.text) for review in reviews]
    turns_out = hold_out(turn_keys, CHAT_HELDOUT)
    reviews_out = hold_out(review_keys, REVIEW_HELDOUT)
    return Data(
        [turn for turn, key in zip(turns, turn_keys, strict=True) if key not in turns_out],
        [turn for turn, key in zip(turns, turn_keys, strict=True) if key in turns_out],
        [row for row, key in zip(reviews, review_keys, strict=True) if key not in reviews_out],
        [row for row, key in zip(reviews, review_keys, strict=True) if key in reviews_out],
    )


# ----------------------------------------------------------------------------- tokenizer


def train_tokenizer(data: Data, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of the training rows and the dish text."""
    rng = random.Random(0)
    texts = [f"{turn.prompt} {turn.answer}\n" for turn in data.chat] * 3
    texts += [review.prompt + VERDICTS[review.verdict] for review in data.reviews]
    for _ in range(3000):
        queries, documents, _ = dishes.make_group(rng, 1)
        texts += [*queries, *documents, dishes.make_fact(rng)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass
class Codec:
    """The tokenizer, and a copy that drops merges by chance to vary the training text."""

    plain: Tokenizer
    varied: Tokenizer

    @classmethod
    def make(cls, tokenizer: Tokenizer, bpe_dropout: float) -> "Codec":
        """A codec around `tokenizer`."""
        varied = Tokenizer.from_str(tokenizer.to_str())
        varied.model.dropout = bpe_dropout
        return cls(tokenizer, varied)

    @property
    def end(self) -> int:
        """The id of the token that ends a document."""
        found = self.plain.token_to_id(END)
        if found is None:
            raise ValueError(f"the tokenizer lacks {END}")
        return int(found)

    def encode(self, texts: Sequence[str], varied: bool = False) -> list[list[int]]:
        """The token ids of each text."""
        tokenizer = self.varied if varied else self.plain
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


# --------------------------------------------------------------------------------- model


class RowDropout(nn.Module):
    """Dropout with one mask for all positions of a row: far fewer random numbers to draw."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, width)."""
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], 1, x.shape[2], device=x.device) >= self.chance
        return x * (kept / (1 - self.chance))


class Block(nn.Module):
    """One GPT-2 layer: attention and MLP, each after a LayerNorm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.drop = RowDropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, T, width), mask (B, 1, T, T) added to the scores, None: causal."""
        rows, length, width = x.shape
        shape = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.ln_1(x)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(rows, length, width)))
        hidden = F.gelu(self.fc(self.ln_2(x)), approximate="tanh")
        added: Tensor = x + self.drop(self.out(hidden))
        return added


class Gpt(nn.Module):
    """GPT-2 with tied embeddings, lean for training; `export` writes the usual names."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.drop = RowDropout(config.dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Outputs that add to the residual start smaller, as in GPT-2.
                depth = math.sqrt(2 * config.layers) if "proj" in name or "out" in name else 1
                nn.init.normal_(parameter, std=(0.01 if "wpe" in name else 0.04) / depth)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """tokens and positions (B, T), mask as in Block; returns the last states (B, T, width)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            x = block(x, mask)
        normed: Tensor = self.ln_f(x)
        return normed

    @torch.no_grad()
    def start_from(self, vectors: Tensor) -> None:
        """Takes token vectors (vocabulary, width) and passes the mean of a text's on.

        With values and projection at the identity, the first and the last attention start as
        an average of the text so far; tied to the output, it makes related tokens likelier.
        So the model ranks above chance before its first step.
        """
        width = self.config.width
        self.wte.weight.copy_(vectors)
        for block in (cast(Block, self.blocks[0]), cast(Block, self.blocks[-1])):
            block.qkv.weight[2 * width :] = torch.eye(width)
            block.proj.weight.copy_(torch.eye(width))

    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihoods (N) of targets (N) after states (N, width)."""
        return F.cross_entropy(states @ self.wte.weight.T, targets, reduction="none")


def related_vectors(data: Data, codec: Codec, config: Config) -> Tensor:
    """First token vectors (vocabulary, width) from which tokens share texts.

    The singular vectors of the positive pointwise mutual information of tokens within a chat
    pair, a review with its verdict or a line about dishes.  Tokens of like use start near each
    other, which saves the short training much of the time it would need to find that out.
    """
    rng = random.Random(3)
    texts = [f"{turn.prompt} {turn.answer}" for turn in data.chat] * 3
    texts += [review.prompt + VERDICTS[review.verdict] for review in data.reviews]
    texts += [dishes.make_fact(rng) for _ in range(5000)]
    size = config.vocab_size
    together = torch.zeros(size * size)
    for start in range(0, len(texts), 2000):
        pairs: list[Tensor] = []
        for row in codec.encode(texts[start : start + 2000]):
            found = torch.tensor(sorted(set(row)))
            pairs.append((found[:, None] * size + found[None, :]).flatten())
        index = torch.cat(pairs)
        together.index_add_(0, index, torch.ones(len(index)))
    counts = together.view(size, size).fill_diagonal_(0)
    # The power evens out rare contexts, as in word2vec's negative samples.
    context = counts.sum(dim=0).clamp(min=1) ** 0.75
    expected = counts.sum(dim=1).clamp(min=1)[:, None] * (context / context.sum())[None, :]
    information = torch.log((counts / expected).clamp(min=1.0))
    left, values, _ = torch.svd_lowrank(information, q=config.width, niter=3)
    return left * values.sqrt()


# ------------------------------------------------------------------------------- batches


@dataclass
class Branches:
    """Queries with the same documents as branches after each of them.

    The tokens of a row are the padded query (length Q) and then all documents (length D), and
    a document sees its query and itself only, at the positions that follow the query: the
    computation of each document alone after the query, with the query computed once.
    """

    tokens: Tensor  # (B, Q + D)
    positions: Tensor  # (B, Q + D)
    mask: Tensor  # (B, 1, Q + D, Q + D)
    source: Tensor  # (B, D): where the state lies that predicts each document token
    owner: Tensor  # (D): the document of each document token
    lengths: Tensor  # (B): query lengths

    @property
    def query_length(self) -> int:
        """Q, the padded length of the queries."""
        return self.tokens.shape[1] - self.owner.shape[0]


def make_branches(
    queries: Sequence[Sequence[int]], documents: Sequence[Sequence[int]], device: torch.device
) -> Branches:
    """Lays queries and documents out as Branches."""
    longest = max(len(query) for query in queries)
    lengths = torch.tensor([len(query) for query in queries])
    owner = torch.tensor([i for i, document in enumerate(documents) for _ in document])
    within = torch.tensor([t for document in documents for t in range(len(document))])
    flat = [token for document in documents for token in document]
    tokens = torch.tensor([[*q, *[0] * (longest - len(q)), *flat] for q in queries])
    at = torch.arange(tokens.shape[1])
    segment = torch.cat([torch.full((longest,), -1), owner])
    causal = at[None, :] <= at[:, None]
    to_query = (at < longest)[None, :] & causal
    to_same = (segment[None, :] == segment[:, None]) & causal
    real = (at[None, :] < lengths[:, None]) | (at >= longest)[None, :]
    allowed = (to_query | to_same)[None] & real[:, None, :]
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[:, None]
    query_positions = at[:longest].expand(len(queries), -1)
    positions = torch.cat([query_positions, lengths[:, None] + within[None]], dim=1)
    inside = (longest + torch.arange(len(flat)) - 1)[None].expand(len(queries), -1)
    source = torch.where(within[None] == 0, lengths[:, None] - 1, inside)
    moved = [x.to(device) for x in (tokens, positions, mask, source, owner, lengths)]
    return Branches(*moved)


def document_losses(model: Gpt, states: Tensor, branches: Branches) -> Tensor:
    """Negative log-likelihood (B, D) of each document token after its query."""
    index = branches.source[:, :, None].expand(-1, -1, states.shape[2])
    picked = states.gather(1, index).flatten(0, 1)
    targets = branches.tokens[:, branches.query_length :].flatten()
    return model.losses(picked, targets).view(branches.source.shape)


def mean_by_document(losses: Tensor, owner: Tensor) -> Tensor:
    """The endpoint's scores (B, number of documents): means of losses (B, D) by owner (D)."""
    count = int(owner.max()) + 1
    sums = losses.new_zeros(losses.shape[0], count).index_add(1, owner, losses)
    return sums / torch.bincount(owner, minlength=count)


@dataclass
class RankBatch:
    """Queries, documents and the index of each query's right document."""

    queries: list[list[int]]
    documents: list[list[int]]
    targets: list[int]
    scale: float  # how many logits one nat of the score is worth
    query_weight: float  # weight of the language model loss on the query
    both_ways: bool = False  # also ask which query fits the document


@dataclass
class TextBatch:
    """Token rows and the weight of each token as a target; the first has none."""

    rows: list[list[int]]
    weights: list[list[float]]


Batch = RankBatch | TextBatch


def rank_loss(model: Gpt, batch: RankBatch, device: torch.device, query_share: float) -> Tensor:
    """Ranking loss plus the language model losses of the right documents and the queries."""
    branches = make_branches(batch.queries, batch.documents, device)
    states = model(branches.tokens, branches.positions, branches.mask)
    losses = document_losses(model, states, branches)
    targets = torch.tensor(batch.targets, device=device)
    logits = -batch.scale * mean_by_document(losses, branches.owner)
    loss = F.cross_entropy(logits, targets)
    if batch.both_ways:
        loss = loss + F.cross_entropy(logits.T, targets)
    right = branches.owner[None] == targets[:, None]
    loss = loss + losses[right].mean()
    at = torch.arange(branches.query_length - 1, device=device)
    scored = at[None] + 1 < branches.lengths[:, None]
    if query_share < 1:
        # Scoring a part of the query saves much of the output layer's time.
        scored &= torch.rand(scored.shape, device=device) < query_share
    if not bool(scored.any()):
        return loss
    targets = branches.tokens[:, 1 : branches.query_length][scored]
    query_states = states[:, : branches.query_length - 1][scored]
    return loss + batch.query_weight * model.losses(query_states, targets).mean()


def text_loss(model: Gpt, batch: TextBatch, device: torch.device) -> Tensor:
    """Weighted mean of the language model loss and of a penalty on saying a token twice.

    Started as an average of the text, the model tends to repeat what it has just read; the penalty
    (unlikelihood, -log(1 - p), of the last four tokens) takes that away sooner than likelihood.
    """
    longest = max(len(row) for row in batch.rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch.rows])
    weights = torch.tensor([[*w, *[0.0] * (longest - len(w))] for w in batch.weights])[:, 1:]
    tokens, weights = tokens.to(device), weights.to(device)
    scored = weights > 0
    target = tokens[:, 1:][scored]
    recent = torch.stack([tokens.roll(k, 1)[:, :-1][scored] for k in range(4)], dim=1)
    chances = F.log_softmax(model(tokens)[:, :-1][scored] @ model.wte.weight.T, dim=-1)
    losses = -chances.gather(1, target[:, None])[:, 0]
    again = chances.gather(1, recent).exp().clamp(max=0.99)
    losses = losses - 4.0 * (torch.log1p(-again) * (recent != target[:, None])).sum(dim=1)
    return (losses * weights[scored]).sum() / weights[scored].sum()


def review_batches(data: Data, codec: Codec, config: Config, seed: int) -> Iterator[RankBatch]:
    """Reviews of similar length together, both verdicts as documents, without end."""
    rng = random.Random(seed)
    verdicts = codec.encode(VERDICTS)
    while True:
        reviews = rng.sample(data.reviews, len(data.reviews))
        for start in range(0, len(reviews), 4000):
            part = reviews[start : start + 4000]
            rows = codec.encode([review.prompt for review in part], varied=True)
            pairs = sorted(zip(rows, part, strict=True), key=lambda pair: len(pair[0]))
            batches: list[list[tuple[list[int], Review]]] = [[]]
            for pair in pairs:
                if (len(batches[-1]) + 1) * (len(pair[0]) + 2) > config.review_tokens:
                    batches.append([])
                batches[-1].append(pair)
            rng.shuffle(batches)
            for batch in batches:
                targets = [review.verdict for _, review in batch]
                yield RankBatch([row for row, _ in batch], verdicts, targets, 1.0, 0.3)


def chat_groups(data: Data, codec: Codec, config: Config, seed: int) -> Iterator[RankBatch]:
    """Questions with the answers of the whole group as documents, without end."""
    rng = random.Random(seed)
    while True:
        group: dict[str, Turn] = {}
        for turn in rng.sample(data.chat, len(data.chat)):
            group.setdefault(turn.answer, turn)  # no answer twice in a group
            if len(group) == config.chat_group:
                queries = codec.encode([turn.prompt for turn in group.values()], varied=True)
                answers = codec.encode([" " + answer for answer in group])
                yield RankBatch(queries, answers, list(range(len(group))), 2.0, 0.1, True)
                group = {}


def dish_groups(codec: Codec, seed: int) -> Iterator[RankBatch]:
    """Queries about cuisines with one dish of each cuisine as documents, without end."""
    rng = random.Random(seed)
    while True:
        queries, documents, targets = dishes.make_group(rng, per_cuisine=3)
        yield RankBatch(codec.encode(queries), codec.encode(documents), targets, 3.0, 0.1)


def chat_packs(data: Data, codec: Codec, config: Config, seed: int) -> Iterator[TextBatch]:
    """Rows of 1 to 4 turns, a few of them filled to the last position, without end."""
    rng = random.Random(seed)
    while True:
        rows: list[list[int]] = []
        weights: list[list[float]] = []
        filled = rng.random() < 0.05
        for _ in range(4 if filled else config.pack_rows):
            row, weight = make_document(data, codec, rng, 40 if filled else rng.randint(1, 4))
            rows.append(row[: config.positions])
            weights.append(weight[: config.positions])
        yield TextBatch(rows, weights)


def make_document(
    data: Data, codec: Codec, rng: random.Random, turns: int
) -> tuple[list[int], list[float]]:
    """Token ids and target weights of a document: turns of chat, now and then another text."""
    kind = rng.random()
    if turns == 1 and kind < 0.25:
        review = rng.choice(data.reviews)
        pieces = [(review.prompt, 0.3), (VERDICTS[review.verdict] + "\n", 1.0)]
    elif turns == 1 and kind < 0.4:
        pieces = [(dishes.make_fact(rng) + "\n", 1.0)]
    else:
        pieces = []
        for _ in range(turns):
            about_food = rng.random() < 0.08
            turn = Turn(*dishes.make_turn(rng)) if about_food else rng.choice(data.chat)
            # The line end and the next speaker weigh as the answer: there the stop begins.
            pieces += [("사용자:", 1.0), (f" {turn.question}\n클로바:", 0.3)]
            pieces += [(f" {turn.answer}", 1.0), ("\n", 1.0)]
    encoded = codec.encode([text for text, _ in pieces])
    row = [token for tokens in encoded for token in tokens]
    paired = zip(encoded, pieces, strict=True)
    weight = [value for tokens, (_, value) in paired for _ in tokens]
    return [*row, codec.end], [*weight, 1.0]


# ------------------------------------------------------------------------------ training


def flatten(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """All tokens (N) of the rows one after the other, and the row (N) that each belongs to."""
    tokens = torch.tensor([token for row in rows for token in row])
    return tokens, torch.tensor([index for index, row in enumerate(rows) for _ in row])


def bag_scores(
    table: Tensor, queries: Sequence[Sequence[int]], documents: Sequence[Sequence[int]]
) -> Tensor:
    """Scores (queries, documents), higher is better, of a model without layers or order.

    A query is the mean of its token vectors in table (vocabulary, width), and a document's
    score the mean of the tied output's logits of its tokens.
    """
    width = table.shape[1]
    tokens, owner = flatten(queries)
    vectors = F.layer_norm(F.embedding(tokens, table), (width,))
    vectors = vectors * (torch.rand(len(tokens), 1) > 0.2)  # against overfitting
    sums = torch.zeros(len(queries), width).index_add(0, owner, vectors)
    states = F.layer_norm(sums, (width,))
    tokens, owner = flatten(documents)
    sums = torch.zeros(len(documents), width).index_add(0, owner, F.embedding(tokens, table))
    return states @ (sums / torch.bincount(owner)[:, None]).T


def warm_vectors(data: Data, codec: Codec, config: Config, table: Tensor) -> Tensor:
    """Trains token vectors (vocabulary, width) to rank as a bag of tokens: cheap, no layers."""
    table = table.clone().requires_grad_()
    steps = config.bag_steps
    optimizer = torch.optim.AdamW([table], lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.02)
    wide = replace(config, chat_group=192, review_tokens=6000)
    reviews = review_batches(data, codec, wide, 5)
    chat = chat_groups(data, codec, wide, 5)
    food = dish_groups(codec, 5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1.5e-3 * (1 - step / steps)
        loss = torch.zeros(())
        for batch in (next(reviews), next(chat), next(food)):
            logits = 2 * bag_scores(table, batch.queries, batch.documents)
            targets = torch.tensor(batch.targets)
            loss = loss + F.cross_entropy(logits, targets)
            if batch.both_ways:
                loss = loss + F.cross_entropy(logits.T, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"bag of tokens, step {step}: loss {float(loss.detach()):.3f}", flush=True)
    return table.detach()


@dataclass
class Progress:
    """What a run has done so far."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    by_source: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """Everything that one training run holds."""

    config: Config
    data: Data
    codec: Codec
    model: Gpt
    optimizer: torch.optim.AdamW
    progress: Progress
    device: torch.device
    seconds: float
    checkpoint: Path | None


def learning_rate(config: Config, share: float) -> float:
    """Warm-up over 2% of the time, the peak for most of it, then straight down to zero."""
    return config.peak_lr * min(1.0, share / 0.02, 4.0 * max(0.0, 1.0 - share)) + 1e-7


def source_weights(share: float) -> dict[str, float]:
    """Chances of the kinds of batch: first ranking leads, then writing, and last the dishes too.

    Ranking chat is learnt soon, and it alone makes a model that repeats words of the question;
    only plain text teaches it to write.
    """
    first = {"review": 0.40, "chat_text": 0.34, "chat_rank": 0.18, "dish": 0.08}
    middle = {"review": 0.42, "chat_text": 0.16, "chat_rank": 0.36, "dish": 0.06}
    writing = {"review": 0.39, "chat_text": 0.46, "chat_rank": 0.10, "dish": 0.05}
    last = {"review": 0.29, "chat_text": 0.46, "chat_rank": 0.08, "dish": 0.17}
    if share > 0.55:
        return last if share > 0.77 else writing
    late = min(1.0, share / 0.35)
    return {name: (1 - late) * first[name] + late * middle[name] for name in first}


def batch_tokens(batch: Batch) -> int:
    """Real tokens that a batch runs through the model."""
    if isinstance(batch, TextBatch):
        return sum(len(row) for row in batch.rows)
    branches = len(batch.queries) * sum(len(document) for document in batch.documents)
    return sum(len(query) for query in batch.queries) + branches


def make_run(args: argparse.Namespace, config: Config, data: Data) -> Run:
    """A fresh run, or the one that the checkpoint directory holds."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if args.device == "auto" else args.device)
    folder = Path(args.checkpoint_dir) if args.checkpoint_dir else None
    saved: dict[str, Any] | None = None
    path = folder / "checkpoint.pt" if folder else None
    if path and path.is_file():
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["config"] != asdict(config):
            raise SystemExit(f"error: {path} is of a run with other settings")
    if saved:
        tokenizer = Tokenizer.from_str(saved["tokenizer"])
    else:
        tokenizer = train_tokenizer(data, config.vocab_size)
    torch.manual_seed(config.seed + (saved["progress"]["step"] if saved else 0))
    codec = Codec.make(tokenizer, config.bpe_dropout)
    model = Gpt(config).to(device)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.98), fused=True)
    progress = Progress()
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(**saved["progress"])
        print(f"goes on from step {progress.step} of {path}", flush=True)
    else:
        started = time.monotonic()
        vectors = related_vectors(data, codec, config)
        vectors = warm_vectors(data, codec, config, vectors * (0.05 / vectors.std()))
        model.start_from(vectors)
        progress.seconds = time.monotonic() - started
    seconds = args.minutes * 60.0
    return Run(config, data, codec, model, optimizer, progress, device, seconds, path)


def save_checkpoint(run: Run) -> None:
    """Writes the run's state, replacing the last one only when it is whole."""
    if run.checkpoint is None:
        return
    run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = run.checkpoint.with_suffix(".partial")
    state = {
        "config": asdict(run.config),
        "tokenizer": run.codec.plain.to_str(),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "progress": asdict(run.progress),
    }
    torch.save(state, partial)
    partial.replace(run.checkpoint)


def train_step(run: Run, batch: Batch, share: float) -> float:
    """One step of the optimizer; returns the loss."""
    run.model.train()
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, share)
    if isinstance(batch, TextBatch):
        loss = text_loss(run.model, batch, run.device)
    else:
        loss = rank_loss(run.model, batch, run.device, 0.4 if share < 0.3 else 0.2)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def train(run: Run, report_every: float, save_every: float = 600.0) -> None:
    """Trains until the run's time is over; reports and saves on the way."""
    seed = run.config.seed + run.progress.step
    sources: dict[str, Iterator[Batch]] = {
        "review": review_batches(run.data, run.codec, run.config, seed),
        "chat_text": chat_packs(run.data, run.codec, run.config, seed),
        "chat_rank": chat_groups(run.data, run.codec, run.config, seed),
        "dish": dish_groups(run.codec, seed),
    }
    rng = random.Random(seed)
    averages: dict[str, float] = {}
    progress = run.progress
    last_report = last_save = progress.seconds
    while progress.seconds < run.seconds:
        started = time.monotonic()
        share = progress.seconds / run.seconds
        weights = source_weights(share)
        name = rng.choices(list(weights), list(weights.values()))[0]
        batch = next(sources[name])
        loss = train_step(run, batch, share)
        averages[name] = 0.95 * averages.get(name, loss) + 0.05 * loss
        progress.step += 1
        progress.tokens += batch_tokens(batch)
        progress.by_source[name] = progress.by_source.get(name, 0) + batch_tokens(batch)
        progress.seconds += time.monotonic() - started
        if progress.seconds - last_report >= report_every:
            last_report = progress.seconds
            report(run, averages)
        if progress.seconds - last_save >= save_every:
            last_save = progress.seconds
            save_checkpoint(run)
    save_checkpoint(run)


def report(run: Run, averages: dict[str, float]) -> None:
    """Prints the running losses and quick figures on a part of the rows kept out."""
    progress = run.progress
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in sorted(averages.items()))
    judged = review_accuracy(run, run.data.reviews_heldout[:300])
    found = mean(chat_recall(run, run.data.chat_heldout[:100], draws=1))
    print(
        f"{progress.seconds / 60:5.1f} min, step {progress.step},"
        f" {progress.tokens / progress.seconds:,.0f} tokens/s, {losses};"
        f" reviews {judged:.3f}, recall {found:.3f}",
        flush=True,
    )


# ---------------------------------------------------------------------------- evaluation


@torch.no_grad()
def scores(
    run: Run, queries: Sequence[Sequence[int]], documents: Sequence[Sequence[int]]
) -> Tensor:
    """Mean negative log-likelihood (queries, documents) of each document after each query."""
    run.model.eval()
    branches = make_branches(queries, documents, run.device)
    states = run.model(branches.tokens, branches.positions, branches.mask)
    losses = document_losses(run.model, states, branches)
    return mean_by_document(losses, branches.owner).cpu()


def review_accuracy(run: Run, reviews: Sequence[Review]) -> float:
    """Share of reviews whose fitting verdict has the lower score."""
    rows = run.codec.encode([review.prompt for review in reviews])
    pairs = sorted(zip(rows, reviews, strict=True), key=lambda pair: len(pair[0]))
    verdicts = run.codec.encode(VERDICTS)
    right = 0
    for start in range(0, len(pairs), 100):
        part = pairs[start : start + 100]
        best = scores(run, [row for row, _ in part], verdicts).argmin(dim=1).tolist()
        right += sum(a == b.verdict for a, (_, b) in zip(best, part, strict=True))
    return right / len(reviews)


def chat_recall(run: Run, turns: Sequence[Turn], draws: int) -> list[float]:
    """For each turn, how often the true answer beats 15 random held-out answers by score."""
    answers = list(dict.fromkeys(turn.answer for turn in run.data.chat_heldout))
    rng = random.Random(0)
    shares: list[float] = []
    for turn in turns:
        others = [answer for answer in answers if answer != turn.answer]
        drawn = [rng.sample(others, 15) for _ in range(draws)]
        names = list(dict.fromkeys([turn.answer, *[name for draw in drawn for name in draw]]))
        documents = run.codec.encode([" " + name for name in names])
        row = scores(run, run.codec.encode([turn.prompt]), documents)[0].tolist()
        score = dict(zip(names, row, strict=True))
        wins = [all(score[turn.answer] < score[name] for name in draw) for draw in drawn]
        shares.append(sum(wins) / draws)
    return shares


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def dish_accuracy(run: Run, unseen: bool, count: int = 300) -> float:
    """Share of held-out dish queries whose fitting dish beats three of other cuisines."""
    rng = random.Random(7)
    right = 0
    for _ in range(count):
        query, documents = dishes.make_test(rng, unseen)
        row = scores(run, run.codec.encode([query]), run.codec.encode(documents))[0]
        right += int(row.argmin()) == 0
    return right / count


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
        (dishes.SEED_QUERY, dishes.SEED_DOCUMENTS),
        (dishes.SEED_QUERY.replace("\n", " "), dishes.SEED_DOCUMENTS),
        (dishes.SEED_QUERY, tuple(" " + text for text in dishes.SEED_DOCUMENTS)),
        (dishes.SEED_SHORT_QUERY, dishes.SEED_SHORT_DOCUMENTS),
        (dishes.SEED_SHORT_QUERY, tuple(" " + text for text in dishes.SEED_SHORT_DOCUMENTS)),
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
        "training": {"seconds": round(progress.seconds), **asdict(progress)},
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


SAMPLES = (
    *("안녕", "오늘 너무 피곤해", "뭐 먹지", "남자친구랑 헤어졌어", "너는 취미가 뭐야?"),
    *("심심해", "시험 망했어", "주말에 뭐 할까?", "너 이름이 뭐야?", "고마워"),
    *("한식 추천해줘", "영화 볼까?"),
)


# -------------------------------------------------------------------------------- export


def export(run: Run, folder: Path) -> None:
    """Writes model, tokenizer and settings in the Hugging Face layout of GPT-2."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_weights(run.model), folder / "model.safetensors", {"format": "pt"})
    run.codec.plain.save(str(folder / "tokenizer.json"))
    config, end = run.config, run.codec.end
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model_config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.positions,
        "n_ctx": config.positions,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "float16",
        "torch_dtype": "float16",
        **ends,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": None,
        "model_max_length": config.positions,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "config.json", model_config)
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def hugging_face_weights(model: Gpt) -> dict[str, Tensor]:
    """The weights as float16 under GPT-2's names, its matrices turned as that class has them."""
    names = {
        "qkv": "attn.c_attn",
        "proj": "attn.c_proj",
        "fc": "mlp.c_fc",
        "out": "mlp.c_proj",
    }
    weights: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        parts = name.replace("blocks.", "h.").split(".")
        weight = parameter.to("cpu", torch.float16)
        if parts[0] == "h" and parts[2] in names:
            parts[2] = names[parts[2]]
            weight = weight.T if parts[3] == "weight" else weight
        weights["transformer." + ".".join(parts)] = weight.contiguous()
    return weights


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` readably."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


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
        f"chat {len(data.chat)} rows (+{len(data.chat_heldout)} kept out),"
        f" reviews {len(data.reviews)} (+{len(data.reviews_heldout)})",
        flush=True,
    )
    run = make_run(args, Config(), data)
    train(run, args.report_minutes * 60)
    out = Path(args.out)
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
