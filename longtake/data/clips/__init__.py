"""One clip: where its file lies, its frames, their size, its caption."""
