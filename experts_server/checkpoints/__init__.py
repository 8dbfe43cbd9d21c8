"""All experts on disk: taken between updates, written whole or not at all, found again at the next start."""
