"""Slots to batches from a store of latents and text embeddings."""
