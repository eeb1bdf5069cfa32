"""CLIPScore (Hessel et al., arXiv:2104.08718) as the papers of this field report it.

It is the raw cosine of ``openai/clip-vit-large-patch14``, about 0.26 to 0.29: the original's factor 2.5 and
torchmetrics' 100 are left out.
"""

from jaggrl.rewards.clip_cosine import ClipCosine


class ClipScore(ClipCosine):
    """:class:`ClipCosine` of a contrastive CLIP."""

    name = "clipscore"
