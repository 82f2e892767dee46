"""Other tools on the same scripts: each watches an unmodified script in a process of its own and says what it found."""
