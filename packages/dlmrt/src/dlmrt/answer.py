"""The text of an answer that appears block by block."""

from collections.abc import Sequence

from dlmrt.text import TextCodec

_HALF = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class AnswerText:
    """The text of an answer that grows block by block, watched for stop strings.

    codec None: there is no tokenizer and every text is empty.
    """

    def __init__(self, codec: TextCodec | None, stop: Sequence[str] = ()) -> None:
        self.codec, self.stop = codec, tuple(stop)
        self.text = ""  # final text so far; the stop string and what follows it are not part of it
        self.stopped_after: int | None = None  # tokens up to the one that completed a stop string
        self._shown = 0

    def update(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Takes all of the answer's tokens so far and returns the text that may now be shown.

        Held back until the answer is `final`: an unfinished character, and an ending that a stop string may begin with.
        """
        if self.codec is None:
            return ""
        self.text = self.codec.decode(ids).rstrip(_HALF)
        if any(stop in self.text for stop in self.stop):
            self.stopped_after = self._tokens_until_stop(ids)
            text = self.codec.decode(ids[: self.stopped_after])
            self.text, final = text[: min(text.find(stop) for stop in self.stop if stop in text)], True
        end = len(self.text) if final else len(self.text) - self._held_back()
        shown, self._shown = self.text[self._shown : end], max(self._shown, end)
        return shown

    def _held_back(self) -> int:
        """Length of the longest ending of the text that is a proper beginning of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.stop if len(stop) > length):
                return length
        return 0

    def _tokens_until_stop(self, ids: Sequence[int]) -> int:
        """The fewest leading tokens whose text holds a stop string (texts of longer prefixes hold it as well)."""
        assert self.codec is not None
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            text = self.codec.decode(ids[:middle])
            low, high = (low, middle) if any(stop in text for stop in self.stop) else (middle + 1, high)
        return low
