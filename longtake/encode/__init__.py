"""Latents and text embeddings ahead of time: what to encode (`plan`), the work (`run`), whether a store
fits a run (`fit`) and is undamaged (`verify`), and whether a run makes one first (`auto`)."""
