"""Prompts to videos: reading prompts, sampling, writing files and contact sheets."""
