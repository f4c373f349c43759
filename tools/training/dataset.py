"""From text to rows of tokens: the tokenised corpus on disk, and the epochs cut from it.

The corpus needs the right Python release and the training needs a GPU, and these may be different
machines; one file of token ids is the border between them.

    python -m tools.training.dataset .train/tokens.safetensors
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.training.architecture import BOS_ID, EOS_ID, model_config
from tools.training.conversation import exchanges, functions
from tools.training.corpus import LICENSE, Document, build_corpus, digest
from tools.training.tokenizer import render, save_tokenizer, train_tokenizer

CHECKPOINT: Final = Path("deploy/models/tandem-python")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenisedCorpus:
    """The corpus as token ids.

    Attributes:
        train: [num_tokens] int64, documents back to back, each from its BOS to its EOS.
        held_out: [num_held_out_tokens] int64, likewise, files that `train` does not contain.
        token_bytes: [vocab_size] int64, how many bytes of text a token stands for.
        metadata: where the text came from, as strings.
    """

    train: Tensor
    held_out: Tensor
    token_bytes: Tensor
    metadata: dict[str, str]


def tokenise(documents: list[Document], tokenizer: Tokenizer) -> TokenisedCorpus:
    """Encode a corpus, and with it the chat exchanges and bare functions of its training part."""
    training = [document for document in documents if not document.held_out]
    chats = [render(exchange) for document in training for exchange in exchanges(document)]
    train_parts = [_encode(tokenizer, document.text) for document in training]
    chat_parts = [_encode_rendered(tokenizer, chat) for chat in chats]
    bare = [_encode(tokenizer, text) for document in training for text in functions(document)]
    held_out_parts = [_encode(tokenizer, doc.text) for doc in documents if doc.held_out]
    num_chat_tokens = sum(map(len, chat_parts))
    return TokenisedCorpus(
        train=_join([*train_parts, *chat_parts, *bare]),
        held_out=_join(held_out_parts),
        token_bytes=_token_bytes(tokenizer),
        metadata={
            "license": LICENSE,
            "sha256": digest(documents),
            "num_documents": str(len(documents)),
            "num_held_out_documents": str(len(held_out_parts)),
            "num_exchanges": str(len(chats)),
            "num_chat_tokens": str(num_chat_tokens),
            "num_bare_functions": str(len(bare)),
            "num_bare_function_tokens": str(sum(map(len, bare))),
        },
    )


def save_corpus(corpus: TokenisedCorpus, path: Path) -> None:
    """Write the token ids as 16-bit numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(corpus, name) for name in ("train", "held_out", "token_bytes")}
    packed = {name: tensor.to(torch.uint16) for name, tensor in tensors.items()}
    save_file(packed, path, metadata=corpus.metadata)


def load_corpus(path: Path) -> TokenisedCorpus:
    """Read what `save_corpus` wrote."""
    with safe_open(path, framework="pt") as file:
        return TokenisedCorpus(
            train=file.get_tensor("train").long(),
            held_out=file.get_tensor("held_out").long(),
            token_bytes=file.get_tensor("token_bytes").long(),
            metadata=dict(file.metadata() or {}),
        )


def epoch_rows(tokens: Tensor, row_length: int, generator: torch.Generator) -> Tensor:
    """Return one epoch of rows, in random order.

    A document longer than a row fills rows of its own. Short documents and the tails of long ones
    are packed, and the piece that overflows a row is cut. So a row that starts with BOS starts a
    text, as every served prompt does, and every other row continues one.

    Args:
        tokens: [num_tokens] int64, documents back to back, each starting with BOS.
        row_length: tokens of a row.
        generator: decides the packing and the order of rows.

    Returns:
        [num_rows, row_length] int64.
    """
    starts = (tokens == BOS_ID).nonzero().squeeze(1).tolist()
    documents = [tokens[a:b] for a, b in pairwise([*starts, len(tokens)])]
    pieces = [piece for document in documents for piece in torch.split(document, row_length)]
    rows = [piece for piece in pieces if len(piece) == row_length]
    short = [piece for piece in pieces if len(piece) < row_length]
    order = torch.randperm(len(short), generator=generator).tolist()
    rows.extend(_pack([short[index] for index in order], row_length))
    return torch.stack([rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()])


def _pack(pieces: list[Tensor], row_length: int) -> Iterator[Tensor]:
    """Join pieces into full rows, each starting with the start of a piece."""
    pending: list[Tensor] = []
    num_pending = 0
    for piece in pieces:
        pending.append(piece)
        num_pending += len(piece)
        if num_pending >= row_length:
            yield torch.cat(pending)[:row_length]
            pending, num_pending = [], 0


def cut_rows(tokens: Tensor, row_length: int) -> Tensor:
    """Cut tokens into rows as they come: [num_rows, row_length]; the remainder is left out."""
    num_rows = len(tokens) // row_length
    return tokens[: num_rows * row_length].view(num_rows, row_length)


def batches(tokens: Tensor, row_length: int, num_rows: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of [num_rows, row_length] for ever, epoch after epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = epoch_rows(tokens, row_length, generator)
        assert len(rows) >= num_rows
        for start in range(0, len(rows) - num_rows + 1, num_rows):
            yield rows[start : start + num_rows]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # encode_special_tokens: a document that spells a special token gets its bytes, not its id.
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text).ids
    return [*ids, EOS_ID]


def _encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    tokenizer.encode_special_tokens = False
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _join(parts: list[list[int]]) -> Tensor:
    return torch.cat([torch.tensor(part) for part in parts])


def _token_bytes(tokenizer: Tokenizer) -> Tensor:
    """Count bytes per id; in byte-level BPE one character of a token is one byte."""
    special = set(tokenizer.get_added_tokens_decoder())
    sizes = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if index in special else len(token)
    return sizes


def _main() -> None:
    parser = argparse.ArgumentParser(description="Tokenise the corpus; train the tokenizer first.")
    parser.add_argument("out", type=Path, help="file of token ids to write")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="gets the tokenizer")
    arguments = parser.parse_args()
    documents = build_corpus()
    training = [document.text for document in documents if not document.held_out]
    vocab_size = model_config()["vocab_size"]
    assert isinstance(vocab_size, int)
    tokenizer = train_tokenizer(training, vocab_size)
    arguments.checkpoint.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, arguments.checkpoint)
    corpus = tokenise(documents, tokenizer)
    save_corpus(corpus, arguments.out)
    sizes = {"train": len(corpus.train), "held_out": len(corpus.held_out)}
    print(json.dumps({**corpus.metadata, **sizes}, indent=2))


if __name__ == "__main__":
    _main()
