"""Training scripts that go wrong, or only look as if they did, each with its right verdict; and what tools say."""
