"""What a recording shows without a reference: contributions, patterns, checks, and what follows from what."""
