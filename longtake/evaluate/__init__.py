"""What a run shows of itself while it trains: videos of fixed prompts and start images, losses of held-out clips."""
