"""What the demo's networks are told in words while they are trained, as the nodes would tell it."""

from __future__ import annotations

import numpy as np
import torch
from the_pack import load_with_host

POSITIVE = (
    "high quality, detailed, sharp focus",
    "a photograph, high quality, detailed, sharp focus",
    "sharp",
    "masterpiece, best quality, crisp",
    "clean, noise-free, natural colours",
    "",
)
NEGATIVE = (
    "blurry, noisy, low quality, jpeg artifacts",
    "blurry",
    "noise, grain",
    "low quality, compression artifacts",
    "oil painting, cartoon, blur, dirty, messy, low quality, frames, deformed, lowres",
)
SUBJECTS = (
    *("", "a cat", "a brick wall", "a field of grass", "a portrait of a woman", "a city street"),
    *("a forest", "the night sky", "a cup of coffee", "a building under a blue sky", "a flower"),
    *("printed text", "coins on a table", "an empty room", "a beach at sunset", "a red car"),
)


class Texts:
    """Embeddings of captions by the demo's own text encoder: good ones and bad ones.

    Attributes:
        contexts: [N, 77, width]; vectors: [N, adm]; the last len(NEGATIVE) are bad.
    """

    def __init__(self) -> None:
        demo, condition = load_with_host("nodes.demo"), load_with_host("nodes.condition")
        join = load_with_host("supir.conditioning").join_prompt
        clip, model = demo.load_demo_clip(), demo.build_demo_model()
        texts = [join(subject, good) for subject in SUBJECTS for good in POSITIVE]
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for text in (*texts, *NEGATIVE):
                ((context, extra),) = condition.encode(clip, text)
                vector = model.encode_adm(**extra, device="cpu")
                rows.append((context.float(), vector.float()))
        self.contexts = torch.cat([context for context, _ in rows]).clone()
        self.vectors = torch.cat([vector for _, vector in rows]).clone()
        self.good = len(texts)

    def pick(self, rng: np.random.Generator, bad: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a random (context, vector) for each entry of ``bad``: a bad or a good caption."""
        total = len(self.contexts)
        rows = [int(rng.integers(self.good, total) if b else rng.integers(self.good)) for b in bad]
        return self.contexts[rows], self.vectors[rows]
