"""Histories of tokens as the penalties' kernel reads them."""

import torch


def bitmap(rows, vocab_size):
    """Which tokens each row has seen, as the device keeps it."""
    words = torch.zeros(len(rows), -(-vocab_size // 32), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        for token in set(tokens):
            words[row, token // 32] |= 1 << token % 32
    return words.to(torch.int32)


def counted(rows, vocab_size):
    counts = torch.zeros(len(rows), vocab_size, dtype=torch.int32)
    for row, tokens in enumerate(rows):
        for token in tokens:
            counts[row, token] += 1
    return counts
