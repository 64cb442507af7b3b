"""Text to tokens and back, the chat template, and a stream that never cuts a character in two.

What a client writes is data: special tokens exist only where this module puts them, so a message that spells
``<|im_end|>`` stays nine or so ordinary tokens and cannot end its turn or forge another role's.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

ROLES = ("system", "user", "assistant")


class ChatError(ValueError):
    """The messages do not fit the chat template; says which one and why."""


class TokenStream:
    """Turns tokens into text as they come. One object a sequence."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain by now; the bytes of an unfinished character are kept back."""
        return self._decoder.decode(b"".join(self._pieces[i] for i in ids))

    def flush(self) -> str:
        """At the end: what was kept back, as U+FFFD, as it never became a character."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """What both models' tokenizers share: they are byte-level, so a token is a run of bytes.

    Args:
        pieces: The bytes of each token; none for special ones.
        special: Special tokens by name; `END_OF_TEXT`, `START` and `END` among them.
        default_system: The system message of a chat that brings none.
    """

    def __init__(self, pieces: Sequence[bytes], special: Mapping[str, int], default_system: str) -> None:
        self._pieces = pieces
        self.special = special
        self.default_system = default_system

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Tokens of plain text; special tokens spelt in it are not interpreted.

        What the vocabulary has no bytes for counts as U+FFFD: a lone surrogate, which JSON can carry and UTF-8
        cannot, and, in SmolLM2's, code points from U+40000 on and a few bytes that hardly any text has.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the tokens; special tokens give nothing, bytes that are not UTF-8 give U+FFFD."""
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def stream(self) -> TokenStream:
        """A new `TokenStream`."""
        return TokenStream(self._pieces)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer starts.

        Args:
            messages: Each with ``role`` (system, user or assistant) and ``content``, in order.

        Raises:
            ChatError: There are none, or one has another role or a content that is not text.
        """
        # The GGUF's `tokenizer.chat_template` (ChatML), by hand: a default system message when the first message
        # is none, then each as <|im_start|>ROLE\nCONTENT<|im_end|>\n, then <|im_start|>assistant\n.
        if not messages:
            raise ChatError("messages: at least one is needed")
        turns: list[tuple[str, str]] = []
        for place, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise ChatError(f"messages[{place}].role: {role!r} is not one of {', '.join(ROLES)}")
            if not isinstance(content, str):
                raise ChatError(f"messages[{place}].content: text is needed, not {type(content).__name__}")
            turns.append((role, content))
        if turns[0][0] != "system":
            turns.insert(0, ("system", self.default_system))
        start, end, newline = self.special[START], self.special[END], self.encode("\n")
        ids: list[int] = []
        for role, content in turns:
            ids += [start, *self.encode(f"{role}\n{content}"), end, *newline]
        return [*ids, start, *self.encode("assistant\n")]


def _utf8(text: str) -> str:
    """The text, its lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ByteTokenizer(Tokenizer):
    """Token i is byte i; three special tokens follow."""

    SPECIAL = (END_OF_TEXT, START, END)
    VOCAB = 256 + len(SPECIAL)

    def __init__(self) -> None:
        special = {name: 256 + place for place, name in enumerate(self.SPECIAL)}
        super().__init__([bytes([i]) for i in range(256)] + [b""] * len(special), special, "You are tiny.")

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(_utf8(text).encode())


class BpeTokenizer(Tokenizer):
    """Byte-level BPE (GPT-2's) in which every digit is a token of its own: SmolLM2's.

    Args:
        definition: As `define` makes it.
        special: Special tokens by name.
        default_system: The system message of a chat that brings none.
    """

    def __init__(self, definition: str, special: Mapping[str, int], default_system: str) -> None:
        self._bpe = tokenizers.Tokenizer.from_str(definition)
        vocabulary = self._bpe.get_vocab(with_added_tokens=False)
        byte_of = {letter: byte for byte, letter in _byte_letters().items()}
        pieces = [b""] * len(vocabulary)
        for token, i in vocabulary.items():
            if token not in special:
                pieces[i] = bytes(byte_of[letter] for letter in token)
        self._absent = frozenset(range(256)) - {piece[0] for piece in pieces if len(piece) == 1}
        super().__init__(pieces, special, default_system)

    @staticmethod
    def define(tokens: Sequence[str], merges: Sequence[str]) -> str:
        """The `tokenizers` JSON of a vocabulary and its merges ("left right", the strongest first)."""
        bpe = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: i for i, token in enumerate(tokens)},
                merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in merges)],
            )
        )
        # No special token is added to it: that is what keeps it from finding them in text.
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        bpe.decoder = decoders.ByteLevel()
        return bpe.to_str()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        text = _utf8(text)
        if not self._absent.isdisjoint(text.encode()):
            text = "".join(c if self._absent.isdisjoint(c.encode()) else "\ufffd" for c in text)
        return self._bpe.encode(text, add_special_tokens=False).ids


def _byte_letters() -> dict[int, str]:
    """GPT-2's alphabet: a printable letter for each byte; bytes that print are themselves, the rest start at U+0100."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = (byte for byte in range(256) if byte not in printing)
    return {byte: chr(byte) for byte in printing} | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}
