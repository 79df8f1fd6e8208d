"""Tables of clips: opening, checking, converting, choosing, and what is in them in numbers."""
