"""Text towers see a fixed number of tokens: count what they cannot see, and say so once."""

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 64
"""No token of the CLIP vocabularies is longer."""


def visible(text: str, tokens: int) -> str:
    """The part of a text that can matter to a tower of ``tokens`` tokens, white space collapsed.

    CLIP tokenizers collapse white space anyway, and the byte-pair merge of open_clip's is quadratic in the
    length of a word: a prompt of one million letters would take hours.
    """
    return " ".join(text.split())[: tokens * CHARACTERS_PER_TOKEN]


class Truncation:
    """Counts the distinct prompts that a tower of ``tokens`` tokens cuts, and warns at the first."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name = name
        self.tokens = tokens
        self.cut: set[str] = set()
        """The texts that were cut so far."""

    def note(self, lengths: Mapping[str, int]) -> None:
        """Note each text's length in tokens, start and end tokens included."""
        cut = {text for text, length in lengths.items() if length > self.tokens}
        if cut and not self.cut:
            message = "%s sees %d tokens: the end of longer prompts is not scored (such as %.60r...)"
            log.warning(message, self.name, self.tokens, min(cut))
        self.cut |= cut
