"""PickScore (Kirstain et al., arXiv:2305.01569) as a raw cosine, about 0.22.

The published score is ``exp(logit_scale) * cos``, about 100 times as large. ``yuvalkirstain/PickScore_v1`` is
read unchanged, with the processor of ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K`` that its authors name.
"""

from jaggrl.rewards.clip_cosine import ClipCosine


class PickScore(ClipCosine):
    """:class:`ClipCosine` of a CLIP fine-tuned on human choices."""

    name = "pickscore"
