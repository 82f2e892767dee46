"""Where two runs part ways: their records side by side, what differs, and the words for it."""
