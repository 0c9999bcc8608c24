"""A small GPT over bytes, and the text it is trained on: the sources of Python's own standard library."""
# ruff: noqa: INP001 -- part of a program, not of a package

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a model is. With AdamW's two moments its checkpoint takes 12 bytes per parameter."""

    layers: int
    width: int
    """Channels between the layers; a multiple of `heads`."""
    heads: int


SIZES = {
    "demo": Size(layers=6, width=320, heads=5),  # 7.6 million parameters, a checkpoint of 91 MB
    "small": Size(layers=4, width=192, heads=3),  # 1.9 million, 23 MB: two parts of 5 MiB and more from each of 2 ranks
}


class Block(nn.Module):
    """One layer of the transformer: attention to the bytes before, then a feed-forward network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.projection = nn.Linear(size.width, size.width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(size.width)
        self.expand = nn.Linear(size.width, 4 * size.width)
        self.contract = nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = hidden.shape
        heads = self.query_key_value(self.attention_norm(hidden)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, time, width))
        result: Tensor = hidden + self.contract(functional.gelu(self.expand(self.feed_forward_norm(hidden))))
        return result


class GPT(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes (batch, time), int64, to the logits of the byte after each, (batch, time, 256)."""
        hidden = self.token(text) + self.position(torch.arange(text.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def corpus() -> Tensor:
    """Return the top-level modules of this Python's standard library, one after the other, as uint8."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


def batch_of(text: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` pieces of the text; return them and, for each byte, the one that follows."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator).tolist()
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return pieces[:, :-1], pieces[:, 1:]
