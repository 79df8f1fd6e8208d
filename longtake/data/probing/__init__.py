"""Tables filled in from their files: what containers say, many files at a time, and folders of clips as tables."""
