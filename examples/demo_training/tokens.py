"""How text becomes token ids."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo_training import dishes
from examples.demo_training.data import VERDICTS, Data

END = "<|endoftext|>"
LONGEST = 4  # characters of an n-gram


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


def token_ngrams(tokenizer: Tokenizer) -> list[list[int]]:
    """The numbers of the character n-grams within each token, of those that two tokens share."""
    texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    found = [
        {text[i : i + n] for n in range(1, LONGEST + 1) for i in range(len(text) - n + 1)}
        for text in texts
    ]
    counts = Counter(gram for grams in found for gram in grams)
    shared = sorted(gram for gram, count in counts.items() if count > 1)
    index = {gram: number for number, gram in enumerate(shared)}
    return [sorted(index[gram] for gram in grams if gram in index) for grams in found]


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

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """The varied token ids of each text, and where in the text each token ends."""
        encodings = self.varied.encode_batch(list(texts))
        return [(found.ids, [end for _, end in found.offsets]) for found in encodings]

    def encode(self, texts: Sequence[str], varied: bool = False) -> list[list[int]]:
        """The token ids of each text."""
        tokenizer = self.varied if varied else self.plain
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
